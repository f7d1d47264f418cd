"""Bytes of files: plain, gzip, xz and zip give the same; what is broken or is not what it says is named (B42)."""

import bz2
import errno
import gzip
import io
import lzma
import os
import re
import tarfile
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm_jax.data.files import read_bytes

TEXT = b"".join(b"%d squared is %d\n" % (i, i * i) for i in range(53))
GZ, XZ = gzip.compress(TEXT, mtime=0), lzma.compress(TEXT)


def zipped(members, compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(name, data, kind):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def encrypted(members):
    """The flag of encryption set in every header, local and central."""
    data = bytearray(zipped(members))
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(re.escape(header), bytes(data)):
            data[found.start() + flags] |= 1
    return bytes(data)


def read(folder, data, name, member=""):
    (folder / name).write_bytes(data)
    return read_bytes(folder / name / member)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("plain", TEXT),
        ("plain.zipped", TEXT),
        ("x.gz", GZ),
        ("X.GZ", GZ),
        ("no-ending", GZ),
        ("x.gz.gz", gzip.compress(GZ, mtime=0)),
        ("padded.gz", GZ + bytes(7)),
        ("x.xz", XZ),
        ("no-ending-xz", XZ),
        ("padded.xz", XZ + bytes(8)),
        ("x.xz.gz", gzip.compress(XZ, mtime=0)),
        ("x.gz.xz", lzma.compress(GZ)),
    ],
)
def test_what_was_written_is_read(tmp_path, name, data):
    """B42: gzip and xz are known by their first bytes, also one inside the other."""
    assert read(tmp_path, data, name) == TEXT
    assert read_bytes(str(tmp_path / name)) == TEXT


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_every_member_is_read(tmp_path, compress):
    """B42: files made by `cat one.gz two.gz` or compressed in blocks."""
    assert read(tmp_path, compress(b"a\nb") + compress(b"") + compress(b"c\n"), "x") == b"a\nbc\n"
    assert read(tmp_path, b"".join(compress(b"%d\n" % i) for i in range(1009)), "y").split() == [
        str(i).encode() for i in range(1009)
    ]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_of_a_zip(tmp_path, compression):
    data = zipped({"one.txt": b"1\n", "folder/two.txt.gz": GZ, "three.xz": XZ, "./four": b"4\n"}, compression)
    assert read(tmp_path, data, "x.zip", "one.txt") == b"1\n"
    assert read(tmp_path, data, "x.zip", "folder/two.txt.gz") == TEXT
    assert read(tmp_path, data, "X.ZIP", "three.xz") == TEXT
    assert read(tmp_path, data, "x.zip", "four") == b"4\n"


def test_the_only_file_of_a_zip_needs_no_name(tmp_path):
    assert read(tmp_path, zipped({"folder/": b"", "folder/x.gz": GZ}), "x.zip") == TEXT


def test_a_folder_may_be_named_zip(tmp_path):
    (tmp_path / "x.zip").mkdir()
    assert read(tmp_path / "x.zip", TEXT, "plain") == TEXT


TWO = zipped({"a.txt": b"a", "b/c.txt": b"c"})
PAGE, POINTER = b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"
BROKEN = [
    ("page.gz", PAGE, "", "page.gz is named .gz but is no gzip file, it begins with b'<!DOCTYPE html>'.*web page"),
    ("PAGE.GZ", PAGE, "", "PAGE.GZ is named .gz but is no gzip file"),
    ("page.xz", PAGE, "", "page.xz is named .xz but is no xz file"),
    ("page.zip", PAGE, "", "page.zip is named .zip but is no zip file, it begins with b'<!DOCTYPE"),
    ("page.zip", PAGE, "a.txt", "page.zip is named .zip but is no zip file"),
    ("pointer.gz", POINTER, "", "Git LFS pointer; fetch the file again"),
    ("pointer", POINTER, "", "pointer is a Git LFS pointer, not text: fetch the file"),
    ("empty.gz", b"", "", "empty.gz is named .gz but is no gzip file"),
    ("empty.zip", b"", "", "empty.zip is named .zip but is no zip file"),
    ("cut.gz", GZ[:-13], "", "cut.gz is cut short"),
    ("header.gz", GZ[:5], "", "header.gz is cut short"),
    ("second.gz", GZ + GZ[:11], "", "second.gz is cut short"),
    ("cut.xz", XZ[:-13], "", "cut.xz is cut short"),
    ("header.xz", XZ[:7], "", "header.xz is cut short"),
    ("second.xz", XZ + XZ[:11], "", "second.xz is cut short"),
    ("cut.zip", TWO[:-13], "", "cut.zip is cut short or damaged"),
    ("tail.gz", GZ + b"garbage", "", "tail.gz is damaged gzip data"),
    ("tail.xz", XZ + b"more than a header", "", "tail.xz is damaged xz data"),
    ("flipped.gz", GZ[:-8] + bytes(8), "", "flipped.gz is damaged gzip data"),
    ("flipped.xz", XZ[:40] + bytes(8) + XZ[48:], "", "flipped.xz is damaged xz data"),
    ("flipped.zip", zipped({"a": b"one"}, 0).replace(b"one", b"two"), "", "flipped.zip/a cannot be unpacked .*CRC"),
    ("inner.zip", zipped({"a.gz": GZ[:-13]}), "", r"inner.zip/a\.gz is cut short"),
    ("page-inner.zip", zipped({"a.gz": PAGE}), "a.gz", r"page-inner.zip/a\.gz is named \.gz"),
    ("secret.zip", encrypted({"a": b"one"}), "", "secret.zip/a is encrypted: unpack it"),
    ("two.zip", TWO, "", r"two.zip holds 2 files: name one as .*two.zip/MEMBER, MEMBER being a\.txt, b/c\.txt$"),
    ("many.zip", zipped({str(i): b"" for i in range(23)}), "", "holds 23 files: .* 18, 19 and 3 more"),
    ("none.zip", zipped({"folder/": b""}), "", "none.zip holds no files"),
    ("zip-in.zip", zipped({"x.zip": TWO}), "", r"zip-in.zip/x\.zip is a zip archive, not text: .*unpack"),
    ("other-name", TWO, "", r"other-name is a zip archive, not text: end its name in \.zip"),
    ("x.bz2", bz2.compress(TEXT), "", r"x\.bz2 is bzip2 data, not text: decompress it first"),
    ("x.zst", b"\x28\xb5\x2f\xfd\x00\x58\x09\x00\x00a", "", r"x\.zst is zstd data, not text: decompress it first"),
    (
        "x.tgz",
        gzip.compress(tarred("a", TEXT, tarfile.PAX_FORMAT)),
        "",
        r"x\.tgz is a tar archive, not text: unpack it",
    ),
    ("gnu.tar", tarred("a", TEXT, tarfile.GNU_FORMAT), "", r"gnu\.tar is a tar archive, not text"),
]


@pytest.mark.parametrize(("name", "data", "member", "message"), BROKEN, ids=[f"{n}/{m}" for n, _, m, _ in BROKEN])
def test_broken_files_are_named(tmp_path, name, data, member, message):
    """B42: one message says which file, what is wrong and what to do; nothing is read in part."""
    with pytest.raises(ValueError, match=message):
        read(tmp_path, data, name, member)


FLAWED = {"x.gz": GZ, "x.xz": XZ} | {
    f"{kind}.zip": zipped({"a": TEXT}, getattr(zipfile, kind))
    for kind in ("ZIP_STORED", "ZIP_DEFLATED", "ZIP_BZIP2", "ZIP_LZMA")
}


@settings(max_examples=101)
@given(data=st.data())
def test_a_flipped_bit_or_a_cut_is_refused_or_changes_nothing(tmp_path_factory, data):
    """B42: whatever the damage, the text is what was written or a ValueError names the file."""
    name = data.draw(st.sampled_from(sorted(FLAWED)))
    whole = FLAWED[name]
    i, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    flipped = whole[:i] + bytes([whole[i] ^ (1 << bit)]) + whole[i + 1 :]
    folder = tmp_path_factory.mktemp("flaws")
    for flawed in (flipped, whole[:i]):
        try:
            text = read(folder, flawed, name)
        except ValueError as error:
            assert name in str(error)
        else:
            assert text == TEXT


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt does not exist \(.*\): check the path"):
        read_bytes(tmp_path / "nowhere.txt")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.zip/a does not exist"):
        read_bytes(tmp_path / "nowhere.zip" / "a")
    with pytest.raises(FileNotFoundError, match="plain/a does not exist"):
        read(tmp_path, TEXT, "plain", "a")
    with pytest.raises(FileNotFoundError, match=r"two\.zip holds no c\.txt: name one of its files, a\.txt, b/c\.txt"):
        read(tmp_path, TWO, "two.zip", "c.txt")


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a directory, a file is expected: name a file in it"):
        read_bytes(tmp_path)


@pytest.mark.parametrize(("name", "data"), [("plain", TEXT), ("x.zip", TWO)])
def test_a_file_that_may_not_be_read(tmp_path, monkeypatch, name, data):
    (tmp_path / name).write_bytes(data)
    (tmp_path / name).chmod(0)
    if os.access(tmp_path / name, os.R_OK):  # root may read all

        def refuse(file, mode):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))

        monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError, match=rf"{name} may not be read \(Permission denied\): ask"):
        read_bytes(tmp_path / name)

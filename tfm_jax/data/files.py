"""Bytes of files: plain, compressed or in an archive, told by their first bytes; what is broken is named."""

import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple


class _Compression(NamedTuple):
    name: str
    suffix: str
    magic: bytes
    decompress: Callable[[bytes], bytes]


def _gunzip(data: bytes) -> bytes:
    # gzip.decompress copies the rest of the data for each member, and block-compressed files have thousands.
    return gzip.GzipFile(fileobj=io.BytesIO(data)).read()


def _unxz(data: bytes) -> bytes:
    # lzma.decompress is silent about what follows the last stream it can read: damage there would shorten the text.
    streams = []
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        streams.append(stream.decompress(data))
        if not stream.eof:
            raise EOFError
        data = stream.unused_data.lstrip(b"\0")  # padding between streams
    return b"".join(streams)


# No UTF-8 text begins with these.
_COMPRESSIONS = (
    _Compression("gzip", ".gz", b"\x1f\x8b", _gunzip),
    _Compression("xz", ".xz", b"\xfd7zXZ\x00", _unxz),
)
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
# Where, which bytes, what they say the file is, what to do.
_NO_TEXT = (
    (0, (b"BZh91AY&SY",), "bzip2 data", "decompress it first (bunzip2)"),
    (0, (b"\x28\xb5\x2f\xfd",), "zstd data", "decompress it first (unzstd)"),
    (0, _ZIP_MAGIC, "a zip archive", "end its name in .zip, or unpack it first"),
    (257, (b"ustar\x0000", b"ustar  \x00"), "a tar archive", "unpack it first (tar xf)"),
    (0, (b"version https://git-lfs.github.com/spec/v1\n",), "a Git LFS pointer", "fetch the file (git lfs pull)"),
)
# What zipfile and the decompressors under it raise for bytes that are not as they were written (OSError: bzip2).
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, NotImplementedError)
_LISTED = 20


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file: plain, gzip or xz (told by the first bytes, also one in the other), or a member of a zip.

    FILE.zip/MEMBER names a member, which may be compressed itself; FILE.zip alone is its only file. Every member of a
    gzip file and every stream of an xz file is read.

    Raises `FileNotFoundError` for a missing file or member (with the list of those there are), `IsADirectoryError`,
    `PermissionError`, and `ValueError` for a zip of several files without a member's name, an encrypted one, what its
    name says it is but is not (.gz, .xz, .zip), data that is cut short or damaged, and what must be unpacked first
    (bzip2, zstd, tar). All name the file and say what to do.
    """
    path = Path(path)
    # os.path.isfile is False where a folder may not be searched: opening the file then says so.
    archive = next((p for p in (path, *path.parents) if p.suffix.lower() == ".zip" and os.path.isfile(p)), None)
    with _opened(archive or path) as file:
        if not archive:
            return _decompressed(file.read(), str(path))
        name, data = _unzip(file, archive, PurePosixPath(path.relative_to(archive)))
    return _decompressed(data, name)


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{path} does not exist (working directory: {Path.cwd()}): check the path"
        raise FileNotFoundError(message) from error
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} is a directory, a file is expected: name a file in it") from error
    except PermissionError as error:
        raise PermissionError(f"{path} may not be read ({error.strerror}): ask for read permission") from error


def _decompressed(data: bytes, name: str) -> bytes:
    for compression in _COMPRESSIONS:
        if name.lower().endswith(compression.suffix) and not data.startswith(compression.magic):
            raise ValueError(_misnamed(name, compression.suffix, compression.name, data))
    while kind := next((kind for kind in _COMPRESSIONS if data.startswith(kind.magic)), None):
        try:
            data = kind.decompress(data)
        except EOFError as error:
            raise ValueError(
                f"{name} is cut short: its {kind.name} data ({len(data)} bytes) has no end; fetch it again"
            ) from error
        except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{name} is damaged {kind.name} data ({error}): fetch it again") from error
    for offset, magic, kind, remedy in _NO_TEXT:
        if data.startswith(magic, offset):
            raise ValueError(f"{name} is {kind}, not text: {remedy}")
    return data


def _misnamed(name: str, suffix: str, kind: str, data: bytes) -> str:
    return (
        f"{name} is named {suffix} but is no {kind} file, it begins with {data[:20]!r}: a download may have saved a "
        f"web page or a Git LFS pointer; fetch the file again, or drop {suffix} from its name if it is plain text"
    )


def _unzip(file: BinaryIO, archive: Path, member: PurePosixPath) -> tuple[str, bytes]:
    """The name for errors and the bytes of a member; PurePosixPath() stands for the only one."""
    head = file.read(20)
    try:
        opened = zipfile.ZipFile(file)
    except _DAMAGE as error:
        if not head.startswith(_ZIP_MAGIC):
            raise ValueError(_misnamed(str(archive), ".zip", "zip", head)) from error
        raise ValueError(f"{archive} is cut short or damaged ({error}): fetch it again") from error
    info = _member(opened, archive, member)
    name = f"{archive}/{info.filename}"
    if info.flag_bits & 1:
        raise ValueError(f"{name} is encrypted: unpack it with its password and name the file")
    try:
        return name, opened.read(info)
    except _DAMAGE as error:
        raise ValueError(
            f"{name} cannot be unpacked ({str(error) or 'it has no end'}): fetch {archive} again or unpack it elsewhere"
        ) from error


def _member(opened: zipfile.ZipFile, archive: Path, member: PurePosixPath) -> zipfile.ZipInfo:
    files = {PurePosixPath(info.filename): info for info in opened.infolist() if not info.filename.endswith("/")}
    if member == PurePosixPath() and len(files) == 1:
        return next(iter(files.values()))
    if member in files:
        return files[member]
    names = [str(name) for name in files]
    listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    if not files:
        raise ValueError(f"{archive} holds no files: fetch it again")
    if member == PurePosixPath():
        raise ValueError(f"{archive} holds {len(names)} files: name one as {archive}/MEMBER, MEMBER being {listed}")
    raise FileNotFoundError(f"{archive} holds no {member}: name one of its files, {listed}")

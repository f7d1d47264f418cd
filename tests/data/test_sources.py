"""Lines of files: what ends them, gzip in all its states, and errors that say where (B42)."""

import gzip

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfm_jax.data.sources import ParallelText, read_lines, read_parallel

SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(folder, data, name="text"):
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\n\r\nb\r\n", ["a", "", "b"]),
        (b"a\rb\x0bc\x0cd\x1ce\n \n", ["a\rb\x0bc\x0cd\x1ce", " "]),
        (b"a\r", ["a\r"]),
        ("\N{LINE SEPARATOR}a\x85b\n".encode(), ["\N{LINE SEPARATOR}a\x85b"]),
        ("\N{BYTE ORDER MARK}a\n\N{BYTE ORDER MARK}b".encode(), ["a", "\N{BYTE ORDER MARK}b"]),
    ],
)
def test_only_newlines_end_lines(tmp_path, data, lines):
    """B42: empty lines and lines of one space stay, so that the two sides of a corpus stay aligned."""
    assert read_lines(written(tmp_path, data)) == lines
    assert read_lines(str(written(tmp_path, gzip.compress(data, mtime=0), "text.gz"))) == lines


@SAME_FOLDER
@given(lines=st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))))
def test_lines_come_back_as_written(tmp_path, lines):
    lines = ["first", *lines]  # a mark at the start of the file would be taken for a byte order mark
    assert read_lines(written(tmp_path, "".join(f"{x}\r\n" for x in lines).encode())) == lines


def test_gzip_is_known_by_content_and_read_to_the_end(tmp_path):
    """B42: several members, a gzip file without its ending in the name, one compressed twice."""
    members = gzip.compress(b"a\nb", mtime=0) + gzip.compress(b"c\n", mtime=0) + gzip.compress(b"d\n", mtime=0)
    assert read_lines(written(tmp_path, members, "plain")) == ["a", "bc", "d"]
    assert read_lines(written(tmp_path, gzip.compress(members, mtime=0), "x.gz.gz")) == ["a", "bc", "d"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("page.gz", b"<!DOCTYPE html>", "page.gz is named .gz but is no gzip file, it begins with b'<!DOCTYPE html>'"),
        ("pointer.gz", b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer; fetch the file again"),
        ("empty.gz", b"", "empty.gz is named .gz but is no gzip file"),
        ("cut.gz", gzip.compress(b"some text\n" * 97, mtime=0)[:-13], "cut.gz is cut short"),
        ("header.gz", gzip.compress(b"some text\n", mtime=0)[:5], "header.gz is cut short"),
        ("second.gz", gzip.compress(b"a\n", mtime=0) + gzip.compress(b"b\n", mtime=0)[:11], "second.gz is cut short"),
        ("tail.gz", gzip.compress(b"a\n", mtime=0) + b"garbage", "tail.gz is damaged gzip data"),
        ("flipped.gz", gzip.compress(b"a\n", mtime=0)[:-8] + bytes(8), "flipped.gz is damaged gzip data"),
        ("latin", "one\ntwo\nna\u00efve\n".encode("latin-1"), "latin:3: byte 3 of the line, 0xef, is not UTF-8"),
        ("latin.gz", gzip.compress(b"\xff", mtime=0), r"latin.gz:1: byte 1 of the line, 0xff, is not UTF-8: .*iconv"),
    ],
)
def test_broken_files_are_named(tmp_path, name, data, message):
    """B42: what is not text is said to be so, with the place; nothing is read in part."""
    with pytest.raises(ValueError, match=message):
        read_lines(written(tmp_path, data, name))


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt does not exist .*: check the path"):
        read_lines(tmp_path / "nowhere.txt")


def test_parallel_files(tmp_path):
    """B42: sides of unequal length are refused, with both names and counts."""
    one, two = written(tmp_path, b"a\n\nc\n", "one"), written(tmp_path, gzip.compress(b"x\ny\nz", mtime=0), "two")
    text = read_parallel(one, two)
    assert text == ParallelText(["a", "", "c"], ["x", "y", "z"], str(one), str(two))
    assert len(text) == 3
    with pytest.raises(ValueError, match=r"one has 3 lines, .*three has 2: line i"):
        read_parallel(one, written(tmp_path, b"x\ny\n", "three"))

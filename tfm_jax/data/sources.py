"""Text from files: lines that end in \\n or \\r\\n, plain or gzip, checked, and named so that errors can point."""

import codecs
import gzip
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class ParallelText:
    """Aligned sentences: `target[i]` translates `source[i]`. The names (files, or what made them) appear in errors."""

    source: list[str]
    target: list[str]
    source_name: str
    target_name: str
    first_line: int = 1
    """Where in its files the text begins, for the line numbers in errors."""

    def __post_init__(self):
        if len(self.source) != len(self.target):
            raise ValueError(
                f"{self.source_name} has {len(self.source)} lines, {self.target_name} has {len(self.target)}: "
                "line i of one must translate line i of the other"
            )

    def __len__(self):
        return len(self.source)

    def split(self, first: int) -> tuple["ParallelText", "ParallelText"]:
        """The first pairs and the others."""
        head, tail = slice(None, first), slice(first, None)
        return replace(self, source=self.source[head], target=self.target[head]), replace(
            self, source=self.source[tail], target=self.target[tail], first_line=self.first_line + first
        )


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a UTF-8 file, plain or gzip (told by its first bytes, not its name), without their ends.

    Only \\n and \\r\\n end a line: a lone \\r, a form feed or U+2028 is part of one, so the count is that of `wc -l`.
    The last line may lack its end; a byte order mark is no text. Every member of a gzip file is read.

    Raises `FileNotFoundError` for a missing file, `ValueError` naming the file for broken gzip and file:line for bytes
    that are not UTF-8.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist (working directory: {Path.cwd()}): check the path")
    data = path.read_bytes()
    if path.suffix == ".gz" and not data.startswith(_GZIP_MAGIC):
        raise ValueError(
            f"{path} is named .gz but is no gzip file, it begins with {data[:20]!r}: a download may have saved a web "
            "page or a Git LFS pointer; fetch the file again, or drop .gz from its name if it is plain text"
        )
    while data.startswith(_GZIP_MAGIC):  # no UTF-8 text begins so; a file compressed twice is read as well
        data = _decompress(data, path)
    return split_lines(data, str(path))


def split_lines(data: bytes, name: str) -> list[str]:
    """The lines of UTF-8 bytes, as `read_lines` says; `name` is what errors call them."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        lines = data.decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        line = data.count(b"\n", 0, start) + 1
        raise ValueError(
            f"{name}:{line}: byte {error.start - start + 1} of the line, "
            f"0x{data[error.start]:02x}, is not UTF-8: convert the file (iconv -t UTF-8) or mend the line"
        ) from error
    return lines if lines[-1] else lines[:-1]


def read_parallel(source_path: str | os.PathLike[str], target_path: str | os.PathLike[str]) -> ParallelText:
    """Two files of which line i translates line i; raises as `read_lines`, and `ValueError` for unequal counts."""
    return ParallelText(read_lines(source_path), read_lines(target_path), str(source_path), str(target_path))


def _decompress(data: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(data)
    except EOFError as error:
        raise ValueError(
            f"{path} is cut short: its gzip data ({len(data)} bytes) has no end; fetch it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged gzip data ({error}): fetch it again") from error

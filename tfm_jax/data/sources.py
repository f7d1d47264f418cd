"""Text from files: lines, paragraphs, columns, keys; checked, and named by file and line so that errors can point."""

import codecs
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int32

from tfm_jax.config import Data
from tfm_jax.data.files import read_bytes

Split = Literal["train", "validation", "test"]
_MOST_HELD_OUT = 1000


@dataclass(frozen=True)
class Text:
    """Examples as strings: one column for a text, two of equal length for a pair or two texts classified together."""

    columns: tuple[list[str], ...]
    """`columns[c][i]` is text c of example i."""
    names: tuple[str, ...]
    """What errors call each column: its file, or what made it."""
    labels: Int32[np.ndarray, " N"] | Float32[np.ndarray, " N"] | None = None
    """The class (int32) or the value (float32) of each example, where there is one."""
    lines: Sequence[int] = ()
    """The line of its file in which each example begins; left out: 1, 2, 3, ..."""

    def __post_init__(self):
        name, count = self.names[0], len(self.columns[0])
        if len(self.names) != len(self.columns):
            raise ValueError(f"{len(self.columns)} columns have the names {self.names}: one for each is expected")
        for other, column in zip(self.names, self.columns, strict=True):
            if len(column) != count:
                raise ValueError(
                    f"{name} has {count} lines, {other} has {len(column)}: "
                    "line i of one must translate line i of the other"
                )
        object.__setattr__(self, "lines", self.lines or range(1, count + 1))
        for what, values in (("labels", self.labels), ("line numbers", self.lines)):
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {count} examples, {len(values)} {what}: one for each is expected")

    def __len__(self):
        return len(self.columns[0])

    @property
    def source(self) -> list[str]:
        """The first column."""
        return self.columns[0]

    @property
    def target(self) -> list[str]:
        """The second column."""
        return self.columns[1]

    def where(self, i: int, column: int = 0) -> str:
        """file:line of example i."""
        return f"{self.names[column]}:{self.lines[i]}"

    def split(self, first: int) -> tuple["Text", "Text"]:
        """The first examples and the others."""
        return self._slice(slice(None, first)), self._slice(slice(first, None))

    def _slice(self, part: slice) -> "Text":
        labels = None if self.labels is None else self.labels[part]
        return Text(tuple(column[part] for column in self.columns), self.names, labels, self.lines[part])


def parallel(source: list[str], target: list[str], source_name: str, target_name: str) -> Text:
    """Aligned sentences: `target[i]` translates `source[i]`. `ValueError` with names and counts if they are unequal."""
    return Text((source, target), (source_name, target_name))


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a UTF-8 file without their ends; `files.read_bytes` says what a file may be and what it raises.

    Only \\n and \\r\\n end a line: a lone \\r, a form feed or U+2028 is part of one, so the count is that of `wc -l`.
    The last line may lack its end; a byte order mark is no text. Raises `ValueError` with file:line for bytes that are
    not UTF-8.
    """
    return split_lines(read_bytes(path), str(path))


def split_lines(data: bytes, name: str) -> list[str]:
    """The lines of UTF-8 bytes, as `read_lines` says; `name` is what errors call them."""
    lines = _decode(data, name).split("\n")
    return lines if lines[-1] else lines[:-1]


def read_parallel(source_path: str | os.PathLike[str], target_path: str | os.PathLike[str]) -> Text:
    """Two files of which line i translates line i; raises as `read_lines`, and `ValueError` for unequal counts."""
    return parallel(read_lines(source_path), read_lines(target_path), str(source_path), str(target_path))


def read_text(path: str | os.PathLike[str], documents: Literal["lines", "paragraphs", "file"] = "lines") -> Text:
    """A file of one side. An example is a line, a paragraph (lines joined by \\n, ended by lines that are empty or
    white space), or the whole file as it is but for \\r\\n, which is read as \\n. Raises as `read_lines`.
    """
    names = (str(path),)
    if documents == "file":
        whole = _decode(read_bytes(path), str(path))
        return Text(([whole] if whole else [],), names)
    lines = read_lines(path)
    if documents == "lines":
        return Text((lines,), names)
    runs = itertools.groupby(enumerate(lines, 1), key=lambda numbered: not numbered[1].strip())
    paragraphs = [list(run) for blank, run in runs if not blank]
    texts = ["\n".join(line for _, line in paragraph) for paragraph in paragraphs]
    return Text((texts,), names, lines=[paragraph[0][0] for paragraph in paragraphs])


def read_tsv(path: str | os.PathLike[str], features: Sequence[str], label: str = "") -> Text:
    """Columns of a file of tab-separated values, in which a quote is text as any other character.

    `features` and `label` (empty: none) name columns of the header line; if all of them are numbers, they count from 1
    and the file has no header. Labels are int32 if all are integers, else float32.

    Raises as `read_lines`, and `ValueError` for an unknown column (with the header), and with file:line for a row of
    another number of columns and a label that is no number.
    """
    name, lines = str(path), read_lines(path)
    if not lines:
        raise ValueError(_empty(name))
    width, wanted = lines[0].count("\t") + 1, (*features, label) if label else tuple(features)
    by_number = all(re.fullmatch("[0-9]+", x) for x in wanted)
    header = [str(i) for i in range(1, width + 1)] if by_number else lines[0].split("\t")
    for x in wanted:
        if header.count(x) != 1:
            kind = "columns by number" if by_number else "names in its first line"
            raise ValueError(f"{name}:1: {x!r} is not exactly one of the {kind}: {', '.join(header)}")
    first = 1 if by_number else 2
    rows = [line.split("\t") for line in lines[first - 1 :]]
    for i, row in enumerate(rows, first):
        if len(row) != width:
            raise ValueError(f"{name}:{i} has {len(row)} columns, line 1 has {width}: as many tabs are expected")
    columns = {x: [row[header.index(x)] for row in rows] for x in wanted}
    text = Text(tuple(columns[x] for x in features), (name,) * len(features), lines=range(first, len(rows) + first))
    return replace(text, labels=_labels([_number(x) for x in columns[label]], text)) if label else text


def read_jsonl(path: str | os.PathLike[str], features: Sequence[str], label: str = "") -> Text:
    """Keys of a file with one JSON object a line; `translation.de` is the key `de` of the object `translation`.

    Blank lines are no examples. Labels (`label` empty: none) are int32 if all are integers or booleans, else float32.
    Raises as `read_lines`, and `ValueError` with file:line for what is not JSON or not an object, a missing key, a
    feature that is no string and a label that is no number.
    """
    name = str(path)
    lines = [(i, f"{name}:{i}", line) for i, line in enumerate(read_lines(path), 1) if line.strip()]
    records = [(where, _parse(line, where)) for _, where, line in lines]
    columns = tuple([_string(record, key, where) for where, record in records] for key in features)
    text = Text(columns, (name,) * len(features), lines=[i for i, _, _ in lines])
    return replace(text, labels=_labels([_inside(x, label, where) for where, x in records], text)) if label else text


def read_split(data: Data, split: Split) -> Text:
    """The text of a split as the configuration names it; relative names count from `data.dir`.

    Without a validation text, the end of the training text is held out for it: a tenth, at most 1,000 examples, or of
    one document the last tenth of its characters. Without a test text, it is the validation text. Raises as the readers
    of the format, and `ValueError` for a text that is not given, empty, or too small to hold some out.
    """
    if split == "test" and not data.test_source:
        split = "validation"
    if split == "test" or data.validation_source:
        return _read(data, split)
    train, validation = _hold_out(_read(data, "train"), data)
    return train if split == "train" else validation


def read_splits(data: Data) -> dict[Split, Text]:
    """All that `read_split` reads, by split; a file that serves two of them is read once."""
    if data.validation_source:
        train, validation = _read(data, "train"), _read(data, "validation")
    else:
        train, validation = _hold_out(_read(data, "train"), data)
    return {"train": train, "validation": validation, "test": _read(data, "test") if data.test_source else validation}


def _read(data: Data, split: Split) -> Text:
    source, target = (getattr(data, f"{split}_{side}") for side in ("source", "target"))
    if not source:
        value = {"tfds": "SPLIT", "dates": "NUMBER"}.get(data.format, "FILE")
        pairs = f", and for pairs --data.{split}-target FILE" if data.format == "text" else ""
        raise ValueError(f"data.{split}_source is empty: give --data.{split}-source {value}{pairs}")
    path = Path(data.dir) / source
    match data.format:
        case "text":
            text = read_parallel(path, Path(data.dir) / target) if target else read_text(path, data.documents)
        case "tsv":
            text = read_tsv(path, data.features, data.label)
        case "jsonl":
            text = read_jsonl(path, data.features, data.label)
        case "tfds":
            from tfm_jax.data.builders import read_tfds

            text = read_tfds(data.dataset, source, data.features, data.label, data.dir)
        case "dates":
            text = _dates(source, split, data.seed)
    if not len(text):
        raise ValueError(_empty(text.names[0]))
    return text


def _dates(number: str, split: Split, seed: int) -> Text:
    from tfm_jax.data.synthetic import dates

    if not re.fullmatch("[0-9]+", number):
        raise ValueError(f"data.{split}_source is {number!r}: for dates, a number of pairs is expected")
    return dates(**{"train": 0, "validation": 0, "test": 0} | {split: int(number)}, seed=seed)[split]


def _hold_out(text: Text, data: Data) -> tuple[Text, Text]:
    one = data.documents == "file"
    count = len(text.source[0]) if one else len(text)
    first = int(0.9 * count) if one else count - min(_MOST_HELD_OUT, count // 10)
    if not 0 < first < count:
        raise ValueError(
            f"{text.names[0]} has {count} {'characters' if one else 'examples'}, too few to hold some out for "
            "validation: give data.validation_source"
        )
    if not one:
        return text.split(first)
    head, tail = text.source[0][:first], text.source[0][first:]
    return Text(([head],), text.names), Text(([tail],), text.names, lines=[1 + head.count("\n")])


def _decode(data: bytes, name: str) -> str:
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        line = data.count(b"\n", 0, start) + 1
        raise ValueError(
            f"{name}:{line}: byte {error.start - start + 1} of the line, "
            f"0x{data[error.start]:02x}, is not UTF-8: convert the file (iconv -t UTF-8) or mend the line"
        ) from error


def _empty(name: str) -> str:
    return f"{name} is empty: at least one example is needed"


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON ({error}): one object a line is expected") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {line[:40]!r} is no JSON object: {{...}} with the keys is expected")
    return record


def _inside(record: dict[str, Any], path: str, where: str) -> Any:
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            there = f"the keys are {', '.join(value)}" if isinstance(value, dict) else f"it is in {value!r:.40}"
            raise ValueError(f"{where}: there is no {key!r} of {path!r}: {there}")
        value = value[key]
    return value


def _string(record: dict[str, Any], path: str, where: str) -> str:
    value = _inside(record, path, where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {path!r} is {value!r:.40}: a string is expected")
    if re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{where}: {path!r} has half a surrogate pair (\\ud800 to \\udfff): it is no text, mend it")
    return value


def _number(text: str) -> int | float | str:
    """What the text says, or the text if that is no number."""
    try:
        return int(text) if re.fullmatch("[+-]?[0-9]+", text) else float(text)
    except ValueError:
        return text


def _labels(values: list[Any], text: Text) -> Int32[np.ndarray, " N"] | Float32[np.ndarray, " N"]:
    dtype = np.int32 if all(isinstance(value, int) for value in values) else np.float32
    most = float(np.iinfo(dtype).max if dtype is np.int32 else np.finfo(dtype).max)
    for i, value in enumerate(values):
        if not isinstance(value, int | float) or not abs(value) <= most:  # a NaN compares as False
            hint = "; a header? name the columns by it" if text.lines[i] == 1 else ""
            raise ValueError(f"{text.where(i)}: label {value!r:.40}: a class number or a value is expected{hint}")
    return np.array(values, dtype)

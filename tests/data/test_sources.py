"""Text of files: what ends a line, a paragraph, a column; splits; and errors that say where (B42)."""

import gzip
import json
import lzma
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfm_jax.config import Data
from tfm_jax.data import sources
from tfm_jax.data.sources import (
    Text,
    parallel,
    read_jsonl,
    read_lines,
    read_parallel,
    read_split,
    read_splits,
    read_text,
    read_tsv,
)

SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
LINES = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])))
BOM = "\N{BYTE ORDER MARK}"


def written(folder, data, name="text"):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def same(text, *columns, lines=None, labels=None):
    assert text.columns == columns
    assert list(text.lines) == list(lines or range(1, len(columns[0]) + 1))
    assert (text.labels is None) == (labels is None)
    if labels is not None:
        assert text.labels.dtype == labels.dtype
        np.testing.assert_array_equal(text.labels, labels)
    return True


# Text


def test_a_text_knows_where_its_examples_come_from():
    text = Text((["a", "b", "c"], ["d", "e", "f"]), ("one", "two"), np.array([5, 6, 7], np.int32), [2, 3, 11])
    assert len(text) == 3 and text.source == ["a", "b", "c"] and text.target == ["d", "e", "f"]
    assert text.where(2) == "one:11" and text.where(0, 1) == "two:2"
    head, tail = text.split(2)
    assert same(head, ["a", "b"], ["d", "e"], lines=[2, 3], labels=np.array([5, 6], np.int32))
    assert same(tail, ["c"], ["f"], lines=[11], labels=np.array([7], np.int32))
    assert tail.where(0, 1) == "two:11"


def test_lines_count_from_one_and_go_on_in_the_second_part():
    text = parallel(["a", "b", "c"], ["d", "e", "f"], "one", "two")
    assert [text.where(i) for i in range(3)] == ["one:1", "one:2", "one:3"]
    assert text.split(1)[1].where(1, 1) == "two:3"
    for empty, whole in (text.split(0), text.split(3)[::-1]):
        assert len(empty) == 0 and len(empty.lines) == 0 and whole == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((["a", "b", "c"], ["d"]), ("one", "two")), "one has 3 lines, two has 1: line i of one must translate line i"),
        (((["a"], ["d"]), ("one",)), r"2 columns have the names \('one',\): one for each"),
        (((["a"],), ("one",), np.zeros(3, np.float32)), "one has 1 examples, 3 labels: one for each"),
        (((["a", "b"],), ("one",), None, [5]), "one has 2 examples, 1 line numbers: one for each"),
    ],
)
def test_a_text_of_parts_that_do_not_fit_is_refused(fields, message):
    """B42: sides of unequal length are refused, with both names and counts."""
    with pytest.raises(ValueError, match=message):
        Text(*fields)


# Lines


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
        (b"a\0b\n\0", ["a\0b", "\0"]),
        ("\N{LINE SEPARATOR}a\x85b\n".encode(), ["\N{LINE SEPARATOR}a\x85b"]),
        (f"{BOM}a\n{BOM}b".encode(), ["a", f"{BOM}b"]),
        (BOM.encode(), []),
        (b"x" * 1_000_003 + b"\ny", ["x" * 1_000_003, "y"]),
    ],
)
def test_only_newlines_end_lines(tmp_path, data, lines):
    """B42: empty lines and lines of one space stay, so that the two sides of a corpus stay aligned."""
    assert read_lines(written(tmp_path, data)) == lines
    assert read_lines(str(written(tmp_path, gzip.compress(data, mtime=0), "text.gz"))) == lines


@SAME_FOLDER
@given(lines=LINES)
def test_lines_come_back_as_written(tmp_path, lines):
    """B42: n lines in, n lines out, whatever file holds them."""
    lines = ["first", *lines]  # a mark at the start of the file would be taken for a byte order mark
    for end in ("\n", "\r\n"):
        data = "".join(line + end for line in lines).encode()
        expected = lines if end == "\r\n" else [line.removesuffix("\r") for line in lines]
        with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("other.txt", b"other")
            archive.writestr("folder/text", data)
        assert read_lines(written(tmp_path, data)) == expected
        assert read_lines(written(tmp_path, gzip.compress(data), "text.gz")) == expected
        assert read_lines(written(tmp_path, lzma.compress(data), "text.xz")) == expected
        assert read_lines(tmp_path / "x.zip" / "folder" / "text") == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("latin", "one\ntwo\nna\u00efve\n".encode("latin-1"), "latin:3: byte 3 of the line, 0xef, is not UTF-8"),
        ("latin.gz", gzip.compress(b"\xff", mtime=0), r"latin.gz:1: byte 1 of the line, 0xff, is not UTF-8: .*iconv"),
        ("cut", "a\nb\u00e9".encode()[:-1], "cut:2: byte 2 of the line, 0xc3"),
        ("surrogate", b"a\n\n\xed\xa0\x80", "surrogate:3: byte 1 of the line, 0xed"),
        ("utf16", "a\n".encode("utf-16"), "utf16:1: byte 1 of the line, 0xff"),
    ],
)
def test_what_is_not_utf8_is_named_by_line_and_byte(tmp_path, name, data, message):
    """B42: nothing is replaced or left out."""
    with pytest.raises(ValueError, match=message):
        read_lines(written(tmp_path, data, name))
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / name, "file")


def test_parallel_files(tmp_path):
    """B42: blank lines count, and sides of unequal length are refused."""
    one, two = written(tmp_path, b"a\n\nc\n", "one"), written(tmp_path, gzip.compress(b"x\ny\nz", mtime=0), "two")
    assert read_parallel(one, two) == parallel(["a", "", "c"], ["x", "y", "z"], str(one), str(two))
    with pytest.raises(ValueError, match=r"one has 3 lines, .*three has 2: line i"):
        read_parallel(one, written(tmp_path, b"x\ny\n", "three"))


# Documents

STORY = f"{BOM}\r\n \t\na b\r\n c \n\nd\n\N{EM SPACE}\n\x0c\n\ne\rf"


def test_documents_of_a_text(tmp_path):
    path = written(tmp_path, STORY)
    assert same(read_text(path), ["", " \t", "a b", " c ", "", "d", "\N{EM SPACE}", "\x0c", "", "e\rf"])
    assert same(read_text(path, "paragraphs"), ["a b\n c ", "d", "e\rf"], lines=[3, 6, 10])
    assert same(read_text(path, "file"), [STORY.removeprefix(BOM).replace("\r\n", "\n")])
    assert read_text(path, "paragraphs").where(1) == f"{path}:6"


@pytest.mark.parametrize("documents", ["lines", "paragraphs", "file"])
@pytest.mark.parametrize("data", [b"", BOM.encode()])
def test_an_empty_file_has_no_examples(tmp_path, documents, data):
    assert same(read_text(written(tmp_path, data), documents), [])


@SAME_FOLDER
@given(lines=LINES)
def test_paragraphs_hold_every_line_that_is_not_blank(tmp_path, lines):
    path = written(tmp_path, "".join(f"{line}\r\n" for line in ["first", *lines]))
    text = read_text(path, "paragraphs")
    assert [x for p in text.source for x in p.split("\n")] == [x for x in read_lines(path) if x.strip()]
    assert [p.split("\n")[0] for p in text.source] == [read_lines(path)[i - 1] for i in text.lines]


# TSV

TABLE = 'id\tsentence\tother\tlabel\n7\tso "good\tx\t1\n8\t\t y\t0\n9\tthe end\t\t-3\n'


def test_columns_by_name_and_by_number(tmp_path):
    path = written(tmp_path, TABLE)
    sentence, other, labels = ['so "good', "", "the end"], ["x", " y", ""], np.array([1, 0, -3], np.int32)
    assert same(read_tsv(path, ("sentence",)), sentence, lines=[2, 3, 4])
    assert same(read_tsv(path, ("other", "sentence"), "label"), other, sentence, lines=[2, 3, 4], labels=labels)
    bare = written(tmp_path, TABLE.split("\n", 1)[1], "bare")
    assert same(read_tsv(bare, ("2",)), sentence)
    assert same(read_tsv(bare, ("3", "2"), "4"), other, sentence, labels=labels)
    assert same(read_tsv(path, ("2",)), ["sentence", *sentence])
    assert read_tsv(path, ("other", "sentence")).where(0, 1) == f"{path}:2"


def test_a_column_may_have_a_number_for_its_name(tmp_path):
    path = written(tmp_path, "1\ttext\n5\tsome\n")
    assert same(read_tsv(path, ("text",), "1"), ["some"], lines=[2], labels=np.array([5], np.int32))


CELLS = st.text(st.characters(exclude_characters="\n\t", exclude_categories=["Cs"]))


@SAME_FOLDER
@given(rows=st.lists(st.tuples(CELLS, CELLS, st.integers(-(2**31) + 1, 2**31 - 1))))
def test_rows_come_back_as_written(tmp_path, rows):
    rows = [("first", "row", 0), *rows]
    written(tmp_path, "".join("\t".join(map(str, row)) + "\r\n" for row in rows), "x.tsv")
    first, second, labels = ([row[i] for row in rows] for i in range(3))
    text = read_tsv(tmp_path / "x.tsv", ("2", "1"), "3")
    assert same(text, second, first, labels=np.array(labels, np.int32))


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        (["1", "-0", "+7"], np.array([1, 0, 7], np.int32)),
        (["1", "2.5", "-1e-3"], np.array([1, 2.5, -0.001], np.float32)),
        (["2147483647"], np.array([2**31 - 1], np.int32)),
        (["2147483648", ".5"], np.array([2**31, 0.5], np.float32)),
    ],
)
def test_labels_are_classes_or_values(tmp_path, cells, labels):
    path = written(tmp_path, "".join(f"text\t{cell}\n" for cell in cells))
    assert same(read_tsv(path, ("1",), "2"), ["text"] * len(cells), labels=labels)


@pytest.mark.parametrize(
    ("data", "features", "label", "message"),
    [
        (
            TABLE,
            ("text",),
            "",
            r"x:1: 'text' is not exactly one of the names in its first line: id, sentence, other, l",
        ),
        (TABLE, ("sentence",), "2", "x:1: '2' is not exactly one of the names"),
        ("a\ta\n1\t2\n", ("a",), "", "x:1: 'a' is not exactly one of the names"),
        (TABLE, ("2",), "5", "x:1: '5' is not exactly one of the columns by number: 1, 2, 3, 4"),
        (TABLE, ("0",), "", "x:1: '0' is not exactly one"),
        ("a\tb\n1\t2\n3\n", ("a",), "", "x:3 has 1 columns, line 1 has 2"),
        ("1\t2\n3\t4\t5\n", ("1",), "", "x:2 has 3 columns, line 1 has 2"),
        ("a\tb\n\n", ("a",), "", "x:2 has 1 columns, line 1 has 2"),
        ("a\tb\n1\tgood\n", ("a",), "b", "x:2: label 'good': a class number or a value is expected$"),
        ("a\tb\n1\t2\n", ("1",), "2", "x:1: label 'b': .*a header.*name"),
        ("1\t1\n1\t\n", ("1",), "2", "x:2: label ''"),
        ("1\tnan\n", ("1",), "2", "x:1: label nan"),
        ("1\t.5\n1\tinf\n", ("1",), "2", "x:2: label inf"),
        ("1\t.5\n1\t1e39\n", ("1",), "2", "x:2: label 1e\\+39"),
        ("1\t2147483648\n", ("1",), "2", "x:1: label 2147483648"),
        ("1\t" + "9" * 5003, ("1",), "2", "x:1: label '99999"),
        ("", ("1",), "", "x is empty: at least one example"),
        (b"a\tb\n1\t\xff\n", ("a",), "", "x:2: byte 3 of the line, 0xff"),
    ],
)
def test_broken_tables_are_named(tmp_path, data, features, label, message):
    """B42: a row out of step is an error with its line, not a row left out or filled up."""
    with pytest.raises(ValueError, match=message):
        read_tsv(written(tmp_path, data, "x"), features, label)


# JSON lines


def test_keys_of_json_lines(tmp_path):
    records = [{"id": 3, "translation": {"de": f"ä\n\t{i}\u2028", "en": "\U0001f600"}, "label": i} for i in range(3)]
    lines = [json.dumps(records[0]), " ", "", json.dumps(records[1], ensure_ascii=False), json.dumps(records[2])]
    path = written(tmp_path, "\r\n".join(lines))
    german, english = [f"ä\n\t{i}\u2028" for i in range(3)], ["\U0001f600"] * 3
    assert same(read_jsonl(path, ("translation.de",)), german, lines=[1, 4, 5])
    text = read_jsonl(path, ("translation.en", "translation.de"), "label")
    assert same(text, english, german, lines=[1, 4, 5], labels=np.array([0, 1, 2], np.int32))
    assert text.where(1, 1) == f"{path}:4"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([True, False, 3], np.array([1, 0, 3], np.int32)),
        ([1, 0.5], np.array([1, 0.5], np.float32)),
        ([1.0, 2.0], np.array([1, 2], np.float32)),
    ],
)
def test_labels_of_json_lines(tmp_path, values, labels):
    path = written(tmp_path, "".join(json.dumps({"x": "text", "y": {"z": value}}) + "\n" for value in values))
    assert same(read_jsonl(path, ("x",), "y.z"), ["text"] * len(values), labels=labels)


@pytest.mark.parametrize(
    ("data", "label", "message"),
    [
        ('{"a": "b"}\n\n{"a": "b"', "", "x:3: no JSON .*one object a line is expected"),
        ("[" * 100_003, "", "x:1: no JSON .*recursion"),
        ('{"a": "b"}{"a": "c"}', "", "x:1: no JSON .*Extra data"),
        ('["a"]', "", r"x:1: '\[\"a\"\]' is no JSON object"),
        ('{"a": "b"}\n{"b": "a", "c": 1}', "", "x:2: there is no 'a' of 'a': the keys are b, c"),
        ('{"a": {"b": "c"}}', "", "x:1: 'a' is {'b': 'c'}: a string is expected"),
        ('{"a": null}', "", "x:1: 'a' is None: a string"),
        ('{"a": "\\ud83d!"}', "", "x:1: 'a' has half a surrogate pair"),
        ('{"a": "b", "y": {"z": "good"}}', "y.z", "x:1: label 'good': a class number"),
        ('{"a": "b", "y": {"z": NaN}}', "y.z", "x:1: label nan"),
        ('{"a": "b", "y": {"z": null}}', "y.z", "x:1: label None"),
        ('{"a": "b", "y": {"w": 1}}', "y.z", "x:1: there is no 'z' of 'y.z': the keys are w"),
        ('{"a": "b", "y": 5}', "y.z", "x:1: there is no 'z' of 'y.z': it is in 5"),
    ],
)
def test_broken_json_lines_are_named(tmp_path, data, label, message):
    """B42: no record is left out without a word."""
    with pytest.raises(ValueError, match=message):
        read_jsonl(written(tmp_path, data, "x"), ("a",), label)


# Splits


def numbered(folder, name, count, start=0):
    written(folder, "".join(f"{name} {i}\n" for i in range(start, start + count)), name)
    return [f"{name} {i}" for i in range(start, start + count)]


def test_splits_of_pairs(tmp_path):
    """Names that are relative count from data.dir, absolute ones do not."""
    sides = {name: numbered(tmp_path, name, n) for name, n in {"a.de": 7, "a.en": 7, "b.de": 3, "b.en": 3}.items()}
    data = Data(
        dir=str(tmp_path),
        train_source="a.de",
        train_target="a.en",
        validation_source=str(tmp_path / "b.de"),
        validation_target="b.en",
    )
    splits = read_splits(data)
    assert same(splits["train"], sides["a.de"], sides["a.en"]) and same(
        splits["validation"], sides["b.de"], sides["b.en"]
    )
    assert splits["test"] is splits["validation"] and list(splits) == ["train", "validation", "test"]
    assert splits["train"].names == (str(tmp_path / "a.de"), str(tmp_path / "a.en"))
    assert {split: read_split(data, split) for split in splits} == splits


@pytest.mark.parametrize(("count", "held_out"), [(10, 1), (19, 1), (103, 10), (10_007, 1000)])
def test_the_end_of_the_training_text_is_held_out(tmp_path, count, held_out):
    lines, test = numbered(tmp_path, "train", count), numbered(tmp_path, "test", 2)
    data = Data(dir=str(tmp_path), train_source="train", test_source="test")
    splits = read_splits(data)
    assert same(splits["train"], lines[:-held_out]) and same(splits["test"], test)
    assert same(splits["validation"], lines[-held_out:], lines=range(count - held_out + 1, count + 1))
    assert {split: read_split(data, split) for split in splits} == splits


def test_the_end_of_a_document_is_held_out(tmp_path):
    """The split of nanoGPT's data: the first int(0.9 n) characters train."""
    whole = "".join(f"line {i} of ä\n" for i in range(23))
    data = Data(documents="file", train_source=str(written(tmp_path, whole)))
    train, validation, test = read_splits(data).values()
    first = int(0.9 * len(whole))
    assert same(train, [whole[:first]]) and test is validation
    assert same(validation, [whole[first:]], lines=[21])
    assert validation.source[0] in "\n".join(whole.split("\n")[20:])


def test_a_file_is_read_once(tmp_path, monkeypatch):
    """Also one that cannot be read twice, as a pipe."""
    reads, read_bytes = [], sources.read_bytes
    monkeypatch.setattr(sources, "read_bytes", lambda path: reads.append(path.name) or read_bytes(path))
    for name in ("a.de", "a.en", "test"):
        numbered(tmp_path, name, 11)
    read_splits(Data(dir=str(tmp_path), train_source="a.de", train_target="a.en"))
    assert reads == ["a.de", "a.en"]
    reads.clear()
    read_split(Data(dir=str(tmp_path), train_source="a.de", test_source="test"), "test")
    assert reads == ["test"]


def test_splits_of_tables_and_json_lines(tmp_path):
    written(tmp_path, "t\tl\n" + "".join(f"{i}\t{i % 3}\n" for i in range(13)), "train.tsv")
    written(tmp_path, "t\tl\nx\t0.5\n", "dev.tsv")
    data = Data(format="tsv", features=("t",), label="l", dir=str(tmp_path), train_source="train.tsv")
    train, validation, _ = read_splits(data).values()
    assert same(train, [str(i) for i in range(12)], lines=range(2, 14), labels=np.arange(12, dtype=np.int32) % 3)
    assert same(validation, ["12"], lines=[14], labels=np.array([0], np.int32))
    lines = "".join(json.dumps({"a": {"b": str(i)}, "c": "d", "e": i}) + "\n\n" for i in range(13))
    data = Data(format="jsonl", features=("a.b", "c"), label="e", train_source=str(written(tmp_path, lines)))
    assert same(read_split(data, "validation"), ["12"], ["d"], lines=[25], labels=np.array([12], np.int32))


def test_paragraphs_of_a_split(tmp_path):
    written(tmp_path, "".join(f"{i}\n{i}\n\n" for i in range(11)), "train")
    data = Data(documents="paragraphs", dir=str(tmp_path), train_source="train")
    assert same(read_split(data, "validation"), ["10\n10"], lines=[31])


def test_splits_of_dates():
    """A split is that of all of them made together, and without a validation text the end of the training text."""
    pytest.importorskip("babel")
    from tfm_jax.data.synthetic import dates

    data = Data(format="dates", train_source="31", validation_source="5", test_source="7", seed=3)
    assert read_splits(data) == dates(train=31, validation=5, test=7, seed=3)
    data = Data(format="dates", train_source="31")
    train, validation, test = read_splits(data).values()
    assert (train, validation) == dates(train=31, validation=0, test=0, seed=0)["train"].split(
        28
    ) and test is validation
    with pytest.raises(ValueError, match="train source is empty"):
        read_splits(Data(format="dates", train_source="0"))
    with pytest.raises(ValueError, match=r"data\.test_source is 'all': for dates, a number of pairs is expected"):
        read_split(Data(format="dates", train_source="31", test_source="all"), "test")


def test_splits_of_tfds(monkeypatch):
    """B44: nothing of TFDS is imported before a data set of it is asked for."""
    calls = []

    def read_tfds(*arguments):
        calls.append(arguments)
        return Text(([str(i) for i in range(11)],), ("made",))

    monkeypatch.setitem(sys.modules, "tfm_jax.data.builders", SimpleNamespace(read_tfds=read_tfds))
    data = Data(
        format="tfds",
        dataset="glue/sst2",
        features=("sentence",),
        dir="there",
        train_source="train",
        test_source="test",
    )
    splits = read_splits(data)
    assert splits["validation"].source == ["10"] and len(splits["train"]) == 10
    assert calls == [("glue/sst2", split, ("sentence",), "", "there") for split in ("train", "test")]


@pytest.mark.parametrize(
    ("fields", "split", "message"),
    [
        (
            {},
            "train",
            r"data\.train_source is empty: give --data\.train-source FILE, and for pairs --data\.train-target",
        ),
        ({}, "validation", r"data\.train_source is empty"),
        ({"format": "tsv", "features": ("1",)}, "train", "give --data.train-source FILE$"),
        ({"format": "dates"}, "train", "give --data.train-source NUMBER$"),
        ({"train_source": "empty"}, "train", "empty is empty: at least one example is needed"),
        ({"train_source": "nine", "validation_source": "empty"}, "validation", "empty is empty"),
        ({"train_source": "nine", "test_source": "blank", "documents": "paragraphs"}, "test", "blank is empty"),
        ({"train_source": "header", "format": "tsv", "features": ("a",)}, "train", "header is empty"),
        ({"train_source": "nine"}, "train", r"nine has 9 examples, too few to hold some out .*data\.validation_source"),
        ({"train_source": "nine"}, "test", "too few to hold some out"),
        ({"train_source": "one", "documents": "file"}, "train", "one has 1 characters, too few to hold some out"),
    ],
)
def test_splits_without_text_are_refused(tmp_path, fields, split, message):
    """B42: an empty file is named before anything is learned from it."""
    for name, text in {"empty": "", "blank": "\n \n", "header": "a\tb\n", "nine": "x\n" * 9, "one": "x"}.items():
        written(tmp_path, text, name)
    data = Data(**{"dir": "" if fields.get("format") == "dates" else str(tmp_path)} | fields)
    with pytest.raises(ValueError, match=message):
        read_split(data, split)
    if split == "train":
        with pytest.raises(ValueError, match=message):
            read_splits(data)

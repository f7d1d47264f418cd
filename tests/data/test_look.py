"""A look at the data: what is shown is what is in the batches, whatever the task."""

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.config import Corruption, Data
from tfm_jax.data import look
from tfm_jax.data.batches import make_batches
from tfm_jax.data.look import (
    describe,
    histogram,
    look_at,
    look_at_splits,
    measure_rate,
    shape_uses,
    show_batches,
    show_row,
)
from tfm_jax.data.sources import Text, parallel, read_tsv
from tfm_jax.data.tokenizer import Tokenizer

PAIRS = parallel(["ab c", "d"], ["x", "yz"], "one", "other")


def settings(**changes):
    return Data(**{"max_length": 11, "tokens_per_batch": 44, "rows_multiple": 1, "num_buckets": 1} | changes)


def byte_tokenizer(**special):
    """A token a byte, so that lengths can be counted by hand."""
    return Tokenizer.train(["abc"], kind="bytes", vocab_size=300, **special)


def batches_of(text, tokenizer, *, evaluation=True, **changes):
    return make_batches(settings(**changes), text, tokenizer, vocab_size=300, evaluation=evaluation)


def lines_of(*texts):
    return Text((list(texts),), ("lines",))


def parts(shown):
    """{name: text} of a row of `show_row`."""
    one_line = shown.replace("\n" + " " * 14, " ")
    return {line[:13].strip(): line[14:] for line in one_line.split("\n")[1:]}


# --- rows ---


def test_a_pair_in_a_bucket():
    """Rows beyond the examples are all padding."""
    tokenizer = byte_tokenizer()
    batch = batches_of(PAIRS, tokenizer, rows_multiple=3)[0]
    assert show_row(batch, 0, tokenizer) == (
        "row 0: 1 of 8 cells are padding\n  source      ab c </s>\n  target      x </s>"
    )
    assert show_row(batch, 1, tokenizer) == (
        "row 1: 3 of 8 cells are padding\n  source      d </s>\n  target      yz </s>"
    )
    assert show_row(batch, 2, tokenizer) == "row 2: 8 of 8 cells are padding"


def test_pairs_in_a_packed_row():
    """Sides of 7 and 5 tokens in a row of 11 and 8."""
    tokenizer = byte_tokenizer()
    assert show_row(batches_of(PAIRS, tokenizer, batching="packed")[0], 0, tokenizer) == (
        "row 0: 7 of 19 cells are padding\n"
        "  1 source    ab c </s>\n"
        "  1 target    x </s>\n"
        "  2 source    d </s>\n"
        "  2 target    yz </s>"
    )


def test_blocks_of_a_stream():
    tokenizer = byte_tokenizer()
    batch = batches_of(lines_of("ab", "cde"), tokenizer, batching="blocks", max_length=4)[0]
    assert show_row(batch, 0, tokenizer) == "row 0: 0 of 4 cells are padding\n  text        ab </s> c"
    assert show_row(batch, 1, tokenizer) == ("row 1: 1 of 4 cells are padding\n  after       c\n  text        de </s>")


def test_masked_tokens_are_shown_where_they_stand():
    """Masked, as it was, and random; a space is visible."""
    tokenizer = byte_tokenizer(mask=True)
    (ids,) = tokenizer.encode(["cat up"])
    c, a, t, space, u, p = ids
    start, end, mask = tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id
    batch = {
        "tokens": [[start, c, mask, t, space, u, c, end, 0]],
        "targets": [[0, 0, a, 0, space, 0, p, 0, 0]],
        "weights": [[0, 0, 1, 0, 1, 0, 1, 0, 0]],
        "segment_ids": [[1, 1, 1, 1, 1, 1, 1, 1, 0]],
    }
    name = tokenizer.pieces([mask])[0]
    assert show_row({name: np.array(values, np.int32) for name, values in batch.items()}, 0, tokenizer) == (
        f"row 0: 1 of 9 cells are padding\n  masked      <s> c [{name} → a] t [␣ → ␣] u [c → p] </s>"
    )


def test_what_is_read_and_what_is_predicted_of_masked_text():
    """With both sides of the arrows the row is what the batch holds, and without the left one the text."""
    tokenizer = byte_tokenizer(mask=True)
    text = "abcdefghijklmnopqrstuvwx"
    corruption = Corruption("mask", rate=0.4, masked=0.4, random=0.3)
    batches = batches_of(lines_of(text, text), tokenizer, corruption=corruption, max_length=29, tokens_per_batch=58)
    for row in range(2):
        shown = parts(show_row(batches[0], row, tokenizer))["masked"]
        marks = re.findall(r"\[(\S+) → (\S+)\]", shown)
        assert len(marks) == batches[0]["weights"][row].sum() > 3
        assert re.sub(r"\[\S+ → (\S+)\]", r"\1", shown).split() == ["<s>", *text, "</s>"]
        read = re.sub(r"\[(\S+) → \S+\]", r"\1", shown).split()
        pieces = tokenizer.pieces(batches[0]["tokens"][row][: len(text) + 2].tolist())
        assert read == [piece if piece.isprintable() else f"\\x{ord(piece):02x}" for piece in pieces]


def test_spans_come_with_the_text_they_restore():
    tokenizer = byte_tokenizer(sentinels=3)
    (ids,) = tokenizer.encode(["abcdefg"])
    a, b, c, d, e, f, g = ids
    one, two = tokenizer.sentinel_ids[:2]
    end, pad = tokenizer.eos_id, tokenizer.pad_id
    batch = {
        "source_tokens": [[a, one, d, e, two, end, pad]],
        "source_segment_ids": [[1, 1, 1, 1, 1, 1, 0]],
        "tokens": [[tokenizer.bos_id, one, b, c, two, f, g, pad]],
        "targets": [[one, b, c, two, f, g, end, pad]],
        "weights": [[1, 1, 1, 1, 1, 1, 1, 0]],
        "segment_ids": [[1, 1, 1, 1, 1, 1, 1, 0]],
    }
    first, second = tokenizer.pieces([one, two])
    assert show_row({name: np.array(values, np.int32) for name, values in batch.items()}, 0, tokenizer) == (
        "row 0: 2 of 15 cells are padding\n"
        f"  source      a {first} de {second} </s>\n"
        f"  target      {first} bc {second} fg </s>\n"
        "  restored    abcdefg"
    )


@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_drawn_spans_restore_their_texts(batching):
    tokenizer = byte_tokenizer(sentinels=7)
    texts = ["the quick brown fox", "jumps", "over the lazy dog"]
    corruption = Corruption("spans", rate=0.3, mean_span=2.0)
    sizes = {"max_length": 23, "tokens_per_batch": 230, "batching": batching}
    batches = batches_of(lines_of(*texts), tokenizer, corruption=corruption, **sizes)
    (batch,) = (batches[step] for step in range(batches.steps_per_epoch))
    rows = [parts(show_row(batch, row, tokenizer)) for row in range(len(batch["tokens"]))]
    restored = [text for row in rows for name, text in row.items() if "restored" in name]
    assert sorted(restored) == sorted(texts)


def test_both_parts_around_a_place_that_is_drawn():
    tokenizer = byte_tokenizer()
    batches = batches_of(lines_of("abcdefg"), tokenizer, corruption=Corruption("prefix"))
    shown = parts(show_row(batches[0], 0, tokenizer))
    first, second = (shown[name].removesuffix(" </s>") for name in ("1 source", "1 target"))
    assert first + second == "abcdefg" and first and second
    assert show_row(batches[0], 0, tokenizer).startswith("row 0: 9 of 18 cells are padding\n")


def test_labelled_texts(tmp_path):
    """A class of one text, a value of two."""
    tokenizer = byte_tokenizer()
    path = tmp_path / "table.tsv"
    path.write_text("good film\tno\t3\nbad\tyes\t0\n")
    one = read_tsv(path, ("1",), "3")
    batch = batches_of(one, tokenizer)[0]
    assert show_row(batch, 1, tokenizer) == (
        "row 1: 6 of 11 cells are padding\n  text        <s> bad </s>\n  label       0"
    )
    path.write_text("ab\tno\t3\nc\tyes\t0.3\n")
    batch = batches_of(read_tsv(path, ("1", "2"), "3"), tokenizer)[0]
    assert show_row(batch, 1, tokenizer) == (
        "row 1: 0 of 7 cells are padding\n  text 1      <s> c </s>\n  text 2      yes </s>\n  label       0.3"
    )


def test_long_and_strange_text_disturbs_no_terminal():
    tokenizer = byte_tokenizer()
    text = "line\nend\t\x1b[1m " + "word-for-word " * 31 + "é日"
    batch = batches_of(lines_of(text), tokenizer, max_length=499, tokens_per_batch=499)[0]
    lines = show_row(batch, 0, tokenizer).split("\n")
    assert max(map(len, lines)) <= 108 and len(lines) > 4 and all(line.isprintable() for line in lines)
    assert lines[1].startswith("  text        line\\nend\\t\\x1b[1m word")
    joined = " ".join(line[14:].strip() for line in lines[1:])
    assert joined.count("word-for-word") == 31 and joined.endswith("é日 </s>")


def test_rows_of_batches():
    """No more rows than there are; each batch with its shape."""
    tokenizer = byte_tokenizer()
    batches = batches_of(lines_of("a", "bc", "d"), tokenizer, tokens_per_batch=22, max_length=11, evaluation=False)
    shown = show_batches(batches, tokenizer, count=2, rows=5)
    (shape,) = batches.shapes
    assert (shape.rows, shape.lengths, batches.steps_per_epoch) == (3, (3,), 1)
    assert re.findall("^(?:batch|row).*", shown, re.MULTILINE) == [
        line
        for step in range(2)
        for line in [
            f"batch {step}: 3 rows of 3 cells",
            *[f"row {i}: {int(t < 0.5)} of 3 cells are padding" for i, t in enumerate(batches[step]["weights"][:, 2])],
        ]
    ]
    assert show_batches(batches, tokenizer, count=0, rows=5) == ""


# --- numbers ---


@given(
    st.lists(st.tuples(st.integers(1, 307), st.integers(1, 307)), min_size=1, max_size=53),
    st.integers(1, 11),
    st.integers(1, 2),
)
def test_every_length_is_in_the_histogram_once(lengths, rows, sides):
    lengths = np.array(lengths)[:, :sides]
    starts, counts = histogram(lengths, rows=rows)
    assert len(starts) <= rows and len(set(np.diff(starts))) <= 1
    assert counts.sum(axis=0).tolist() == [len(lengths)] * sides
    for side, column in zip(lengths.T, counts.T, strict=True):
        found = Counter(max(start for start in starts if start <= length) for length in side)
        assert [found[start] for start in starts] == column.tolist()


def test_the_bars_stand_for_the_counts():
    """Three examples of 2 tokens, one of 4: 30 characters and a third of them; a side with none has no bar."""
    tokenizer = byte_tokenizer()
    text = parallel(["a", "b", "c", "def"], ["a", "a", "a", "a"], "one", "other")
    batches = batches_of(text, tokenizer)
    shown = describe(settings(), {"train": look_at(text, batches.examples, tokenizer)}, batches, 1.0)
    bars = {line[2:14].strip(): line[16:] for line in shown.split("\n") if re.match("  [234]  ", line)}
    assert bars["2"] == "█" * 22 + "▌" + " " * 7 + "         3  " + "█" * 30 + "         4"
    assert bars["4"] == "█" * 7 + "▌" + " " * 22 + "         1  " + " " * 30 + "         0"


def test_a_split_in_numbers():
    """Lengths with their ends; of 2 + 4 + 1 characters, 2 are unknown."""
    tokenizer = Tokenizer.train(["ab"], kind="characters", vocab_size=300)
    text = Text((["ab", "abca", "d"],), ("file",), lines=[7, 8, 9])
    batches = batches_of(text, tokenizer)
    found = look_at(text, batches.examples, tokenizer)
    assert found.lengths.tolist() == [[3], [5], [2]] and found.num_tokens == 10
    assert found.unknown == (2 / 7,) and found.origin == "file, from line 7"
    assert (found.read, found.dropped, found.cut) == (3, 0, 0)
    shown = describe(settings(), {"train": found}, batches, 1234567.0)
    assert "3 examples made of 3 read, 10 tokens" in shown and "unknown tokens: 28.57%" in shown
    assert re.search("text +10 +3.3 +3.0 +4.8 +5\n", shown) and "1,234,567 tokens/s" in shown
    assert max(map(len, shown.split("\n"))) < 110


def test_what_is_too_long_is_counted():
    tokenizer = byte_tokenizer()
    text = lines_of("a", "b" * 10, "c" * 11, "d" * 23)
    dropped = look_at(text, batches_of(text, tokenizer, too_long="drop").examples, tokenizer)
    assert (dropped.read, len(dropped.lengths), dropped.dropped, dropped.cut) == (4, 2, 2, 0)
    split = look_at(text, batches_of(text, tokenizer, too_long="split").examples, tokenizer)
    assert (split.read, len(split.lengths), split.dropped, split.cut) == (4, 7, 0, 5)


def test_a_text_that_serves_two_splits_is_counted_once():
    """What is too long raises in what is batched; the test text never is."""
    tokenizer = byte_tokenizer()
    train, other, long = lines_of("abc", "d"), lines_of("e"), lines_of("f", "g" * 99)
    training = batches_of(train, tokenizer).examples

    def looked(**texts):
        return look_at_splits(settings(), texts, tokenizer, training, vocab_size=300)

    assert [*looked(train=train, validation=other, test=other)] == ["train", "validation and test"]
    assert [*looked(train=train, validation=train, test=train)] == ["train and validation and test"]
    found = looked(train=train, validation=other, test=long)
    assert [*found] == ["train", "validation", "test"] and found["test"].dropped == 1
    assert [len(each.lengths) for each in found.values()] == [2, 1, 1]
    with pytest.raises(ValueError, match="max_length is 11"):
        looked(train=train, validation=long, test=other)


def test_lengths_that_are_drawn_are_upper_bounds():
    """ "ab" and "cdefg" are cut anywhere, and all parts end: 4 + 7 tokens, which fill the row of both."""
    tokenizer = byte_tokenizer()
    text = lines_of("ab", "cdefg")
    batches = batches_of(text, tokenizer, corruption=Corruption("prefix"))
    found = look_at(text, batches.examples, tokenizer)
    assert found.num_tokens == 11 and found.lengths.tolist() == [[4, 4], [7, 7]]
    assert "upper bounds" in describe(settings(), {"train": found}, batches, 1.0)
    (use,) = shape_uses(batches)
    assert (use.name, use.batches, use.tokens, use.padding) == ("1 x 7, 4", 1, 11, 0)


WORDS = ["a" * (1 + i % 9) + "b" for i in range(41)]
TASKS = {
    "pairs": (parallel(WORDS, [word[::2] for word in WORDS], "one", "other"), {}),
    "packed pairs": (parallel(WORDS, [word[::2] for word in WORDS], "one", "other"), {"batching": "packed"}),
    "blocks": (lines_of(*WORDS), {"batching": "blocks"}),
    "masked": (lines_of(*WORDS), {"corruption": Corruption("mask"), "max_length": 13}),
    "spans": (lines_of(*WORDS), {"corruption": Corruption("spans")}),
    "prefix": (lines_of(*WORDS), {"corruption": Corruption("prefix"), "max_length": 13}),
    "packed prefix": (lines_of(*WORDS), {"corruption": Corruption("prefix"), "max_length": 13, "batching": "packed"}),
    "labelled": (Text((WORDS,), ("w",), np.arange(41, dtype=np.int32)), {"max_length": 13}),
}


@pytest.mark.parametrize("task", TASKS)
def test_cells_of_each_shape(task):
    """Tokens and padding as counted in the batches of an epoch; together the share that is printed."""
    text, changes = TASKS[task]
    tokenizer = byte_tokenizer(mask=True, sentinels=5)
    sizes = {"num_buckets": 3, "tokens_per_batch": 88} | changes
    batches = batches_of(text, tokenizer, evaluation=False, **sizes)
    counted = {}
    for step in range(batches.steps_per_epoch):
        sides = [batches[step][name] for name in ("source_segment_ids", "segment_ids") if name in batches[step]]
        name = f"{len(sides[0])} x {', '.join(str(side.shape[1]) for side in sides)}"
        live = sum(int((side > 0).sum()) for side in sides)
        number, tokens, padding = counted.get(name, (0, 0, 0))
        counted[name] = (number + 1, tokens + live, padding + sum(side.size for side in sides) - live)
    uses = shape_uses(batches)
    assert {use.name: (use.batches, use.tokens, use.padding) for use in uses} == counted
    tokens, padding = (sum(values[i] for values in counted.values()) for i in (1, 2))
    shown = describe(settings(**sizes), {"train": look_at(text, batches.examples, tokenizer)}, batches, 1.0)
    assert re.search(f"{len(counted)} shapes?, {batches.steps_per_epoch} updates an epoch, ", shown)
    assert f" {padding / (tokens + padding):.1%} padding\n" in shown


@pytest.mark.parametrize("seconds, measured", [(0.0, 1), (2.5, 3), (99.0, 7)])
def test_the_rate_is_of_what_comes_after_the_first_batch(monkeypatch, seconds, measured):
    """On a clock that goes on by a second each time it is asked; an epoch has 7 batches."""
    clock = iter(range(99))
    monkeypatch.setattr(look, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    batches = batches_of(lines_of(*WORDS[:27]), byte_tokenizer(), tokens_per_batch=44, evaluation=False)
    assert batches.steps_per_epoch == 7
    tokens = sum(int(batches[step]["weights"].sum()) for step in range(1, measured + 1))
    assert measure_rate(batches, seconds=seconds) == tokens / (measured + 1)

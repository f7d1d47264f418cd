"""Text to ids and back: exactly, always the same way, and never to a special token by accident."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.data.tokenizer import SPECIALS, Tokenizer

LINES = [
    "the cat sat on the mat , the other cat did not",
    "a naïve caf\u00e9 : 23 men and 17 women sat there",
    "der Hund und die Katze saßen auf der Matte",
    "",
    "  the spaces  stay ",
] * 3
KINDS = ["bpe", "word_bpe"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return Tokenizer.train(LINES, kind=request.param, vocab_size=331)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer.train(LINES, kind="bpe", vocab_size=331)


@pytest.fixture(scope="module")
def word_level():
    return Tokenizer.train(LINES, kind="word_bpe", vocab_size=331)


@given(lines=st.lists(TEXT, max_size=5))
def test_bytes_come_back_exactly(byte_level, lines):
    ids = byte_level.encode(lines)
    assert byte_level.decode(ids) == lines
    assert all(len(SPECIALS) <= i < byte_level.vocab_size for sequence in ids for i in sequence)


@pytest.mark.parametrize(
    "line", ["", " ", "  a", "a  ", "\u00a0a", "a\n\nb\t", "\0", "\u2028", "'s", "\U0001f600\u200d"]
)
def test_edges_come_back_exactly(byte_level, line):
    """B42: empty lines and lines of one space are lines."""
    assert byte_level.decode(byte_level.encode([line, "the cat", line])) == [line, "the cat", line]


def test_first_word_is_the_word(byte_level):
    (first, second, third) = byte_level.encode(["the cat the"])[0]
    assert first == third != second


@given(words=st.lists(st.text(st.sampled_from(sorted(set("".join(LINES)) - {" "})), min_size=1)), gap=st.integers(1, 3))
def test_words_come_back_between_single_spaces(word_level, words, gap):
    """Every character of the training text is known wherever in a word it stands."""
    ids = word_level.encode([(" " * gap).join(words)])
    assert word_level.decode(ids) == [" ".join(words)]
    assert word_level.unk_id not in ids[0]


def test_unknown_characters_show(word_level):
    assert word_level.encode(["\u2603"]) == [[word_level.unk_id]]
    assert word_level.decode(word_level.encode(["caf\u2603s cat"])) == ["caf<unk>s cat"]


@given(pieces=st.lists(st.sampled_from([*SPECIALS, "</w>", "<", ">", "s", "pad", "/", "the", " "]), max_size=7))
def test_text_is_never_special(tokenizer, pieces):
    """B36: no start or end comes from the text, so a start is there exactly once and an end only at the end."""
    (ids,) = tokenizer.encode(["".join(pieces)])
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_special_tokens_can_be_learned(kind):
    """The merges of "<s>x" would pass through the start token, and those of "a</w>b" through the end of a word."""
    spelled = " ".join(f"{mark}{end}" for mark in (*SPECIALS, "</w>") for end in ("x", "y", "z", ""))
    lines = [spelled, "x<s>y a</w>b </w></w> a</s>"] * 7
    tokenizer = Tokenizer.train(lines, kind=kind, vocab_size=499)
    lines += [f"{mark}b a{mark}b" for mark in (*SPECIALS, "</w>")]  # where no merge of the whole word hides the token
    ids = tokenizer.encode(lines)
    assert min(i for sequence in ids for i in sequence) >= len(SPECIALS)
    assert tokenizer.decode(ids) == lines


def test_specials(tokenizer):
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    (ids,) = tokenizer.encode(["the cat"])
    assert tokenizer.decode([[1, *ids, 2, 0, 0], [], [1, 2]]) == ["the cat", "", ""]
    assert tokenizer.decode([[3]]) == ["<unk>"]


def test_ids_outside_the_vocabulary(tokenizer):
    """B17: a model's table may have more rows than there are entries: they read as unknown; negative ids raise."""
    assert tokenizer.decode([[tokenizer.vocab_size, 10**6]]) == ["<unk><unk>"]
    assert tokenizer.pieces([tokenizer.vocab_size]) == ["<unk>"]
    for read in (lambda ids: tokenizer.decode([ids]), tokenizer.pieces):
        with pytest.raises(ValueError, match="token id -1 is negative"):
            read([5, -1])


def test_pieces_are_readable(byte_level, word_level):
    (ids,) = byte_level.encode(["the cat saß\u2603"])
    pieces = byte_level.pieces([1, *ids, 2])
    assert pieces[:3] == ["<s>", " the", " cat"]
    assert pieces[-4:] == ["\\xe2", "\\x98", "\\x83", "</s>"]
    assert "".join(byte_level.pieces(byte_level.encode(["the naïve\tcafé"])[0])) == " the naïve\tcafé"
    assert word_level.pieces(word_level.encode(["the cat"])[0]) == ["the</w>", "cat</w>"]


@given(text=st.text(st.characters(max_codepoint=127), min_size=1))
def test_pieces_of_plain_text_are_the_text(byte_level, text):
    assert "".join(byte_level.pieces(byte_level.encode([text])[0])) == f" {text}"


def test_training_again_gives_the_same_file(tokenizer, tmp_path):
    """Ids and merges must not follow the order of a hash table, which differs each time."""
    kind = "word_bpe" if tokenizer.pieces(tokenizer.encode(["the"])[0]) == ["the</w>"] else "bpe"
    files = set()
    for attempt in range(5):
        path = tmp_path / f"{attempt}.json"
        Tokenizer.train(iter(LINES), kind=kind, vocab_size=331).save(path)
        files.add(path.read_bytes())
    assert len(files) == 1


def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("an older file")
    tokenizer.save(path)
    loaded = Tokenizer.load(str(path))
    lines = [*LINES, "<s> the </s> \u2603"]
    assert loaded.encode(lines) == tokenizer.encode(lines)
    assert loaded.decode(loaded.encode(lines)) == tokenizer.decode(tokenizer.encode(lines))
    assert loaded.vocab_size == tokenizer.vocab_size
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def test_a_failed_save_leaves_the_old_file(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("an older file")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        tokenizer.save(path)
    assert path.read_text() == "an older file"
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json does not exist"):
        Tokenizer.load(tmp_path / "none.json")
    other = tmp_path / "other.json"
    for content in ("{}", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'):
        other.write_text(content)
        with pytest.raises(ValueError, match="other.json holds no tokenizer of this library"):
            Tokenizer.load(other)


@pytest.mark.parametrize(("kind", "needed"), [("bpe", 260), ("word_bpe", 4 + 2 * 5)])
def test_vocab_size_must_hold_the_alphabet(kind, needed):
    lines = ["abcde ab cd"]
    assert Tokenizer.train(lines, kind=kind, vocab_size=needed).vocab_size == needed
    for size in (0, needed - 1):
        with pytest.raises(ValueError, match=f"vocab_size is {size}, .* alone need {needed}"):
            Tokenizer.train(lines, kind=kind, vocab_size=size)


@pytest.mark.parametrize("kind", KINDS)
def test_little_text_gives_few_entries(kind):
    tokenizer = Tokenizer.train(["ab ab"], kind=kind, vocab_size=997)
    assert tokenizer.vocab_size < 270
    assert tokenizer.decode(tokenizer.encode(["ab", ""])) == ["ab", ""]

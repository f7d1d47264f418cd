"""How vocabularies are learned: the same everywhere, each kind by a second route, and BPE codes as subword-nmt's."""

import gzip
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from tfm_jax.data import vocabulary
from tfm_jax.data.tokenizer import SPECIALS, Tokenizer

LINES = [
    "the cat sat on the mat , the other cat did not",
    "a naïve café : 23 men and 17 women sat there",
    "der Hund und die Katze saßen auf der Matte",
    "",
    "  the spaces  stay ",
    "der Mann und die Frauen saßen da , the other women sat on the other mat",
] * 3
LETTERS = st.sampled_from(sorted(set("".join(LINES)) - {" "}))


def learned(merges):
    """What subword-nmt makes of the lines as a file, without a count of words before."""
    codes = io.StringIO()
    learn_bpe(io.StringIO("".join(f"{line}\n" for line in LINES)), codes, merges)
    return codes.getvalue()


@pytest.fixture(scope="module")
def codes():
    return vocabulary.learn_codes(iter(LINES), 37)


@pytest.fixture(scope="module")
def word_level(codes, tmp_path_factory):
    path = tmp_path_factory.mktemp("codes") / "codes"
    path.write_text(codes, encoding="utf-8")
    return Tokenizer.from_codes(path, LINES, vocab_size=331)


@pytest.mark.parametrize("merges", [0, 1, 37, 499])
def test_codes_are_those_of_subword_nmt(merges, capfd):
    assert vocabulary.learn_codes(iter(LINES), merges) == learned(merges)
    capfd.readouterr()
    vocabulary.learn_codes(LINES, merges)
    assert capfd.readouterr() == ("", "")  # no progress bar where no terminal is


@pytest.mark.parametrize("lines", [[], ["", "  "], ["a b", "c"]])
def test_text_without_a_pair_has_no_merges(lines):
    assert vocabulary.learn_codes(lines, 7) == "#version: 0.2\n"
    assert Tokenizer.train(lines, kind="word_bpe", vocab_size=17).vocab_size == 4 + 2 * len(set("".join(lines)) - {" "})


@given(line=st.text(st.sampled_from("abcdehnstäßN23, \u00a0\t\u2028\u3000\u2603@"), max_size=23), edge=st.text(" \r\n"))
def test_segments_are_those_of_subword_nmt(codes, word_level, line, edge):
    line = edge + line + edge[::-1]
    assert word_level.segment([line, "the mat"]) == [BPE(io.StringIO(codes)).process_line(line), "the mat"]


def test_lines_end_words(word_level):
    """A text of several lines, with any end of line, has the pieces of its lines one after the other."""
    first, second = word_level.encode(["the other", "women"])
    assert word_level.encode(["the other\r\nwomen", "the other\rwomen\n"]) == [first + second] * 2
    document = ["\n".join(LINES)]
    assert vocabulary.learn_codes(document, 37) == vocabulary.learn_codes(LINES, 37)


def test_code_files(codes, word_level, tmp_path):
    """A file with the merges that train would learn gives the same vocabulary."""
    trained = Tokenizer.train(iter(LINES), kind="word_bpe", vocab_size=331, merges=37)
    for tokenizer, name in ((trained, "trained.json"), (word_level, "read.json")):
        tokenizer.save(tmp_path / name)
    assert (tmp_path / "trained.json").read_bytes() == (tmp_path / "read.json").read_bytes()


def test_repeated_merges_count_where_they_are_first(tmp_path):
    """As in subword-nmt; a carriage return at the end of a line is no part of it."""
    repeated = tmp_path / "repeated"
    repeated.write_text("#version: 0.2\r\na b\r\nb c\r\na b\r\n", encoding="utf-8", newline="")
    assert Tokenizer.from_codes(repeated, ["abcx"], vocab_size=331).segment(["abcx"]) == ["ab@@ c@@ x"]


@pytest.mark.parametrize("kind", ["line_bpe", "word_bpe"])
def test_no_merge_spells_a_special_token(kind, tmp_path):
    """It would become that token; nor the mark for the end of a word, which decoding would take for one."""
    marks = ["<s>", "<mask>", "<extra_id_0>", "</w>"]
    lines = [f"{mark}{letter}{mark}" for letter in "abcdefghijkl" for mark in marks] * 3
    tokenizer = Tokenizer.train(lines, kind=kind, vocab_size=499, mask=True, sentinels=1)
    tokenizer.save(tmp_path / "tokenizer.json")
    merges = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    assert len(merges) > 23
    assert not {left + right for left, right in merges} & {*SPECIALS, *marks[:3]}
    assert tokenizer.decode(tokenizer.encode(lines)) == lines
    assert min(tokenizer.encode(["<s>"])[0]) > max(tokenizer.special_ids)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with '', '#version: 0.2' is expected"),
        (b"t h\n", "begins with 't h', '#version: 0.2' is expected"),
        (b"#version: 0.1\nt h\n", "begins with '#version: 0.1', .* older version again"),
        (b'{"model": {}}', "give a code file that `subword-nmt learn-bpe` wrote"),
        (b"#version: 0.2\nt h\nt h e\n", "codes:3: 't h e' is no merge"),
        (b"#version: 0.2\nt h\n\nth e\n", "codes:3: '' is no merge"),
        (b"#version: 0.2\nt  h\n", "codes:2: 't  h' is no merge"),
        (b"#version: 0.2\n\xff h\n", "codes is no code file of subword-nmt, which is UTF-8"),
    ],
)
def test_files_that_hold_no_codes(content, message, tmp_path):
    path = tmp_path / "codes"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_codes(path, LINES, vocab_size=331)
    with pytest.raises(FileNotFoundError):
        Tokenizer.from_codes(tmp_path / "none", LINES, vocab_size=331)


def test_pieces_that_occur_come_first(word_level):
    """As in a dictionary of fairseq: by falling count in the training text, and it may end where they end."""
    counts = Counter(piece for line in word_level.segment(LINES) for piece in line.split())
    first = word_level.pieces(list(range(len(SPECIALS), len(SPECIALS) + len(counts))))
    named = [piece.removesuffix("</w>") + ("" if piece.endswith("</w>") else "@@") for piece in first]
    assert named == sorted(counts, key=lambda piece: (-counts[piece], first[named.index(piece)]))
    needed = len(SPECIALS) + len(counts)
    assert Tokenizer.train(LINES, kind="word_bpe", vocab_size=needed, merges=37).vocab_size == needed
    with pytest.raises(ValueError, match=f"vocab_size is {needed - 1}, .* {len(counts)} pieces .* need {needed}"):
        Tokenizer.train(LINES, kind="word_bpe", vocab_size=needed - 1, merges=37)


def test_merges_fill_the_vocabulary():
    """Characters, by their place in a word, and merges are together as many as fit beside the specials."""
    tokenizer = Tokenizer.train(LINES, kind="word_bpe", vocab_size=97)
    words = {word for line in LINES for word in line.split()}
    characters = {c for word in words for c in word[:-1]} | {word[-1] + "</w>" for word in words}
    codes = learned(97 - len(SPECIALS) - len(characters))
    assert codes.count("\n") > 23
    assert tokenizer.segment(LINES) == [BPE(io.StringIO(codes)).process_line(line) for line in LINES]


def test_entries_beyond_the_vocabulary_are_unknown(tmp_path):
    """B17: merges need symbols that may have no row in a model's table; their ids never come from a text."""
    tokenizer = Tokenizer.train(["abc abc"], kind="word_bpe", vocab_size=5, merges=7)
    tokenizer.save(tmp_path / "tokenizer.json")
    for one in (tokenizer, Tokenizer.load(tmp_path)):
        assert one.vocab_size == 5
        assert one.encode(["abc", "ab", "abcb"]) == [[4], [3, 3], [3, 3, 3, 3]]
        assert one.segment(["ab abc"]) == ["a@@ b abc"]
        assert one.pieces([4, 5]) == ["abc</w>", "<unk>"]


def test_unused_characters_come_before_unused_merges():
    tokenizer = Tokenizer.train(["abc abc"], kind="word_bpe", vocab_size=331, merges=7)
    names = tokenizer.pieces(list(range(4, tokenizer.vocab_size)))
    assert names == ["abc</w>", "a", "a</w>", "b", "b</w>", "c", "c</w>", "bc</w>"]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_bytes(text):
    tokenizer = Tokenizer.train([], kind="bytes", vocab_size=997, mask=True, sentinels=2)
    assert tokenizer.vocab_size == 256 + 7
    assert tokenizer.encode([text]) == [[7 + byte for byte in text.encode()]]


def test_characters_are_code_points_in_order():
    tokenizer = Tokenizer.train(iter(["naïve\n", "ab \U0001f600"]), kind="characters", vocab_size=331)
    known = sorted(set("naïve\nab \U0001f600"))
    assert tokenizer.encode(["ï \na\U0001f600"]) == [[4 + known.index(c) for c in "ï \na\U0001f600"]]
    assert tokenizer.encode(["xx"]) == [[3, 3]]
    assert tokenizer.vocab_size == 4 + len(known)


def test_merges_of_lines_cross_spaces():
    tokenizer = Tokenizer.train(LINES, kind="line_bpe", vocab_size=499)
    assert any(" " in piece.strip() for piece in tokenizer.pieces(tokenizer.encode(["on the other mat"])[0]))
    inside = Tokenizer.train(LINES, kind="bpe", vocab_size=499)
    assert not any(" " in piece.strip() for piece in inside.pieces(inside.encode(["on the other mat"])[0]))


def test_a_book_as_one_line_is_learned():
    """B42: one line of a million characters; learned in parts, or its merges would take hours."""
    book = " ".join(LINES) * 97
    parts = [book[start : start + 1000] for start in range(0, len(book), 1000)]
    whole, cut = (Tokenizer.train(lines, kind="line_bpe", vocab_size=331) for lines in ([book], parts))
    assert whole.encode([book]) == cut.encode([book])


@pytest.fixture(scope="module")
def wordpieces():
    return Tokenizer.train(LINES, kind="wordpiece", vocab_size=131)


@given(word=st.text(LETTERS.filter(str.isalnum), min_size=1, max_size=13))
def test_wordpieces_are_the_longest(wordpieces, word):
    """Greedily from the left (Devlin et al. 2019); every letter is known at the start of a word and inside it."""
    entries = set(wordpieces.pieces(list(range(len(SPECIALS), wordpieces.vocab_size))))
    expected, start = [], 0
    while start < len(word):
        mark = "##" if start else ""
        end = max(end for end in range(start + 1, len(word) + 1) if mark + word[start:end] in entries)
        expected.append(mark + word[start:end])
        start = end
    assert wordpieces.pieces(wordpieces.encode([word])[0]) == expected


def test_wordpieces_split_as_bert(wordpieces):
    """Punctuation stands alone, so it needs no form for the inside of a word; case and accents stay."""
    pieces = wordpieces.pieces(wordpieces.encode(["the naïve  cat, the Mann"])[0])
    assert " ".join(pieces).replace(" ##", "") == "the naïve cat , the Mann"
    assert {",", ":"} <= set(wordpieces.pieces(list(range(wordpieces.vocab_size))))
    assert not {"##,", "##:"} & set(wordpieces.pieces(list(range(wordpieces.vocab_size))))


def splits(text):
    """Every way to cut a text into pieces."""
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        ends = [*(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]
        yield [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    path = tmp_path_factory.mktemp("unigram") / "tokenizer.json"
    tokenizer = Tokenizer.train(LINES, kind="unigram", vocab_size=83)
    tokenizer.save(path)
    return tokenizer, dict(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])


@given(word=st.text(LETTERS, min_size=1, max_size=8))
def test_unigram_pieces_are_the_likeliest(unigram, word):
    """Of all ways to cut the word (Kudo 2018), by trying them."""
    tokenizer, scores = unigram
    pieces = tokenizer.pieces(tokenizer.encode([word])[0])
    best = max(sum(scores[p] for p in cut) for cut in splits(f"▁{word}") if scores.keys() >= set(cut))
    assert "".join(pieces) == f"▁{word}"
    assert sum(scores[piece] for piece in pieces) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("spare", [0, 1, 2, 7])
def test_unigram_fits_where_its_alphabet_does(spare):
    """The trainer of the library never ends where it does not, and adds too many entries where it just does."""
    size = len(SPECIALS) + len(set("".join(LINES))) + spare  # a space counts as the mark of a word's start
    tokenizer = Tokenizer.train(LINES, kind="unigram", vocab_size=size)
    assert tokenizer.vocab_size == size
    assert tokenizer.unk_id not in {i for ids in tokenizer.encode(LINES) for i in ids}


SCRIPT = """
import json, sys
from tfm_jax.data.tokenizer import Tokenizer
for kind in sys.argv[2:]:
    Tokenizer.train(json.loads(sys.argv[1]), kind=kind, vocab_size=331).save(f"{kind}.json")
"""


def test_other_processes_learn_the_same(tmp_path):
    """Ids, merges and scores must not follow the order of a hash table, which differs each time."""
    kinds = ["bytes", "characters", "bpe", "line_bpe", "word_bpe", "wordpiece", "unigram"]
    found = []
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        changes = {"PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(seed)}
        paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        command = [sys.executable, "-c", SCRIPT, json.dumps(LINES), *kinds]
        subprocess.run(command, cwd=folder, env=os.environ | changes | paths, check=True)
        found.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert len(found[0]) == 2 * len(kinds)
    assert found[0] == found[1] == found[2]


def test_settings_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match="merges is 7, kind 'bpe': only word_bpe"):
        Tokenizer.train(LINES, kind="bpe", vocab_size=331, merges=7)
    with pytest.raises(ValueError, match="merges is -1"):
        Tokenizer.train(LINES, kind="word_bpe", vocab_size=331, merges=-1)
    with pytest.raises(ValueError, match="sentinels is -1"):
        Tokenizer.train(LINES, kind="bytes", vocab_size=331, sentinels=-1)


DATA = os.environ.get("TFM_JAX_DATA")
PUBLISHED = {
    "code": "5b545f318e49f24367c7399019c9aeb5e3720b6379a08f887c2792af71c37f2a",
    "train.en": "0ffe3e3bac16e6aa33ef0dd6a7dca81587479b0d18dff0db2a92ac3f32b00c86",
    "train.de": "b2c74def7ec129f7ea7023a51501c77174c377ef06c6ccc2f031adcfb5cfadbd",
    "val.en": "193d0d18fef5d1bc9d1cddafa13a644de3c5d6a24b45ac44476dcc5e96bfac6e",
    "val.de": "eeb95680d6a06eafb13e3494eed9f9fa99783b892f4a3c72dd36e7ce2e000b68",
    "test_2016_flickr.en": "13b5fe3f92f78c54446d66afcaaa0a00a33ab653a8411f16812c9c5ca3795d6d",
    "test_2016_flickr.de": "375c20d50f4c486149a78dfcfb161a430a04ddabe2b7d150f0c7811dc455ac60",
}


@pytest.mark.skipif(not DATA, reason="TFM_JAX_DATA does not name a folder with multi30k/tok")
def test_multi30k_is_that_of_the_published_recipe(tmp_path):
    """The code and text files of Wu et al. (ACL 2021): 10,000 joint merges, 9,708 pieces and 4 specials."""

    def read(name):
        part, language = name.split(".")
        path = Path(DATA, "multi30k", "tok", f"{part}.lc.norm.tok.{language}.gz")
        return gzip.decompress(path.read_bytes()).decode().removesuffix("\n").split("\n")

    train = read("train.en") + read("train.de")
    codes = vocabulary.learn_codes(train, 10_000)
    (tmp_path / "code").write_text(codes, encoding="utf-8")
    tokenizer = Tokenizer.from_codes(tmp_path / "code", train, vocab_size=9712)
    texts = {name: read(name) for name in PUBLISHED if name != "code"}
    made = {name: "".join(f"{line}\n" for line in tokenizer.segment(lines)) for name, lines in texts.items()}
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (made | {"code": codes}).items()}
    assert sums == PUBLISHED
    ids = {name: tokenizer.encode(texts[name]) for name in ("train.en", "train.de")}
    assert [sum(map(len, side)) for side in ids.values()] == [397_793, 400_507]
    assert {i for side in ids.values() for line in side for i in line} == set(range(4, 9712))
    assert tokenizer.vocab_size == 9712

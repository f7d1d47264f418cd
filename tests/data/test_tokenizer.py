"""Text to ids and back: exactly, always the same way, and never to a special token by accident."""

import json
import os

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from tfm_jax.data.tokenizer import SPECIALS, Tokenizer

LINES = [
    "the cat sat on the mat , the other cat did not",
    "a naïve caf\u00e9 : 23 men and 17 women sat there",
    "der Hund und die Katze saßen auf der Matte",
    "",
    "  the spaces  stay ",
] * 3
KINDS = ["bytes", "characters", "bpe", "line_bpe", "word_bpe", "wordpiece", "unigram"]
EXACT = ["bytes", "bpe", "line_bpe"]
NAMES = [*SPECIALS, "<mask>", "<extra_id_0>", "<extra_id_1>"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def public(tokenizer):
    return {name: value for name, value in vars(tokenizer).items() if not name.startswith("_")}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return Tokenizer.train(LINES, kind=request.param, vocab_size=331, mask=True, sentinels=2)


@pytest.fixture(scope="module", params=EXACT)
def exact(request):
    return Tokenizer.train(LINES, kind=request.param, vocab_size=331)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer.train(LINES, kind="bpe", vocab_size=331)


@pytest.fixture(scope="module")
def word_level():
    return Tokenizer.train(LINES, kind="word_bpe", vocab_size=331)


@given(lines=st.lists(TEXT, max_size=5))
def test_text_comes_back_exactly(exact, lines):
    ids = exact.encode(lines)
    assert exact.decode(ids) == lines
    assert all(len(SPECIALS) <= i < exact.vocab_size for sequence in ids for i in sequence)


@pytest.mark.parametrize(
    "line", ["", " ", "  a", "a  ", "\u00a0a", "a\n\nb\t", "\0", "\u2028", "'s", "\U0001f600\u200d"]
)
def test_edges_come_back_exactly(exact, line):
    """B42: empty lines and lines of one space are lines."""
    assert exact.decode(exact.encode([line, "the cat", line])) == [line, "the cat", line]


@given(text=st.text(st.sampled_from(sorted(set("".join(LINES)))), max_size=23))
def test_known_characters_come_back_exactly(text):
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=331)
    assert tokenizer.decode(tokenizer.encode([text])) == [text]


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


@given(pieces=st.lists(st.sampled_from([*NAMES, "</w>", "<", ">", "s", "pad", "/", "the", " "]), max_size=7))
def test_text_is_never_special(tokenizer, pieces):
    """B36: no start or end comes from the text, so a start is there exactly once and an end only at the end."""
    (ids,) = tokenizer.encode(["".join(pieces)])
    assert not (tokenizer.special_ids - {tokenizer.unk_id}) & set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_special_tokens_can_be_learned(kind):
    """The merges of "<s>x" would pass through the start token, and those of "a</w>b" through the end of a word."""
    marks = (*NAMES, "</w>")
    spelled = " ".join(f"{mark}{end}" for mark in marks for end in ("x", "y", "z", ""))
    lines = [spelled, "x<s>y a</w>b </w></w> a</s>"] * 7
    tokenizer = Tokenizer.train(lines, kind=kind, vocab_size=499, mask=True, sentinels=2)
    lines += [f"{mark}b a{mark}b" for mark in marks]  # where no merge of the whole word hides the token
    ids = tokenizer.encode(lines)
    special = tokenizer.special_ids - ({tokenizer.unk_id} if kind == "unigram" else set())
    assert not special & {i for sequence in ids for i in sequence}
    decoded = tokenizer.decode(ids)
    assert decoded == lines or (
        kind == "wordpiece" and [x.replace(" ", "") for x in decoded] == [x.replace(" ", "") for x in lines]
    )


def test_specials(tokenizer):
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert (tokenizer.mask_id, tokenizer.sentinel_ids) == (4, (5, 6))
    assert tokenizer.special_ids == set(range(7))
    assert tokenizer.pieces(list(range(7))) == NAMES
    (ids,) = tokenizer.encode(["the cat"])
    assert tokenizer.decode([[1, *ids, 2, 0, 0], [], [1, 2]]) == ["the cat", "", ""]
    for i in range(3, 7):
        assert tokenizer.decode([[1, i, 2]]) == [NAMES[i]]


def test_specials_only_where_asked_for(byte_level):
    assert (byte_level.mask_id, byte_level.sentinel_ids) == (None, ())
    assert byte_level.special_ids == set(range(4))


def test_ids_outside_the_vocabulary(tokenizer):
    """B17: a model's table may have more rows than there are entries: they read as unknown; negative ids raise."""
    (text,) = tokenizer.decode([[tokenizer.vocab_size, 10**6]])
    assert text.replace(" ", "") == "<unk><unk>"
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


def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("an older file")
    tokenizer.save(path)
    loaded = Tokenizer.load(str(path))
    lines = [*LINES, "<s> the </s> \u2603", "catsaßen"]
    assert loaded.encode(lines) == tokenizer.encode(lines)
    assert loaded.decode(loaded.encode(lines)) == tokenizer.decode(tokenizer.encode(lines))
    assert public(loaded) == public(tokenizer)
    everything = list(range(tokenizer.vocab_size))
    assert loaded.pieces(everything) == tokenizer.pieces(everything)
    assert sorted(os.listdir(tmp_path)) == ["tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "tokenizer_config.json").unlink()  # as older versions wrote it
    assert public(Tokenizer.load(tmp_path)) == public(tokenizer)


def test_two_tokenizers_in_one_folder(tmp_path):
    few = Tokenizer.train(["abc abc"], kind="word_bpe", vocab_size=5, merges=7)
    few.save(tmp_path / "few.json")
    Tokenizer.train(LINES, kind="bytes", vocab_size=331, mask=True).save(tmp_path / "bytes.json")
    assert public(Tokenizer.load(tmp_path / "few.json")) == public(few)


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
    other.write_text("{}")
    with pytest.raises(ValueError, match="other.json holds no tokenizer"):
        Tokenizer.load(other)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [("bpe", 260), ("line_bpe", 260), ("bytes", 260), ("characters", 10), ("wordpiece", 4 + 2 * 5), ("unigram", 10)],
)
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


def bert():
    """WordPiece with the template and the limits that such files hold."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", ",", "[", "]"]
    model = models.WordPiece(vocab={name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(names[:5])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5, pad_token="[PAD]")
    return tokenizer


def t5():
    """Unigram whose entries include the special tokens; its sentinels count down."""
    names = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁cat", "s", "<", "/", ">", "<extra_id_1>", "<extra_id_0>"]
    model = models.Unigram([(name, 0.0 if len(name) > 3 and "▁" not in name else -2.0) for name in names], unk_id=2)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([*names[:3], *names[-2:]])
    return tokenizer


def gpt2():
    """Byte-level BPE whose only special token is the end of text, after all others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def saved(tokenizer, folder, **configs):
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def roles(tokenizer):
    return tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.mask_id


@pytest.mark.parametrize("config", [{}, {"tokenizer_config": {"do_lower_case": True, "model_max_length": 512}}])
def test_a_file_of_bert(tmp_path, config):
    """Known by its usual names; nothing is added to the text, cut from it or padded."""
    tokenizer = Tokenizer.load(saved(bert(), tmp_path, **config))
    assert roles(tokenizer) == (0, 2, 3, 1, 4)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.encode(["the cats , the dog cats", "the"]) == [[5, 6, 7, 8, 5, 1, 6, 7], [5]]
    assert tokenizer.encode(["the [CLS] cat"]) == [[5, 9, 1, 10, 6]]
    assert tokenizer.decode([[2, 5, 4, 6, 7, 3, 0, 0]]) == ["the [MASK] cats"]


def test_a_file_of_t5(tmp_path):
    """No token begins a text: padding does. Sentinels count by name. Text that spells an entry is no special token."""
    tokenizer = Tokenizer.load(saved(t5(), tmp_path, tokenizer_config={"eos_token": "</s>", "pad_token": "<pad>"}))
    assert roles(tokenizer) == (0, 0, 1, 2, None)
    assert tokenizer.sentinel_ids == (11, 10)
    assert tokenizer.encode(["the cats"]) == [[4, 5, 6]]
    assert tokenizer.encode(["the</s>"]) == [[4, 7, 8, 6, 9]]
    assert tokenizer.decode([[0, 4, 11, 6, 1, 0]]) == ["the<extra_id_0>s"]


def test_a_file_of_gpt2(tmp_path):
    """Padding, start and end coincide: decode leaves out all three, and no text is unknown."""
    end = {"content": "<|endoftext|>", "special": True}
    config = {"bos_token": end, "eos_token": end, "unk_token": "<|endoftext|>", "pad_token": None}
    tokenizer = Tokenizer.load(saved(gpt2(), tmp_path, tokenizer_config=config))
    assert roles(tokenizer) == (256, 256, 256, None, None)
    text = "the <|endoftext|>\u2603"
    (ids,) = tokenizer.encode([text])
    assert 256 not in ids and len(ids) == len(text.encode())
    assert tokenizer.decode([[256, *ids, 256, 256]]) == [text]
    with pytest.raises(ValueError, match="token id 257 is no entry of the vocabulary, which has 257"):
        tokenizer.decode([[5, 257]])
    assert tokenizer.pieces([256]) == ["<|endoftext|>"]


@pytest.mark.parametrize("make", [bert, t5, gpt2])
def test_files_of_others_saved_again(tmp_path, make):
    (tmp_path / "ours").mkdir()
    tokenizer = Tokenizer.load(saved(make(), tmp_path))
    tokenizer.save(tmp_path / "ours" / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "ours")
    lines = ["the cats , the", "</s> the <extra_id_0>[MASK]"]
    assert public(again) == public(tokenizer)
    assert again.encode(lines) == tokenizer.encode(lines)
    assert again.decode(again.encode(lines)) == tokenizer.decode(tokenizer.encode(lines))


def test_who_names_the_roles(tmp_path):
    """The caller, else the first file that names a token, else the usual names."""
    config = {"model_max_length": 512}
    names = {"cls_token": "the", "sep_token": {"content": "cat"}, "eos_token": None}
    folder = saved(bert(), tmp_path, tokenizer_config=config, special_tokens_map=names)
    assert roles(Tokenizer.load(folder)) == (0, 5, 6, 1, 4)
    assert roles(Tokenizer.load(folder / "tokenizer.json", specials={"eos": ",", "pad": ","})) == (8, 5, 8, 1, 4)
    saved(bert(), tmp_path, tokenizer_config={"bos_token": "[MASK]", "cls_token": "the"})
    assert roles(Tokenizer.load(folder)) == (0, 4, 3, 1, 4)
    entries = ["[SEP]", "</s>", "[CLS]", "<s>", "[PAD]", "<pad>", "[MASK]", "<mask>", "[UNK]", "<unk>"]
    model = models.WordLevel(vocab={entry: i for i, entry in enumerate(entries)}, unk_token="<unk>")
    (tmp_path / "both").mkdir()
    assert roles(Tokenizer.load(saved(tokenizers.Tokenizer(model), tmp_path / "both"))) == (5, 3, 1, 9, 7)


def test_tokens_that_the_file_does_not_call_special(tmp_path):
    """A role makes a token special: a text that spells it does not have it."""
    tokenizer = gpt2()
    tokenizer.add_tokens(["«mask»"])
    masked = Tokenizer.load(saved(tokenizer, tmp_path), specials={"mask": "«mask»"})
    assert masked.mask_id == 257
    assert masked.special_ids == {256, 257}
    assert masked.pieces([257]) == ["«mask»"]
    text = "a «mask»"
    assert len(masked.encode([text])[0]) == len(text.encode())


def test_roles_that_cannot_be(tmp_path):
    folder = saved(bert(), tmp_path, tokenizer_config={"pad_token": "<nothing>"})
    with pytest.raises(ValueError, match="tokenizer.json: the pad token is '<nothing>', which the vocabulary lacks"):
        Tokenizer.load(folder)
    with pytest.raises(ValueError, match=r"roles of special tokens are \['start'\]: pad, bos, eos"):
        Tokenizer.load(folder, specials={"pad": "the", "start": "the"})
    (folder / "tokenizer_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer_config.json holds no configuration"):
        Tokenizer.load(folder)
    model = models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a")
    (tmp_path / "plain").mkdir()
    plain = saved(tokenizers.Tokenizer(model), tmp_path / "plain")
    with pytest.raises(ValueError, match=r"no end of text is named.*specials=\{'eos': ...\}"):
        Tokenizer.load(plain)
    assert roles(Tokenizer.load(plain, specials={"eos": "b"})) == (1, 1, 1, None, None)


def test_ids_that_no_entry_has_are_unknown(tmp_path):
    """Some files leave ids out."""
    model = models.WordLevel(vocab={"<unk>": 0, "</s>": 1, "the": 5}, unk_token="<unk>")
    tokenizer = Tokenizer.load(saved(tokenizers.Tokenizer(model), tmp_path))
    assert tokenizer.vocab_size == 6
    assert tokenizer.pieces([5, 3]) == ["the", "<unk>"]


def test_segments_need_words(byte_level):
    with pytest.raises(ValueError, match="kind 'word_bpe' is expected"):
        byte_level.segment(["the"])


# --- as transformers reads and writes ---


def template(tokenizer, folder, **configs):
    return Tokenizer.load(saved(tokenizer, folder, **configs), as_transformers=True).template


def test_the_template_is_what_the_post_processor_adds(tmp_path):
    """B33: what stands before and after "the"; the second route is the library itself."""
    tokenizer = bert()
    assert template(tokenizer, tmp_path) == ((2,), (3,))
    byte_level, pieces = processors.ByteLevel(), ("[MASK] $A [CLS] [SEP]", [("[MASK]", 4), ("[CLS]", 2), ("[SEP]", 3)])
    for post_processor, expected in [
        (processors.RobertaProcessing(("[SEP]", 3), ("[MASK]", 4)), ((4,), (3,))),
        (processors.TemplateProcessing(single=pieces[0], special_tokens=pieces[1]), ((4,), (2, 3))),
        (processors.TemplateProcessing(single="$A", special_tokens=[]), ((), ())),
        (byte_level, ((), ())),
        (processors.Sequence([byte_level, processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))]), ((2,), (3,))),
        (
            processors.Sequence(
                [
                    processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
                    processors.TemplateProcessing("[MASK] $A", None, pieces[1]),
                ]
            ),
            ((4, 2), (3,)),
        ),
    ]:
        tokenizer.post_processor = post_processor
        assert template(tokenizer, tmp_path) == expected
        tokenizer.no_truncation()
        tokenizer.no_padding()
        assert tokenizer.encode("the").ids == [*expected[0], 5, *expected[1]]
        assert Tokenizer.load(tmp_path).template is None
    assert template(gpt2(), tmp_path) == ((), ())
    twice = processors.TemplateProcessing(single="$A [SEP] $A", special_tokens=pieces[1])
    tokenizer.post_processor = twice
    with pytest.raises(ValueError, match="tokenizer.json: its post_processor does not put the text once"):
        template(tokenizer, tmp_path)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({"add_bos_token": True}, ((2,), ())),
        ({"add_eos_token": True}, ((), (3,))),
        ({"add_bos_token": True, "add_eos_token": True}, ((2,), (3,))),
        ({"add_bos_token": False}, ((), ())),
        ({"add_bos_token": True, "bos_token": None}, ((), ())),
    ],
)
def test_flags_beside_it_replace_the_template(tmp_path, flags, expected):
    """As transformers 5 does for every tokenizer."""
    config = {"bos_token": {"content": "[CLS]"}, "eos_token": "[SEP]", "pad_token": "[PAD]"} | flags
    assert template(bert(), tmp_path, tokenizer_config=config) == expected


def test_special_tokens_that_a_text_spells(tmp_path):
    """They are read as such, and none is shown; what only tokenizer_config.json names is special too."""
    names = {"bos_token": "[CLS]", "additional_special_tokens": ["the", {"content": "cat"}], "eos_token": "[SEP]"}
    tokenizer = Tokenizer.load(saved(bert(), tmp_path, tokenizer_config=names), as_transformers=True)
    assert tokenizer.encode(["the [CLS] cats"]) == [[5, 2, 6, 1]]
    assert tokenizer.special_ids == {0, 1, 2, 3, 4, 5, 6}
    assert tokenizer.decode([[2, 5, 8, 6, 4, 3, 99]]) == [","]
    split = Tokenizer.load(
        saved(bert(), tmp_path, tokenizer_config=names | {"split_special_tokens": True}), as_transformers=True
    )
    assert split.encode(["the [CLS] cats"]) == [[5, 9, 1, 10, 6, 7]]
    extra = {"bos_token": "[CLS]", "eos_token": "[SEP]", "extra_special_tokens": {"image_token": "the"}}
    assert 5 in Tokenizer.load(saved(bert(), tmp_path, tokenizer_config=extra), as_transformers=True).special_ids


def test_spaces_are_cleaned_up_where_the_file_says_so(tmp_path):
    """But not those of BPE, which knows its spaces."""
    names = ["</s>", *"a . ? ! , ' n't 'm 's 've 're".split()]
    words = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="</s>"))
    ids = [1, 2, 3, 4, 5, 1, 6, 1, 7, 8, 9, 10, 11]
    for clean, expected in [(True, "a.?!, a'a n't'm's've're"), (False, "a . ? ! , a ' a n't 'm 's 've 're")]:
        config = {"eos_token": "</s>", "clean_up_tokenization_spaces": clean}
        found = Tokenizer.load(saved(words, tmp_path, tokenizer_config=config), as_transformers=True)
        assert found.decode([ids]) == [expected.replace("a n't", "an't" if clean else "a n't")]
    config = {"clean_up_tokenization_spaces": True}
    pairs = Tokenizer.load(saved(gpt2(), tmp_path, tokenizer_config=config), as_transformers=True)
    assert pairs.decode(pairs.encode(["a , b ."])) == ["a , b ."]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_ours_with_a_template(kind, tmp_path):
    """Saved, and read by the library alone: the same ids, with the template around them, and text stays text."""
    tokenizer = Tokenizer.train(LINES, kind=kind, vocab_size=331, mask=True, sentinels=2)
    framed = tokenizer.with_template((1,), (2, 4), {"padding_side": "left"})
    assert framed.template == ((1,), (2, 4)) and tokenizer.template is None
    # there a model of pieces takes what spells a special token for its entry
    lines = LINES[:3] if kind == "unigram" else [*LINES[:3], "a <mask> b", "<s>"]
    assert framed.encode(lines) == tokenizer.encode(lines)
    expected = [[1, *ids, 2, 4] for ids in tokenizer.encode(lines)]
    assert framed.encode_sources(lines) == expected
    assert framed.encode_prompts(lines) == [ids[:-2] for ids in expected]
    assert tokenizer.encode_sources(lines) == [ids[1:-1] for ids in expected]
    assert tokenizer.encode_prompts(["", *lines]) == [[1], *(ids[:-2] for ids in expected)]
    framed.save(tmp_path / "tokenizer.json")
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [file.encode(line).ids for line in LINES[:3]] == expected[:3]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["padding_side"] == "left" and settings["split_special_tokens"] is True
    again = Tokenizer.load(tmp_path, as_transformers=True)
    assert again.template == framed.template and again.encode(lines) == tokenizer.encode(lines)
    assert public(Tokenizer.load(tmp_path)) == public(tokenizer)


def test_roles_by_id(tmp_path):
    folder = saved(bert(), tmp_path)
    assert roles(Tokenizer.load(folder, specials={"bos": 3, "pad": "[CLS]"})) == (2, 3, 3, 1, 4)
    with pytest.raises(ValueError, match="the bos token is None, which the vocabulary lacks"):
        Tokenizer.load(folder, specials={"bos": 99})

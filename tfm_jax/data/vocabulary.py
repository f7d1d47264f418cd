"""How each kind of vocabulary is learned from text, or read from a file of BPE codes."""

import contextlib
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import tokenizers
from subword_nmt.learn_bpe import learn_bpe
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

Kind = Literal["bytes", "characters", "bpe", "line_bpe", "word_bpe", "wordpiece", "unigram"]

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
END_OF_WORD = "</w>"
GAPS = " \r\n"  # what stands between the words of word_bpe; other white space is part of a word, as for subword-nmt
_CODES_VERSION = "#version: 0.2"
_STRETCH = 1000  # characters


def special_tokens(*, mask: bool = False, sentinels: int = 0) -> tuple[str, ...]:
    """The first entries of every learned vocabulary, in the order of their ids."""
    if sentinels < 0:
        raise ValueError(f"sentinels is {sentinels}: a number from 0 up is expected")
    return (*SPECIALS, *(["<mask>"] if mask else []), *(f"<extra_id_{i}>" for i in range(sentinels)))


def learn(
    lines: Iterable[str], *, kind: Kind, vocab_size: int, merges: int | None, specials: Sequence[str]
) -> tuple[tokenizers.Tokenizer, int]:
    """The vocabulary of `Tokenizer.train`, and how many of its entries are in use.

    Raises `ValueError` if `vocab_size` cannot hold the special tokens and the alphabet (for word_bpe: the pieces that
    occur), and for `merges` with another kind than word_bpe.
    """
    if merges is not None and (kind != "word_bpe" or merges < 0):
        raise ValueError(f"merges is {merges}, kind {kind!r}: only word_bpe takes a number of merges, from 0 up")
    match kind:
        case "bytes":
            tokenizer = _bytes(specials)
        case "characters":
            tokenizer = _characters(set().union(*lines), specials)
        case "bpe" | "line_bpe":
            tokenizer = _byte_level_bpe(lines, kind, vocab_size, specials)
        case "word_bpe":
            words = _words(lines)
            symbols = vocab_size - len(specials) if merges is None else merges
            pairs = _pairs(_codes(words, symbols, total=merges is None), "the codes")
            return _word_bpe(pairs, words, vocab_size, specials)
        case "wordpiece":
            tokenizer = _wordpiece(_kept(lines), vocab_size, specials)
        case "unigram":
            tokenizer = _unigram(_kept(lines), vocab_size, specials)
        case other:
            raise ValueError(f"kind of tokenizer is {other!r}: one of {', '.join(Kind.__args__)} is expected")
    size = tokenizer.get_vocab_size()
    _check_size(vocab_size, size, specials, "the alphabet of this text alone")
    return tokenizer, size


def learn_codes(lines: Iterable[str], merges: int) -> str:
    """The code file (version 0.2) that `subword-nmt learn-bpe -s merges` makes of the lines (Sennrich et al. 2016).

    It has fewer merges where no pair of symbols is left that occurs twice.
    """
    return _codes(_words(lines), merges, total=False)


def from_codes(
    path: str | os.PathLike[str], lines: Iterable[str], *, vocab_size: int, specials: Sequence[str]
) -> tuple[tokenizers.Tokenizer, int]:
    """word_bpe with the merges of a code file, and how many entries are in use.

    Raises `ValueError` for a file that is none of version 0.2, and if the pieces of `lines` need more than `vocab_size`
    entries.
    """
    try:
        codes = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no code file of subword-nmt, which is UTF-8: {error}") from error
    return _word_bpe(_pairs(codes, str(path)), _words(lines), vocab_size, specials)


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level pieces stands for: itself if printable, else 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def at_gaps() -> pre_tokenizers.PreTokenizer:
    """Splits a line into the words of word_bpe."""
    return pre_tokenizers.Split(tokenizers.Regex(f"[{GAPS}]+"), behavior="removed")


def _bytes(specials: Sequence[str]) -> tokenizers.Tokenizer:
    alphabet = byte_alphabet()
    entries = [*specials, *sorted(alphabet, key=alphabet.__getitem__)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _characters(characters: set[str], specials: Sequence[str]) -> tokenizers.Tokenizer:
    # BPE without merges: the whole text is one word, which is faster than cutting it first and keeps every character.
    vocabulary = {entry: i for i, entry in enumerate([*specials, *sorted(characters)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _byte_level_bpe(lines: Iterable[str], kind: Kind, vocab_size: int, specials: Sequence[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "bpe":
        # A space before the line lets its first word share the entry of the same word elsewhere; add_prefix_space would
        # not do: it leaves lines that begin with a space alone, and decoding could not tell the two apart.
        tokenizer.normalizer = normalizers.Prepend(" ")
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)])
    else:
        lines = _stretches(lines)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=_on_terminal()
    )
    tokenizer.train_from_iterator(lines, trainer)
    state = json.loads(tokenizer.to_str())
    merges = state["model"]["merges"]
    state["model"]["merges"] = [[left, right] for left, right in merges if left + right not in specials]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _stretches(lines: Iterable[str]) -> Iterator[str]:
    """Long lines in parts: every merge goes through all of a word, and a book as one word would take hours."""
    for line in lines:
        yield from (line[start : start + _STRETCH] for start in range(0, len(line), _STRETCH))


def _words(lines: Iterable[str]) -> Counter[str]:
    words, gaps = Counter(), re.compile(f"[{GAPS}]+")
    for line in lines:
        words.update(gaps.split(line))
    del words[""]
    return words


def _codes(words: Counter[str], symbols: int, *, total: bool) -> str:
    """total: `symbols` counts characters and merges together, else merges alone."""
    if max(map(len, words), default=0) < 2:  # the library fails where there is no pair at all
        return f"{_CODES_VERSION}\n"
    codes = io.StringIO()
    counted = (f"{word} {count}" for word, count in words.items())
    quiet = contextlib.nullcontext() if _on_terminal() else contextlib.redirect_stderr(io.StringIO())
    with quiet:
        learn_bpe(counted, codes, symbols, is_dict=True, total_symbols=total)
    return codes.getvalue()


def _pairs(codes: str, name: str) -> list[tuple[str, str]]:
    """The merges in order, each once: of repeated ones the first counts."""
    first, *lines = codes.rstrip("\n").split("\n")
    if not re.fullmatch(rf"{re.escape(_CODES_VERSION)}(\.0)*", first.strip("\r\n ")):
        raise ValueError(
            f"{name} begins with {first[:40]!r}, {_CODES_VERSION!r} is expected: give a code file that `subword-nmt "
            "learn-bpe` wrote, and learn codes of an older version again"
        )
    pairs = {}
    for number, line in enumerate(lines, start=2):
        pair = tuple(line.strip("\r\n ").split(" "))
        if len(pair) != 2 or not all(pair):
            raise ValueError(f"{name}:{number}: {line!r} is no merge: two pieces with one space between are expected")
        pairs.setdefault(pair)
    return list(pairs)


def _word_bpe(
    pairs: Iterable[tuple[str, str]], words: Counter[str], vocab_size: int, specials: Sequence[str]
) -> tuple[tokenizers.Tokenizer, int]:
    """Entries: specials, pieces that occur by falling count, characters that do not, results of merges that do not."""
    # Without merges that spell a special token or, from characters of the text, the end of a word: either would be read
    # as what it spells.
    merges = [
        (left, right)
        for left, right in pairs
        if END_OF_WORD not in left + right.removesuffix(END_OF_WORD)
        and {left, right, left + right}.isdisjoint(specials)
    ]
    symbols = {character + end for character in set("".join(words)) for end in ("", END_OF_WORD)}
    symbols |= {symbol for left, right in merges for symbol in (left, right, left + right)}
    draft = _apply_merges([*specials, *sorted(symbols)], merges, specials)
    counts = Counter()
    for encoding, count in zip(draft.encode_batch(list(words)), words.values(), strict=True):
        for piece in encoding.tokens:
            counts[piece] += count
    _check_size(vocab_size, len(specials) + len(counts), specials, f"the {len(counts)} pieces that occur in this text")

    def place(symbol: str) -> tuple[int, bool, str]:
        return -counts[symbol], not counts[symbol] and len(symbol.removesuffix(END_OF_WORD)) > 1, symbol

    tokenizer = _apply_merges([*specials, *sorted(symbols, key=place)], merges, specials)
    return tokenizer, min(vocab_size, tokenizer.get_vocab_size())


def _apply_merges(
    entries: Sequence[str], merges: list[tuple[str, str]], specials: Sequence[str]
) -> tokenizers.Tokenizer:
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", end_of_word_suffix=END_OF_WORD)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = at_gaps()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _wordpiece(lines: Sequence[str], vocab_size: int, specials: Sequence[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    # The characters inside words as special tokens: the trainer numbers the ones it finds itself in the order of a
    # random hash, which changes ids and merges from run to run; and every known character may now stand inside a word.
    pairs = " ".join(f"a{character}" for character in sorted(set().union(*lines)))
    runs = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(pairs))
    inside = [f"##{run[1]}" for run, _ in runs if len(run) == 2]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*specials, *inside], show_progress=_on_terminal()
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][: len(specials)]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _unigram(lines: Sequence[str], vocab_size: int, specials: Sequence[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    characters = {character.replace(" ", "▁") for character in set().union(*lines)} | ({"▁"} if any(lines) else set())
    # The trainer must not start where the alphabet does not fit: it would never end.
    _check_size(vocab_size, len(specials) + len(characters), specials, "the alphabet of this text alone")
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(specials), unk_token="<unk>", show_progress=_on_terminal()
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    state = json.loads(tokenizer.to_str())
    learned = {piece: score for piece, score in state["model"]["vocab"] if piece not in specials}
    # The trainer sums in the order of a random hash (scores differ by 1e-10) and gives characters it has pruned the
    # lowest score plus 1e-4 times a random place.
    lowest = min(learned.values(), default=0.0)
    pruned = {p for p, score in learned.items() if len(p) == 1 and score < lowest + 1e-4 * len(characters)}
    scores = {piece: round(lowest if piece in pruned else score, 4) for piece, score in learned.items()}
    longer = sorted(set(scores) - characters, key=lambda piece: (-scores[piece], piece))
    kept = characters.union(longer[: vocab_size - len(specials) - len(characters)])  # it adds too many to a full one
    pieces = sorted(kept & set(scores), key=lambda piece: (-scores[piece], piece))
    state["model"]["vocab"][len(specials) :] = [[piece, scores[piece]] for piece in pieces]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _kept(lines: Iterable[str]) -> Sequence[str]:
    """Lines that can be read twice, copied only where they could not."""
    return lines if isinstance(lines, list | tuple) else list(lines)


def _check_size(vocab_size: int, needed: int, specials: Sequence[str], what: str) -> None:
    if needed > vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the {len(specials)} special tokens and {what} need {needed}: raise it"
        )


def _on_terminal() -> bool:
    return sys.stderr.isatty()

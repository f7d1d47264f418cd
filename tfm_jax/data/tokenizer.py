"""Text to token ids and back, by byte pair encoding learned from the text (Sennrich et al. 2016)."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
_END_OF_WORD = "</w>"


class Tokenizer:
    """Lines of text to lists of ids and back; the first four ids are padding, start, end of text and unknown.

    Ids are those of text alone: who needs a start or an end adds it. Text that happens to spell a special token, such
    as "</s>", is text.
    """

    pad_id, bos_id, eos_id, unk_id = range(4)

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        found = [tokenizer.id_to_token(i) for i in range(len(SPECIALS))]
        if found != list(SPECIALS):
            raise ValueError(f"ids 0 to 3 are {found}, {list(SPECIALS)} are expected: make it with Tokenizer.train")
        tokenizer.encode_special_tokens = True  # else "</s>" in a line becomes the end; the file does not keep this
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.model.end_of_word_suffix is None

    @classmethod
    def train(cls, lines: Iterable[str], *, kind: Literal["bpe", "word_bpe"], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary of at most `vocab_size` entries, fewer where the text has no more pairs to merge.

        kind "bpe" is byte-level BPE (Radford et al. 2019): any Unicode text comes back exactly. "word_bpe" splits at
        white space and merges inside words: words come back joined by single spaces, and characters that `lines` lacks
        become the unknown token. The same lines give the same vocabulary. Raises `ValueError` if `vocab_size` cannot
        hold the special tokens and the alphabet.
        """
        lines = list(lines)
        match kind:
            case "bpe":
                tokenizer, options = _byte_level_bpe()
            case "word_bpe":
                tokenizer, options = _word_bpe(lines)
            case other:
                raise ValueError(f"kind of tokenizer is {other!r}: 'bpe' or 'word_bpe' is expected")
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=sys.stderr.isatty(), **options)
        tokenizer.train_from_iterator(lines, trainer, length=len(lines))
        if (size := tokenizer.get_vocab_size()) > vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size}, but the {len(SPECIALS)} special tokens and the alphabet of this text "
                f"alone need {size}: raise it well above that" + (", or use kind 'bpe'" if kind == "word_bpe" else "")
            )
        return cls(_only_text_merges(tokenizer) if kind == "word_bpe" else tokenizer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read what `save` wrote; raises `FileNotFoundError`, or `ValueError` for a file that holds something else."""
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: no tokenizer has been saved there")
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} holds no tokenizer of this library: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file of the tokenizers library; a crash leaves the old file or the new one, never a part."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @property
    def vocab_size(self) -> int:
        """Number of entries, special ones included; ids run from 0 to one less."""
        return self._tokenizer.get_vocab_size()

    def encode(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, in order, none of them pad, bos or eos; the lines are spread over the CPU's cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)]

    def decode(self, ids: list[list[int]]) -> list[str]:
        """The text of each list of ids, without pad, bos and eos.

        Ids from `vocab_size` up, which a model with a larger table may choose, read as the unknown token. Raises
        `ValueError` for negative ids.
        """
        silent = {self.pad_id, self.bos_id, self.eos_id}
        kept = [[i for i in self._known(sequence) if i not in silent] for sequence in ids]
        return self._tokenizer.decode_batch(kept, skip_special_tokens=False)

    def pieces(self, ids: list[int]) -> list[str]:
        """Names of the ids, to label an axis: bytes that are no whole character show as \\xe2, specials as named."""
        return [self._piece(i) for i in self._known(ids)]

    def _known(self, ids: list[int]) -> list[int]:
        if ids and min(ids) < 0:
            raise ValueError(f"token id {min(ids)} is negative: ids from 0 up are expected")
        size = self.vocab_size
        return [i if i < size else self.unk_id for i in ids]

    def _piece(self, token_id: int) -> str:
        piece = self._tokenizer.id_to_token(token_id)
        if not self._byte_level or token_id < len(SPECIALS):
            return piece
        return bytes(_BYTE_OF[character] for character in piece).decode(errors="backslashreplace")


def _byte_level_bpe() -> tuple[tokenizers.Tokenizer, dict]:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # A space before the line lets its first word share the entry of the same word elsewhere; add_prefix_space would not
    # do, because it leaves lines that begin with a space alone and decoding could not tell the two apart.
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, {"special_tokens": list(SPECIALS), "initial_alphabet": alphabet}


def _word_bpe(lines: list[str]) -> tuple[tokenizers.Tokenizer, dict]:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix=_END_OF_WORD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=_END_OF_WORD)
    # Final forms of the characters as special tokens: the trainer numbers the ones it finds itself in the order of a
    # random hash, which changes ids and merges from run to run; and every known character may now end a word.
    characters = tokenizer.pre_tokenizer.pre_tokenize_str("".join(sorted(set().union(*lines))))
    final = [character + _END_OF_WORD for run, _ in characters for character in run]
    return tokenizer, {"special_tokens": [*SPECIALS, *final], "end_of_word_suffix": _END_OF_WORD}


def _only_text_merges(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Drop merges of text that spells a special token or the end-of-word mark, which would become that token."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][: len(SPECIALS)]
    state["model"]["merges"] = [
        [left, right]
        for left, right in state["model"]["merges"]
        if left + right not in SPECIALS and _END_OF_WORD not in left + right.removesuffix(_END_OF_WORD)
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level pieces stands for: itself if printable, else 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()

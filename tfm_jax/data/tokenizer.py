"""Text to token ids and back, and which ids have a role: padding, start, end, unknown, mask, sentinels."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers

from tfm_jax.data import vocabulary
from tfm_jax.data.vocabulary import SPECIALS, Kind

__all__ = ["SPECIALS", "Tokenizer"]

# Each role, its names in Hugging Face's files in order of preference, and tokens that have it where no file says so.
_ROLES = {
    "pad": (("pad_token",), ("<pad>", "[PAD]")),
    "bos": (("bos_token", "cls_token"), ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>")),
    "eos": (("eos_token", "sep_token"), ("</s>", "[SEP]", "<eos>", "<|endoftext|>", "<|end_of_text|>")),
    "unk": (("unk_token",), ("<unk>", "[UNK]")),
    "mask": (("mask_token",), ("<mask>", "[MASK]")),
}
_IN_USE = "entries_in_use"  # our own key beside theirs
_BYTE_OF = vocabulary.byte_alphabet()


class Tokenizer:
    """Lines of text to lists of ids and back, by a `tokenizers.Tokenizer`; ids are those of text alone.

    Who needs a start or an end adds it: text that happens to spell a special token, such as "</s>", is text.

    pad_id, bos_id, eos_id: may coincide. unk_id: None where the vocabulary has no token for what it does not know, or
    one that is also padding, start or end. mask_id: None where there is none. sentinel_ids: of <extra_id_0>,
    <extra_id_1>, ... in this order. special_ids: all of these and every other token that the file calls special.
    vocab_size: number of entries; ids run from 0 to one less.
    """

    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int | None
    mask_id: int | None
    sentinel_ids: tuple[int, ...]
    special_ids: frozenset[int]
    vocab_size: int

    def __init__(self, tokenizer: tokenizers.Tokenizer, specials: Mapping[str, str], *, vocab_size: int | None = None):
        """specials: the token of each role (pad, bos, eos, unk, mask). Ids from `vocab_size` up are not in use.

        Without pad, eos pads; without bos, pad begins (as T5's decoder does). Raises `ValueError` for a role that is
        none, for a token that the vocabulary lacks, and without eos.
        """
        entries = tokenizer.get_vocab()
        if wrong := set(specials) - set(_ROLES):
            raise ValueError(f"roles of special tokens are {sorted(wrong)}: {', '.join(_ROLES)} are expected")
        for role, token in specials.items():
            if token not in entries:
                raise ValueError(f"the {role} token is {token!r}, which the vocabulary lacks: name it with specials=")
        if "eos" not in specials:
            raise ValueError(
                f"no end of text is named, and none of {', '.join(_ROLES['eos'][1])} is in the vocabulary: "
                "name it with specials={'eos': ...}"
            )
        roles = {"pad": specials["eos"]} | dict(specials)
        roles = {"bos": roles["pad"]} | roles
        if roles.get("unk") in (roles["pad"], roles["bos"], roles["eos"]):
            del roles["unk"]
        self.pad_id, self.bos_id, self.eos_id = (entries[roles[role]] for role in ("pad", "bos", "eos"))
        self.unk_id, self.mask_id = (entries[roles[role]] if role in roles else None for role in ("unk", "mask"))
        found = sorted(int(match[1]) for match in map(re.compile(r"<extra_id_(\d+)>").fullmatch, entries) if match)
        sentinels = [f"<extra_id_{number}>" for number in found]
        self.sentinel_ids = tuple(entries[token] for token in sentinels)
        named = {*roles.values(), *sentinels}
        added = tokenizer.get_added_tokens_decoder()
        tokenizer.add_special_tokens(sorted(named - {token.content for token in added.values() if token.special}))
        tokenizer.encode_special_tokens = True  # else "</s>" in a line becomes the end; the file does not keep this
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = {i for i, token in added.items() if token.special} | {entries[token] for token in named}
        self.special_ids = frozenset(special)
        self.vocab_size = max(entries.values()) + 1 if vocab_size is None else vocab_size
        self._holes = frozenset(range(max(entries.values()) + 1)) - set(entries.values())
        self._cut = self.vocab_size <= max(entries.values())
        if self._cut and self.unk_id is None:
            raise ValueError(f"{self.vocab_size} of {len(entries)} entries are in use, but no unknown token is named")
        self._tokenizer, self._roles, self._named = tokenizer, roles, set(added) | special
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        *,
        kind: Kind,
        vocab_size: int,
        merges: int | None = None,
        mask: bool = False,
        sentinels: int = 0,
    ) -> "Tokenizer":
        """Learn a vocabulary of at most `vocab_size` entries, fewer where the text has no more pieces to offer.

        The first ids are <pad>, <s>, </s>, <unk>, then <mask> if asked for, then so many sentinels <extra_id_0>, ...
        The same lines give the same vocabulary. The kinds:

        - bytes: id = byte + number of special tokens; bpe: byte-level BPE inside words (Radford et al. 2019);
          line_bpe: the same across words. Any Unicode text comes back exactly.
        - characters: code points in order; what `lines` lacks is unknown.
        - word_bpe: BPE inside words split at spaces, learned by subword-nmt (Sennrich et al. 2016), `merges` of them or
          as many as fill `vocab_size`. Words come back joined by single spaces. Pieces that occur in `lines` come
          first, by falling count. Merges that would spell a special token or the mark </w> are left out.
        - wordpiece: that of BERT (Devlin et al. 2019), cased. unigram: that of T5 (Kudo 2018), without normalisation.

        Raises `ValueError` if `vocab_size` cannot hold the special tokens and the alphabet, for word_bpe the pieces
        that occur.
        """
        specials = vocabulary.special_tokens(mask=mask, sentinels=sentinels)
        learned = vocabulary.learn(lines, kind=kind, vocab_size=vocab_size, merges=merges, specials=specials)
        return cls._learned(*learned)

    @classmethod
    def from_codes(
        cls,
        path: str | os.PathLike[str],
        lines: Iterable[str],
        *,
        vocab_size: int,
        mask: bool = False,
        sentinels: int = 0,
    ) -> "Tokenizer":
        """word_bpe with the merges of a code file of subword-nmt; `lines`, the training text, decide the entries.

        Raises `ValueError` for a file that is no code file of version 0.2, naming a line that is no merge, and if the
        pieces of `lines` need more than `vocab_size` entries.
        """
        specials = vocabulary.special_tokens(mask=mask, sentinels=sentinels)
        return cls._learned(*vocabulary.from_codes(path, lines, vocab_size=vocab_size, specials=specials))

    @classmethod
    def _learned(cls, tokenizer: tokenizers.Tokenizer, in_use: int) -> "Tokenizer":
        return cls(tokenizer, _known_roles(tokenizer), vocab_size=in_use)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, specials: Mapping[str, str] | None = None) -> "Tokenizer":
        """Read what `save` wrote, or a tokenizer.json of Hugging Face or the folder that holds it.

        The roles (pad, bos, eos, unk, mask) are those of `specials`, else of the first file beside it that names any
        (tokenizer_config.json, special_tokens_map.json; cls and sep are bos and eos where these are not named), else
        the usual names, such as <pad> or [PAD], that are in the vocabulary. Truncation, padding and templates of the
        file are not applied. Raises `FileNotFoundError`, or `ValueError` for a file that holds something else.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: no tokenizer has been saved there")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} holds no tokenizer: {error}") from error
        roles, in_use = _config_roles(path)
        try:
            return cls(tokenizer, _known_roles(tokenizer) | roles | dict(specials or {}), vocab_size=in_use)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and, beside it, tokenizer_config.json with the roles, as transformers reads them.

        (NAME.json and NAME_config.json for another name.) A crash leaves each file old or new, never a part.
        """
        path = Path(path)
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {f"{role}_token": token for role, token in self._roles.items()}
        config["additional_special_tokens"] = [self._tokenizer.id_to_token(i) for i in self.sentinel_ids]
        if self._cut:
            config[_IN_USE] = self.vocab_size
        _write(path.with_name(f"{path.stem}_config.json"), json.dumps(config, indent=2, ensure_ascii=False))
        _write(path, self._tokenizer.to_str(pretty=True))

    def encode(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, in order, none of them special but unk; the lines are spread over the CPU's cores."""
        encodings = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        return [self._of_text(encoding.ids) for encoding in encodings]

    def decode(self, ids: list[list[int]]) -> list[str]:
        """The text of each list of ids, without pad, bos and eos; the other special tokens show by name.

        Ids from `vocab_size` up, which a model with a larger table may choose, read as the unknown token. Raises
        `ValueError` for them where there is none, and for negative ids.
        """
        silent = {self.pad_id, self.bos_id, self.eos_id}
        kept = [[i for i in self._known(sequence) if i not in silent] for sequence in ids]
        return self._tokenizer.decode_batch(kept, skip_special_tokens=False)

    def pieces(self, ids: list[int]) -> list[str]:
        """Names of the ids, to label an axis: bytes that are no whole character show as \\xe2, specials as named."""
        return [self._piece(i) for i in self._known(ids)]

    def segment(self, lines: list[str]) -> list[str]:
        """The lines as `subword-nmt apply-bpe` writes them: pieces between spaces, "@@" after those inside a word.

        What has no entry of its own is written as it stands. Raises `ValueError` for another kind than word_bpe.
        """
        mark = getattr(self._tokenizer.model, "end_of_word_suffix", None)
        if mark != vocabulary.END_OF_WORD or repr(self._tokenizer.pre_tokenizer) != repr(vocabulary.at_gaps()):
            raise ValueError("this vocabulary has no segments: kind 'word_bpe' is expected")
        encodings = self._tokenizer.encode_batch(lines, add_special_tokens=False)
        return [_segmented(line, encoding.offsets) for line, encoding in zip(lines, encodings, strict=True)]

    def _of_text(self, ids: list[int]) -> list[int]:
        """A model of pieces (unigram) takes "</s>" in a line for its entry: such a piece is read in two parts."""
        special = self.special_ids - {self.unk_id}
        if not special.isdisjoint(ids):
            ids = [part for i in ids for part in (self._spelled(i) if i in special else (i,))]
        return [i if i < self.vocab_size else self.unk_id for i in ids] if self._cut else ids

    def _spelled(self, token_id: int) -> list[int]:
        token, model = self._tokenizer.id_to_token(token_id), self._tokenizer.model
        return [part.id for text in (token[:1], token[1:]) for part in model.tokenize(text)]

    def _known(self, ids: list[int]) -> list[int]:
        if ids and min(ids) < 0:
            raise ValueError(f"token id {min(ids)} is negative: ids from 0 up are expected")
        known = [i if i < self.vocab_size and i not in self._holes else self.unk_id for i in ids]
        if self.unk_id is None and None in known:
            raise ValueError(
                f"token id {ids[known.index(None)]} is no entry of the vocabulary, which has {self.vocab_size} and no "
                "unknown token: give a model with as many rows, or leave such ids out"
            )
        return known

    def _piece(self, token_id: int) -> str:
        piece = self._tokenizer.id_to_token(token_id)
        if not self._byte_level or token_id in self._named or not _BYTE_OF.keys() >= set(piece):
            return piece
        return bytes(_BYTE_OF[character] for character in piece).decode(errors="backslashreplace")


def _segmented(line: str, offsets: list[tuple[int, int]]) -> str:
    """Spaces at the edges stay, several between words become one, as in subword-nmt."""
    ends = {i for i, character in enumerate(line) if character in vocabulary.GAPS} | {len(line)}
    pieces = (line[start:end] + ("" if end in ends else "@@") for start, end in offsets)
    head, tail = line.lstrip(vocabulary.GAPS), line.rstrip(vocabulary.GAPS)
    return line[: len(line) - len(head)] + " ".join(pieces) + (line[len(tail) :] if tail else "")


def _known_roles(tokenizer: tokenizers.Tokenizer) -> dict[str, str]:
    entries = tokenizer.get_vocab()
    return {role: name for role, (_, names) in _ROLES.items() for name in reversed(names) if name in entries}


def _config_roles(path: Path) -> tuple[dict[str, str], int | None]:
    """Token of each role, and the entries in use, by the first file beside `path` that names a token."""
    for name in (f"{path.stem}_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        file = path.with_name(name)
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            given = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file} holds no configuration of a tokenizer: {error}") from error
        roles = {role: given[key] for role, (keys, _) in _ROLES.items() for key in reversed(keys) if given.get(key)}
        if roles:
            return roles, config.get(_IN_USE)
    return {}, None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

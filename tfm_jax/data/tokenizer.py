"""Text to token ids and back, and which ids have a role: padding, start, end, unknown, mask, sentinels."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, processors

from tfm_jax.data import vocabulary
from tfm_jax.data.roles import ROLES, named_roles, named_tokens, read_settings, template_of, usual_roles, without_spaces
from tfm_jax.data.vocabulary import SPECIALS, Kind

__all__ = ["SPECIALS", "Tokenizer"]

_IN_USE = "entries_in_use"  # our own key beside theirs
_BYTE_OF = vocabulary.byte_alphabet()


class Tokenizer:
    """Lines of text to lists of ids and back, by a `tokenizers.Tokenizer`; ids are those of text alone.

    Who needs a start or an end adds it. Text that happens to spell a special token, such as "</s>", is text.

    template: None, or of a directory of Hugging Face the ids that stand before and after a text. Such a tokenizer
    reads and writes as transformers does: special tokens that a text spells are read as such (unless
    split_special_tokens is set in tokenizer_config.json), and none is shown.
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
    template: tuple[tuple[int, ...], tuple[int, ...]] | None

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        specials: Mapping[str, str],
        *,
        vocab_size: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        """specials: the token of each role (pad, bos, eos, unk, mask). Ids from `vocab_size` up are not in use.

        settings: tokenizer_config.json of a directory of Hugging Face, for which text is read and written as there.
        Without pad, eos pads; without bos, pad begins (as T5's decoder does). Raises `ValueError` for a role that is
        none, for a token that the vocabulary lacks, and without eos.
        """
        entries = tokenizer.get_vocab()
        if wrong := set(specials) - set(ROLES):
            raise ValueError(f"roles of special tokens are {sorted(wrong)}: {', '.join(ROLES)} are expected")
        for role, token in specials.items():
            if token not in entries:
                raise ValueError(f"the {role} token is {token!r}, which the vocabulary lacks: name it with specials=")
        if "eos" not in specials:
            raise ValueError(
                f"no end of text is named, and none of {', '.join(ROLES['eos'][1])} is in the vocabulary: "
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
        named = {*roles.values(), *sentinels, *(token for token in named_tokens(settings or {}) if token in entries)}
        added = tokenizer.get_added_tokens_decoder()
        tokenizer.add_special_tokens(sorted(named - {token.content for token in added.values() if token.special}))
        # else "</s>" in a line becomes the end; the file does not keep this
        tokenizer.encode_special_tokens = settings is None or bool(settings.get("split_special_tokens"))
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
        self.template = None if settings is None else template_of(tokenizer, settings)
        self._settings = settings
        # transformers 5 does so for no BPE
        self._cleans = bool(settings and settings.get("clean_up_tokenization_spaces"))
        self._cleans &= not isinstance(tokenizer.model, models.BPE)

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
        return cls(tokenizer, usual_roles(tokenizer), vocab_size=in_use)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        specials: Mapping[str, str | int] | None = None,
        as_transformers: bool = False,
    ) -> "Tokenizer":
        """Read what `save` wrote, or a tokenizer.json of Hugging Face or the folder that holds it.

        The roles (pad, bos, eos, unk, mask) are those of `specials` (tokens or ids), else of the first file beside it
        that names any (tokenizer_config.json, special_tokens_map.json; cls and sep are bos and eos where these are not
        named), else the usual names, such as <pad> or [PAD], that are in the vocabulary. Truncation and padding of the
        file are not applied.

        as_transformers: text is read and written as by AutoTokenizer, and `template` says what the file puts around a
        text: its post-processor, or bos and eos where add_bos_token or add_eos_token stands beside it. False: the text
        is that of a run, which was trained without.

        Raises `FileNotFoundError`, or `ValueError` for a file that holds something else.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: no tokenizer has been saved there")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} holds no tokenizer: {error}") from error
        settings = read_settings(path)
        given = {r: tokenizer.id_to_token(t) if isinstance(t, int) else t for r, t in (specials or {}).items()}
        try:
            return cls(
                tokenizer,
                usual_roles(tokenizer) | named_roles(settings) | given,
                vocab_size=settings.get(_IN_USE),
                settings=settings if as_transformers else None,
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and, beside it, tokenizer_config.json with the roles, as transformers reads them.

        (NAME.json and NAME_config.json for another name.) A crash leaves each file old or new, never a part.
        """
        path = Path(path)
        config = json.dumps(self._settings or self._own_settings(), indent=2, ensure_ascii=False)
        _write(path.with_name(f"{path.stem}_config.json"), config)
        _write(path, self._tokenizer.to_str(pretty=True))

    def with_template(
        self, before: tuple[int, ...], after: tuple[int, ...], settings: Mapping[str, Any]
    ) -> "Tokenizer":
        """The same vocabulary as `save` writes it for transformers, which then puts these ids around a text.

        Text that spells a special token stays text there too, but for unigram, whose entries such tokens are. settings:
        more fields of tokenizer_config.json.
        """
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        around = [[tokenizer.id_to_token(i) for i in ids] for ids in (before, after)]
        single = [*around[0], "$A", *around[1]]
        used = [(tokenizer.id_to_token(i), i) for i in {*before, *after}]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, *(f"{piece}:1" for piece in ("$B", *around[1]))], special_tokens=used
        )
        settings = self._own_settings() | {"split_special_tokens": True} | dict(settings)
        return Tokenizer(tokenizer, self._roles, vocab_size=self.vocab_size, settings=settings)

    def _own_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {f"{role}_token": token for role, token in self._roles.items()}
        settings["additional_special_tokens"] = [self._tokenizer.id_to_token(i) for i in self.sentinel_ids]
        return settings | ({_IN_USE: self.vocab_size} if self._cut else {})

    def encode(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, in order; the lines are spread over the CPU's cores.

        None of them is special but unk, and with a `template` those that the line spells.
        """
        encodings = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        return [self._of_text(encoding.ids) for encoding in encodings]

    def encode_sources(self, lines: list[str]) -> list[list[int]]:
        """What an encoder reads of each line: its ids and eos, or with a `template` what this puts around them."""
        before, after = ((), (self.eos_id,)) if self.template is None else self.template
        return [[*before, *ids, *after] for ids in self.encode(lines)]

    def encode_prompts(self, lines: list[str]) -> list[list[int]]:
        """What a decoder reads of each line to continue it: bos and its ids, or with a `template` what this puts before
        them; bos where that would be nothing at all."""
        before = (self.bos_id,) if self.template is None else self.template[0]
        return [[*before, *ids] or [self.bos_id] for ids in self.encode(lines)]

    def decode(self, ids: list[list[int]]) -> list[str]:
        """The text of each list of ids, without pad, bos and eos; the other special tokens show by name.

        Ids from `vocab_size` up, which a model with a larger table may choose, read as the unknown token. Raises
        `ValueError` for them where there is none, and for negative ids. With a `template` no special token shows, nor
        an id that no entry has.
        """
        if self.template is not None:
            _require_ids(ids)
            texts = self._tokenizer.decode_batch(ids, skip_special_tokens=True)
            return [without_spaces(text) for text in texts] if self._cleans else texts
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
        if self.template is None and not special.isdisjoint(ids):
            ids = [part for i in ids for part in (self._spelled(i) if i in special else (i,))]
        return [i if i < self.vocab_size else self.unk_id for i in ids] if self._cut else ids

    def _spelled(self, token_id: int) -> list[int]:
        token, model = self._tokenizer.id_to_token(token_id), self._tokenizer.model
        return [part.id for text in (token[:1], token[1:]) for part in model.tokenize(text)]

    def _known(self, ids: list[int]) -> list[int]:
        _require_ids([ids])
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


def _require_ids(ids: list[list[int]]) -> None:
    lowest = min((i for sequence in ids for i in sequence), default=0)
    if lowest < 0:
        raise ValueError(f"token id {lowest} is negative: ids from 0 up are expected")


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

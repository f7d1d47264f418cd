"""What tokenizer.json and the files beside it say of special tokens, and of what stands around a text.

The rules are those of transformers 5.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

# Each role, its names in Hugging Face's files in order of preference, and tokens that have it where no file says so.
ROLES = {
    "pad": (("pad_token",), ("<pad>", "[PAD]")),
    "bos": (("bos_token", "cls_token"), ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>")),
    "eos": (("eos_token", "sep_token"), ("</s>", "[SEP]", "<eos>", "<|endoftext|>", "<|end_of_text|>")),
    "unk": (("unk_token",), ("<unk>", "[UNK]")),
    "mask": (("mask_token",), ("<mask>", "[MASK]")),
}
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# What transformers removes where clean_up_tokenization_spaces is set.
_SPACES = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'"}
_SPACES |= {f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")}


def usual_roles(tokenizer: tokenizers.Tokenizer) -> dict[str, str]:
    """The token of each role by its name alone."""
    entries = tokenizer.get_vocab()
    return {role: name for role, (_, names) in ROLES.items() for name in reversed(names) if name in entries}


def read_settings(path: Path) -> dict[str, Any]:
    """What the files beside `path` say, down to the first that names a token; what came first counts.

    Raises `ValueError` naming a file that holds something else.
    """
    settings: dict[str, Any] = {}
    for name in (f"{path.stem}_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        file = path.with_name(name)
        if not file.is_file() or named_roles(settings):
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            settings = config | {key: value for key, value in settings.items() if value is not None}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} holds no configuration of a tokenizer: {error}") from error
    return settings


def named_roles(settings: Mapping[str, Any]) -> dict[str, str]:
    """The token of each role that tokenizer_config.json names."""
    given = {key: _token(value) for key, value in settings.items()}
    return {role: given[key] for role, (keys, _) in ROLES.items() for key in reversed(keys) if given.get(key)}


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def named_tokens(settings: Mapping[str, Any]) -> set[str]:
    """The tokens that transformers takes for special because tokenizer_config.json names them."""
    tokens = [settings.get(key) for keys, _ in ROLES.values() for key in keys]
    for listed in (settings.get(key) or () for key in _LISTS):
        tokens += listed.values() if isinstance(listed, dict) else listed
    return {token for token in map(_token, tokens) if token}


def template_of(
    tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that AutoTokenizer puts before and after one text; raises `ValueError` where it does something else."""
    flags = ("add_bos_token", "add_eos_token")
    if any(flag in settings for flag in flags):  # transformers then replaces what tokenizer.json says
        tokens = [_token(settings.get(flag.removeprefix("add_"))) if settings.get(flag) else None for flag in flags]
        before, after = (() if token is None else (tokenizer.token_to_id(token),) for token in tokens)
        return before, after
    if tokenizer.post_processor is None:
        return (), ()
    text = tokenizers.Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).encode("x")
    around = tokenizer.post_processor.process(text)
    if around.special_tokens_mask.count(0) != 1:
        raise ValueError("its post_processor does not put the text once between special tokens: take it out")
    at = around.special_tokens_mask.index(0)
    return tuple(around.ids[:at]), tuple(around.ids[at + 1 :])


def without_spaces(text: str) -> str:
    """Without the spaces before punctuation and English endings that WordPiece cannot know of."""
    for old, new in _SPACES.items():
        text = text.replace(old, new)
    return text

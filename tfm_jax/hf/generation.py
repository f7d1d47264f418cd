"""generation_config.json and our `Decode`, both ways, as transformers 5 means its fields."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfm_jax.config import Decode, require
from tfm_jax.hf.configs import Config, read_config, read_values
from tfm_jax.hf.tokens import GENERATION

Values = dict[str, Any]

# Theirs -> ours of the same meaning.
_SAME = {
    "num_beams": "beams",
    "num_return_sequences": "nbest",
    "length_penalty": "length_penalty",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "min_new_tokens": "min_new_tokens",
    "max_new_tokens": "max_new_tokens",
}
_STOPS: dict[Any, Any] = {True: True, False: "heuristic", "never": False}  # of early_stopping
_ID_LISTS = ("eos_token_id", "suppress_tokens", "bad_words_ids")
_LIMITS = ("max_length", "min_length")
# What changes the output and we do not have -> the value that changes nothing, besides null.
_MISSING: Values = {
    "begin_suppress_tokens": [],
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "renormalize_logits": False,
    "sequence_bias": None,
    "stop_strings": None,
    "token_healing": False,
    "watermarking_config": None,
}
# What decides nothing here: draws are for the caller to ask for, and what is cut at the limit has not ended.
_LEFT = ("bos_token_id", "decoder_start_token_id", "do_sample", "forced_eos_token_id", "pad_token_id", "temperature")
_LEFT += ("epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "top_k", "top_p", "typical_p")
_FIELDS = {*_SAME, *_ID_LISTS, *_LIMITS, *_MISSING, *_LEFT, "early_stopping", "forced_bos_token_id"}


def read_generation(directory: str | os.PathLike[str]) -> Decode:
    """How a Hugging Face directory says that its model writes: generation_config.json, else an older config.json.

    What it leaves out is as in transformers (num_beams 1, early_stopping False, ...), but for the longest output: there
    it is 20 tokens, here as `Decode` has it, of a decoder at most half of what the model accepts. An output is never
    longer than that. max_length counts a decoder's prompt, so that of a decoder it is only another upper bound.
    Without eos_token_id the tokenizer's end ends an output.

    early_stopping: their False is our "heuristic", their "never" our False, the exact search. Not taken: do_sample,
    temperature, top_k and top_p, for draws have no result to agree on (give a `Sampling`, on the command line
    --temperature); forced_eos_token_id, as an output that is cut says so by `ended`.

    Raises `ValueError` for what changes the output and is not supported, by name: also for bad_words_ids of several
    tokens, and of decoders for forced_bos_token_id and min_length, which depend on the prompt.
    """
    config = read_config(read_values(directory))
    if config.kind == "encoder":
        return Decode()
    where, values = _named(directory)
    for name, nothing in _MISSING.items():
        said = f"{where}: {name} is {values.get(name)!r}, which is not supported"
        require(values.get(name, nothing) == nothing, f"{said}: take it out there, other outputs are to be expected")
    for name in ("num_beams", "num_return_sequences"):
        values.setdefault(name, 1)
    ours = {_SAME[name]: _number(values, name, where) for name in _SAME if name in values}
    stop = values.get("early_stopping", False)
    known = type(stop) is bool or stop == "never"
    require(known, f"{where}: early_stopping is {stop!r}: true, false or 'never' is expected")
    ours |= {"early_stopping": _STOPS[stop], "normalization": "transformers"}
    ours |= _limits(values, config, where) | _ids(values, config, where)
    try:
        return Decode(**ours)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def generation_values(directory: str | os.PathLike[str]) -> Values:
    """What a Hugging Face directory says about generation, as it stands there, without what is null."""
    return _named(directory)[1]


def write_generation(decode: Decode, kind: str) -> Values:
    """The fields of generation_config.json with which transformers writes what we do.

    kind: of the model; a decoder is continued greedily, so that nothing is said about beams. Raises `ValueError` for
    what transformers does not have, with our name of the field.
    """
    theirs = {theirs: getattr(decode, ours) for theirs, ours in _SAME.items()}
    penalty = decode.normalization in ("fairseq", "transformers") or decode.length_penalty == 0
    if kind == "decoder" or decode.beams == 1:
        theirs = {name: theirs[name] for name in theirs if name not in ("num_beams", "length_penalty")}
        del theirs["num_return_sequences"]
    else:
        require(penalty, f"decode.normalization is {decode.normalization!r}: transformers divides by the length alone")
        theirs["early_stopping"] = {ours: theirs for theirs, ours in _STOPS.items()}[decode.early_stopping]
    if decode.eos_ids:
        theirs["eos_token_id"] = list(decode.eos_ids)
    if decode.suppressed_ids:
        theirs["suppress_tokens"] = list(decode.suppressed_ids)
    if decode.forced_ids:
        fits = kind == "encoder-decoder" and len(decode.forced_ids) == 1
        require(fits, f"decode.forced_ids is {decode.forced_ids}: transformers forces one token, with an encoder alone")
        theirs["forced_bos_token_id"] = decode.forced_ids[0]
    return theirs


def save_generation(directory: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write generation_config.json with these fields, and those of one that is there which these do not have."""
    path = Path(directory) / GENERATION
    there = read_values(directory, GENERATION) if path.exists() else {}
    path.write_text(json.dumps(there | dict(values), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _named(directory: str | os.PathLike[str]) -> tuple[str, Values]:
    """The file that says it, and what it says."""
    own = (Path(directory) / GENERATION).exists()
    name = GENERATION if own else "config.json"
    found = read_values(directory, name)
    if not own:
        legacy = {"forced_bos_token_id": found.get("bos_token_id")} if found.get(_OLD_FORCED) else {}
        found = legacy | {name: value for name, value in found.items() if name in _FIELDS}
    return str(Path(directory) / name), {name: value for name, value in found.items() if value is not None}


_OLD_FORCED = "force_bos_token_to_be_generated"


def _number(values: Values, name: str, where: str) -> int | float:
    value, real = values[name], name.endswith("_penalty")
    fits = type(value) is int or (real and type(value) is float)
    require(fits, f"{where}: {name} is {value!r}: {'a number' if real else 'an int'} is expected")
    return float(value) if real else value


def _limits(values: Values, config: Config, where: str) -> Values:
    """max_new_tokens and min_new_tokens; their lengths count what a decoder begins with."""
    longest, two_sided = config.max_length, config.kind == "encoder-decoder"
    most, least = (_number(values, name, where) if name in values else None for name in ("max_length", "min_length"))
    found = {"max_new_tokens": values.get("max_new_tokens", Decode.max_new_tokens)}
    if "max_new_tokens" not in values and most is not None:
        found["max_new_tokens"] = most - 1 if two_sided else min(most - 1, Decode.max_new_tokens)
    if not two_sided and ("max_new_tokens" not in values or values["max_new_tokens"] >= longest):
        found["max_new_tokens"] = min(found["max_new_tokens"], max(1, longest // 2))
    found["max_new_tokens"] = min(found["max_new_tokens"], longest)
    if "min_new_tokens" not in values and least is not None:
        said = f"{where}: min_length is {least}, which counts the prompt: give min_new_tokens in its place"
        require(two_sided or least <= 1, said)
        found["min_new_tokens"] = max(0, least - 1)
    return found


def _ids(values: Values, config: Config, where: str) -> Values:
    """Which tokens end, begin and never occur."""
    eos, words = values.get("eos_token_id", []), values.get("bad_words_ids", [])
    eos, forced = [eos] if type(eos) is int else eos, values.get("forced_bos_token_id")
    require(_are_ids(eos), f"{where}: eos_token_id is {eos!r}: an id or a list of ids is expected")
    single = type(words) is list and all(_are_ids(word) and len(word) == 1 for word in words)
    require(single, f"{where}: bad_words_ids is {words!r}: words of one token each, [[id], ...], are supported")
    never = values.get("suppress_tokens", [])
    require(_are_ids(never), f"{where}: suppress_tokens is {never!r}: a list of ids is expected")
    # theirs never bans the end so
    never = [*never, *(word[0] for word in words if word[0] not in eos)]
    require(forced is None or _are_ids([forced]), f"{where}: forced_bos_token_id is {forced!r}: an id is expected")
    said = f"{where}: forced_bos_token_id is {forced}, which depends on the prompt of a decoder: take it out there"
    require(forced is None or config.kind == "encoder-decoder", said)
    unique = lambda ids: tuple(dict.fromkeys(ids))  # noqa: E731
    found = {"eos_ids": unique(eos), "suppressed_ids": unique(never)}
    return found | {"forced_ids": () if forced is None else (forced,)}


def _are_ids(ids: Any) -> bool:
    return type(ids) is list and all(type(i) is int and i >= 0 for i in ids)

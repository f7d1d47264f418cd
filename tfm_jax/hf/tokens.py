"""The tokenizer of a directory, and the ids that begin, end and pad what its model writes."""

import json
from pathlib import Path
from typing import Any

from tfm_jax.config import require
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.hf.configs import read_values

GENERATION = "generation_config.json"


def load_tokenizer(directory: Path, values: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, which reads and writes text as AutoTokenizer does.

    values: config.json. Its start is what begins a decoder's output (decoder_start_token_id of generation_config.json,
    else of config.json) where that is named. Raises `FileNotFoundError` where there is no tokenizer.json, and else as
    `Tokenizer.load`.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) of "
            "transformers writes it, for all tokenizers that it has in the library tokenizers"
        )
    name = "decoder_start_token_id"
    generation = read_values(directory, GENERATION) if (directory / GENERATION).exists() else {}
    start = values.get(name) if generation.get(name) is None else generation[name]
    require(start is None or type(start) is int, f"{directory}: {name} is {start!r}: one id is expected")
    return Tokenizer.load(path, specials={} if start is None else {"bos": start}, as_transformers=True)


def save_tokenizer(directory: Path, tokenizer: Tokenizer, config: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json, and for models that write text the ids in generation_config.json.

    config: of the model. A tokenizer that has no template gets that of our training: encoders, and decoders with a head
    for labels, read bos, text and eos, encoder-decoders text and eos, decoders continue bos and text.

    Two things transformers does not do as we do. Words that have an entry which is not in use, because the text it was
    learned from had none of them, are unknown here, but not there. For model_type qwen2 AutoTokenizer splits text as
    Qwen2's own tokenizer does, whatever tokenizer.json says: PreTrainedTokenizerFast.from_pretrained reads it.
    """
    kind, writes = config.kind, writes_text(config)
    if tokenizer.template is None:
        bos, eos = (tokenizer.bos_id,), (tokenizer.eos_id,)
        before = () if kind == "encoder-decoder" else bos
        after = () if kind == "decoder" and writes else eos
        settings: dict[str, Any] = {} if kind == "encoder" else {"model_input_names": ["input_ids", "attention_mask"]}
        tokenizer = tokenizer.with_template(before, after, settings | {"padding_side": _SIDE[kind]})
    tokenizer.save(directory / "tokenizer.json")
    if writes:
        start = "decoder_start_token_id" if kind == "encoder-decoder" else "bos_token_id"
        ids = {start: tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        (directory / GENERATION).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def writes_text(config: Any) -> bool:
    """Whether models of this configuration write text: not encoders, nor decoders with a head for labels."""
    return config.kind != "encoder" and getattr(config, "head", "language") == "language"


# transformers continues what stands at the end of a row
_SIDE = {"encoder": "right", "encoder-decoder": "right", "decoder": "left"}

"""The model families: each file holds one family's configuration, architecture and published sizes."""

from typing import Any

from tfm_jax.models.bert import BERT, BERTConfig
from tfm_jax.models.gpt import GPT, GPTConfig
from tfm_jax.models.model import Model
from tfm_jax.models.transformer import Transformer, TransformerConfig

FAMILIES: dict[str, tuple[type, type]] = {
    TransformerConfig.family: (Transformer, TransformerConfig),
    BERTConfig.family: (BERT, BERTConfig),
    GPTConfig.family: (GPT, GPTConfig),
}


def build(config: Any) -> Model:
    """The model of a family's configuration."""
    return Model(family(config.family)[0], config)


def family(name: str) -> tuple[type, type]:
    """The module class and the configuration class of a family; raises `ValueError` naming those there are."""
    if name not in FAMILIES:
        raise ValueError(f"unknown model family {name!r}: one of {sorted(FAMILIES)} is expected")
    return FAMILIES[name]

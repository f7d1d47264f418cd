"""The model families: each file holds one family's configuration, architecture and published sizes."""

from typing import Any

from tfm_jax.models import bert, gpt, t5, transformer
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


def preset(name: str) -> Any:
    """The configuration of a published model by the name of its function here; `ValueError` naming those there are."""
    presets = {own.__name__: own for own in _PRESETS}
    if name not in presets:
        raise ValueError(f"there is no preset {name!r}: one of {sorted(presets)} is expected")
    return presets[name]()


_PRESETS = (
    bert.bert_base,
    bert.bert_large,
    bert.roberta_base,
    gpt.gpt2_small,
    gpt.gpt2_medium,
    gpt.gpt2_large,
    gpt.gpt2_xl,
    gpt.llama2_7b,
    gpt.llama3_8b,
    gpt.mistral_7b,
    gpt.qwen2_05b,
    t5.t5_small,
    t5.t5_base,
    t5.t5_large,
    t5.flan_t5_small,
    t5.flan_t5_base,
    t5.flan_t5_large,
    t5.mt5_small,
    transformer.transformer_base,
    transformer.transformer_big,
    transformer.transformer_tiny,
    transformer.bart_base,
    transformer.bart_large,
    transformer.marian_base,
)

"""The space of configurations: for each field values that are legal and values that are not, as hypothesis draws them.

A configuration is drawn as the dict of its fields, nested where its JSON is; `made` builds it.
"""

import inspect
import math
from dataclasses import fields

from hypothesis import strategies as st

from tfm_jax import config as configs
from tfm_jax.models import FAMILIES
from tfm_jax.models.architecture import Dropout
from tfm_jax.ops import Rotary

NESTED = {"dropout": Dropout, "rope": Rotary}
POSITIONS = ("sinusoidal", "sinusoidal_halves", "learned", "rope", "alibi", "shaw", "t5", "none")
BOOLS, LAYERS = (False, True), (1, 2)
ROPES = (
    {},
    {"pairing": "interleaved", "base": 100.0},
    {"scaling": "linear", "factor": 1.5},
    {"scaling": "ntk", "factor": 4.0, "pairing": "interleaved"},
    {"scaling": "llama3", "factor": 8.0, "original_length": 61, "low_frequency_factor": 1.5},
)
DROPOUTS = (
    {"embedding": 0.0, "residual": 0.0},
    {},
    {"embedding": 0.0, "residual": 0.3, "attention": 0.2, "feed_forward": 0.1},
    {"embedding": 0.4, "residual": 0.0, "attention": 0.1},
)
SWITCHES = {
    "vocab_size": (13, 23),
    "max_length": (11, 31),
    "d_ff": (17, 5),
    "norm": ("post", "pre"),
    "norm_kind": ("layernorm", "rmsnorm"),
    "norm_eps": (1e-12, 1e-6, 1e-5, 0.1),
    "activation": ("relu", "gelu", "gelu_tanh", "silu", "geglu", "geglu_tanh", "swiglu"),
    "attention_scale": ("sqrt", "none"),
    "attention_bias": BOOLS,
    "attention_output_bias": BOOLS,
    "feed_forward_bias": BOOLS,
    "head_bias": BOOLS,
    "dropout": DROPOUTS,
}
"""Legal whatever the others are; what depends on others is drawn in `legal`."""
OWN = {
    "gpt": {"num_layers": LAYERS, "tied_embeddings": BOOLS},
    "bert": {"num_layers": LAYERS, "token_types": (0, 1, 3), "head": ("masked", "pooled")},
    "transformer": {
        "num_encoder_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "tied_embeddings": ("all", "target_output", "source_target", "none"),
        "embedding_scale": BOOLS,
        "embedding_norm": BOOLS,
        "logits_scale": BOOLS,
    },
}
SIZES = (0, -3, 7.0, True, "7", None)
WRONG = {
    "vocab_size": SIZES,
    "max_length": SIZES,
    "d_model": SIZES,
    "d_ff": SIZES,
    "num_heads": SIZES,
    "num_kv_heads": (0, -1, 2.0, False),
    "d_k": (0, -1, 6.0),
    "d_v": (0, -1, "5"),
    "norm": ("middle", None),
    "norm_kind": ("batchnorm", "LayerNorm"),
    "norm_eps": (0.0, -1e-5, 1e-40, math.inf, math.nan, "1e-5", None),
    "activation": ("tanh", None, 0),
    "positions": ("relative", None, True),
    "rope": (
        None,
        {"base": 1.0},
        {"base": math.nan},
        {"fraction": 0.0},
        {"fraction": 1e-9},
        {"factor": 2.0},
        {"scaling": "ntk"},
        {"scaling": "yarn", "factor": 2.0},
        {"pairing": "quarter"},
        {"scaling": "llama3", "factor": 2.0, "high_frequency_factor": math.inf},
        {"scaling": "llama3", "factor": 2.0, "low_frequency_factor": 5.0},
        {"original_length": 61},
    ),
    "shaw_distance": (0, -3, 3.0, None),
    "t5_buckets": (0, 3, 8.0, None),
    "t5_max_distance": (0, 1, 8.0),
    "implementation": ("cudnn", "flash", None),
    "remat": ("some", None),
    "unroll": (0, -1, 2.0, None),
    "attention_scale": ("d_k", None),
    "attention_bias": (None, 1, "no"),
    "attention_output_bias": (None, 0),
    "feed_forward_bias": (None, "yes"),
    "head_bias": (None, 1.0),
    "dropout": (None, {"embedding": 1.0}, {"residual": -0.1}, {"attention": math.nan}, {"feed_forward": "0.1"}),
    "num_layers": SIZES,
    "num_encoder_layers": SIZES,
    "num_decoder_layers": SIZES,
    "tied_embeddings": ("some", None, 1),
    "token_types": (-1, 2.0, None),
    "head": ("tail", None),
    "embedding_scale": (None, 12.0),
    "embedding_norm": (None, "layernorm"),
    "logits_scale": (None, 0.5),
}
"""Illegal whatever the others are."""
OTHER = {
    "d_model": (7, 8, 12, 13),
    "num_heads": (1, 2, 3, 4, 5),
    "num_kv_heads": (None, 1, 2, 3, 4),
    "d_k": (None, 1, 2, 3, 6, 8),
    "d_v": (None, 1, 5, 8),
    "positions": POSITIONS,
    "rope": (*ROPES, {"fraction": 0.67}, {"fraction": 0.5}),
    "shaw_distance": (1, 3, 16),
    "t5_buckets": (4, 5, 8, 32),
    "t5_max_distance": (3, 13, 128),
    "implementation": ("auto", "reference", "blockwise", "splash"),
    "remat": ("none", "dots", "full"),
    "unroll": (1, 2, 3),
}
"""Legal or not by what the others are."""


def names_of(family):
    """The fields that are drawn: heads with labels have tests of their own."""
    names = {field.name for field in fields(FAMILIES[family][1])}
    return sorted(names - ({"labels"} if family == "bert" else {"labels", "head"}))


def legal(rng, family):
    """The fields of a legal configuration."""
    one = rng.choice
    values = {name: one(choices) for name, choices in (SWITCHES | OWN[family]).items()}
    positions, heads = one(POSITIONS), one((1, 2, 3, 4))
    even = positions == "rope"
    d_k = one((None, 2, 6) if even else (None, 3, 5, 6))
    d_model = one((heads * 2, heads * 4) if even else (heads * 3, heads * 4)) if d_k is None else one((7, 12, 13))
    values |= {"positions": positions, "num_heads": heads, "d_k": d_k, "d_model": d_model, "d_v": one((None, 5))}
    values["num_kv_heads"] = one((None, *(n for n in range(1, heads + 1) if heads % n == 0)))
    biased = positions in ("alibi", "shaw", "t5") or values["dropout"].get("attention", 0.0)
    values |= {"remat": one(("none", "dots", "full")), "unroll": one((1, 2, 3))}
    values["implementation"] = one(("auto", "reference", "blockwise", *(() if biased else ("splash",))))
    match positions:
        case "rope":
            values["rope"] = one(ROPES if (d_k or d_model // heads) != 6 else (*ROPES, {"fraction": 0.67}))
        case "shaw":
            values["shaw_distance"] = one((1, 3, 16))
        case "t5":
            values["t5_buckets"], values["t5_max_distance"] = one(((32, 128), (4, 3), (5, 7), (8, 13)))
    return values


def perhaps_legal(rng, family):
    """The fields of a legal configuration, every other time with some of them changed, which may make it illegal."""
    values = legal(rng, family)
    for name in rng.sample(names_of(family), rng.choice((0, 0, 0, 1, 2, 3))):
        values[name] = rng.choice((*WRONG[name], *(SWITCHES | OWN[family] | OTHER)[name]))
    return values


def drawn(fields_of):
    """A family and fields, each choice alike and for itself.

    What hypothesis chooses by itself is alike from one example to the next: of 100 legal configurations, the pairs of
    positions and activations were fewer than half of those there are.
    """

    def draw(rng):
        family = rng.choice(sorted(FAMILIES))
        return family, fields_of(rng, family)

    return st.randoms(use_true_random=True).map(draw)


def made(family, values):
    """The configuration of these fields; raises `ValueError` for what is illegal.

    Built as outside the tests, whose hook (conftest.py) looks at types before the configuration does.
    """
    parts = {
        name: configs.from_dict(NESTED[name], value, f"model.{name}")
        for name, value in values.items()
        if name in NESTED and value is not None
    }
    config = object.__new__(FAMILIES[family][1])
    inspect.unwrap(type(config).__init__)(config, **values | parts)
    return config

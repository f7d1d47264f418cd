"""tfm_jax: the Transformer in JAX and Flax, from pure functions to trained, decoded models.

`import tfm_jax` is cheap: what a name needs is imported when the name is first used.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "BERT": "tfm_jax.models.bert",
    "BERTConfig": "tfm_jax.models.bert",
    "GPT": "tfm_jax.models.gpt",
    "GPTConfig": "tfm_jax.models.gpt",
    "Model": "tfm_jax.models",
    "Run": "tfm_jax.config",
    "Sampling": "tfm_jax.decode.sampling",
    "Transformer": "tfm_jax.models.transformer",
    "TransformerConfig": "tfm_jax.models.transformer",
    "build": "tfm_jax.models",
    "complete": "tfm_jax.decode.text",
    "dot_product_attention": "tfm_jax.ops",
    "fit": "tfm_jax.train.loop",
    "gpt2_small": "tfm_jax.models.gpt",
    "load": "tfm_jax.train.run",
    "log_likelihood": "tfm_jax.decode.score",
    "perplexity": "tfm_jax.decode.score",
    "predict": "tfm_jax.decode.predict",
    "score_targets": "tfm_jax.decode.score",
    "stream": "tfm_jax.decode.text",
    "transformer_base": "tfm_jax.models.transformer",
    "transformer_big": "tfm_jax.models.transformer",
    "transformer_tiny": "tfm_jax.models.transformer",
    "translate": "tfm_jax.decode.text",
}
_ROOMS = ("config", "data", "decode", "equivalence", "hf", "models", "nn", "ops", "plan", "sharding", "train")
__all__ = [*_HOME, *_ROOMS]


def __getattr__(name):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"tfm_jax.{name}")
    raise AttributeError(f"module 'tfm_jax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__():
    return sorted([*globals(), *__all__])

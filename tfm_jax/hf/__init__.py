"""Exchange of models with Hugging Face directories, without torch."""

from tfm_jax.hf.exchange import load, load_model, read_values, save

__all__ = ["load", "load_model", "read_values", "save"]

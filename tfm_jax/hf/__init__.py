"""Exchange of models with Hugging Face directories, without torch."""

from tfm_jax.hf.configs import read_values
from tfm_jax.hf.exchange import load, load_model, read_model, save
from tfm_jax.hf.generation import generation_values, read_generation, save_generation, write_generation
from tfm_jax.hf.tokens import writes_text

__all__ = [
    "generation_values",
    "load",
    "load_model",
    "read_generation",
    "read_model",
    "read_values",
    "save",
    "save_generation",
    "write_generation",
    "writes_text",
]

"""What holds in every test: eight fake devices, checked shapes, no silent promotion, examples that repeat."""

import importlib.metadata
import os

# XLA and jax read these once, so they are set before jax is imported. XLA's newer way to make loops for a CPU compiles
# for twice as long; of jax's later versions, which refuse a flag that they do not know, it is the only one.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    + ["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version("jaxlib").startswith("0.10.")
).lstrip()
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["MPLBACKEND"] = "Agg"

import gc

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

jaxtyping.install_import_hook("tfm_jax", "beartype.beartype")

# No deadline: the first example of a shape compiles. Derandomized: a failure is the change's, not luck's.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_file():
    """A process may map 65,530 pieces of memory, and thousands of compiled programs take more."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def as_a_reader_has_it():
    """The tests' strictness about ranks and dtypes is not that of a reader of the README or of an experiment."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")

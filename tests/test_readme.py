"""What the README shows is run as it stands there."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def block(containing):
    (found,) = (text for text in blocks("python") if containing in text)
    return found


pytestmark = pytest.mark.usefixtures("as_a_reader_has_it")


def run(text, **names):
    # not under a module name of the package: nothing of it is checked by jaxtyping
    exec(compile(text, str(README), "exec"), names)
    return names


def test_a_bias_of_ones_own_works_in_the_exact_implementations_and_is_refused_by_name_in_the_fused_ones():
    text = block("class Recency")
    shown = run(text, __name__="readme")
    gradients = shown["gradients"]
    assert np.abs(gradients["reference"]).min() > 0.1
    np.testing.assert_allclose(gradients["blockwise"], gradients["reference"], rtol=1e-4)
    for implementation in ("cudnn", "splash"):
        with pytest.raises(ValueError, match="Recency"):
            shown["loss"](shown["Recency"](jax.numpy.zeros(4)), implementation)
    definition = text[text.index("@jax.tree_util") : text.index("query, key, value =")].strip().splitlines()
    assert len([line for line in definition if line.strip()]) <= 10


def test_the_library_is_used_as_shown():
    shown = run(block("tfm_jax.transformer_tiny(vocab_size=1000)"), __name__="readme")
    assert np.isfinite(shown["value"]) and shown["weights"].shape == (2, 4, 5, 7)
    query = key = value = jax.random.normal(jax.random.key(0), (2, 7, 8, 16))
    shown = run(block("alibi(num_heads=8)"), __name__="readme", query=query, key=key, value=value)
    assert shown["out"].shape == query.shape


def test_data_is_batched_as_shown(capsys):
    run(block("make_batches(data, lines"), __name__="readme")
    first, *steps = capsys.readouterr().out.splitlines()
    assert first.startswith("[Shape(rows=8, lengths=(64, ") and len(steps) == 3
    assert all("<extra_id_0>" in step for step in steps)

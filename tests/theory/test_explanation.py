"""Second patterns with one output, and importances by a second route."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import explanation
from tfm_jax.models import build


def test_another_pattern_has_the_same_output():
    """A distribution, with the same mixture of the values; where nothing is free, the pattern itself."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(11))
    values = rng.standard_normal((11, 5))
    other, free = explanation.other_pattern(weights, values)
    assert free == 11 - 5 - 1 and other[weights.argmax()] < weights.max()
    np.testing.assert_allclose([other.sum(), other.min()], [1.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(other @ values, weights @ values, atol=1e-9)
    same, free = explanation.other_pattern(weights, rng.standard_normal((11, 17)))
    assert free == 0
    np.testing.assert_allclose(same, weights, atol=1e-6)
    found, mixed = explanation.outputs(np.stack([weights, other]), values)
    np.testing.assert_allclose(found, [weights, other], atol=1e-6)
    np.testing.assert_allclose(mixed[0], mixed[1], atol=1e-6)


def test_importances():
    """Occlusion is that of a text without the word's segment; the gradient that of central differences."""
    model = build(explanation.CONFIG)
    params = model.init(jax.random.key(0))
    tokens = explanation.texts(jax.random.key(1), 1)["tokens"][0]
    found = jax.jit(lambda tokens: explanation.importances(model, params, tokens))(tokens)
    assert set(found) == {"attention", "gradient", "occlusion"}
    assert all(one.shape == (explanation.LENGTH,) for one in found.values())

    def difference(factor):
        module = model.bind(params)
        x = model.hidden_states(params, tokens[None])["encoder"][0].at[0, place].multiply(factor)
        logits = module.classifier(module.pooler(module.encoder(x, mask=None)), dropout_rate=0.0, key=None)
        return logits[0, 1] - logits[0, 0]

    place, step = 5, 1e-2
    slope = (difference(1 + step) - difference(1 - step)) / (2 * step)
    np.testing.assert_allclose(found["gradient"][place - 1], abs(slope), rtol=0.02, atol=1e-5)
    hidden = jnp.ones((1, len(tokens)), jnp.int32).at[0, place].set(0)
    segments = jnp.concatenate([jnp.ones_like(hidden), hidden])
    logits = model.apply(params, jnp.stack([tokens, tokens]), segment_ids=segments)
    whole, without = logits[:, 1] - logits[:, 0]
    np.testing.assert_allclose(found["occlusion"][place - 1], abs(whole - without), atol=1e-6)

"""The batches of the heads' claim have the alignment and the order that its docstring says."""

import jax
import numpy as np

from experiments.theory import heads


def test_pairs_are_aligned():
    batch = jax.tree.map(np.asarray, heads.pairs(jax.random.key(0)))
    one, other = np.divmod(batch["targets"], heads.SYMBOLS)
    n = heads.N
    for t in range(n):
        np.testing.assert_array_equal(one[:, t], batch["source_tokens"][:, n - 1 - t])
        np.testing.assert_array_equal(other[:, t], batch["source_tokens"][:, (t + 3) % n])
    assert (batch["tokens"][:, 0] == heads.START).all()
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])

"""The counts of the claim `parameters` beside those of one's own fingers."""

import pytest

from experiments.theory.parameters import counts, matrices, total
from tfm_jax.nn import EncoderBlock, MultiHeadAttention
from tfm_jax.nn.blocks import BlockSizes
from tfm_jax.ops import BlockSettings


def test_a_block_by_hand():
    block = counts(EncoderBlock, BlockSizes(12, 20, num_heads=3), BlockSettings())
    assert matrices(block) == 4 * 12 * 12 + 2 * 12 * 20
    assert total(block, "norm") == 2 * 2 * 12
    assert total(block) == matrices(block) + 4 * 12 + 20 + 12 + 2 * 2 * 12


@pytest.mark.parametrize("heads", [1, 2, 7])
def test_heads_share_four_matrices(heads):
    assert matrices(counts(MultiHeadAttention, 14, heads)) == 4 * 14 * 14

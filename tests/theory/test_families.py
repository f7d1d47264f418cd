"""What the families see, by models' weights and by masks; what their objectives take from a sentence."""

import numpy as np
import pytest

from experiments.theory import families
from tfm_jax.ops import AttentionMask


@pytest.fixture(scope="module")
def cases():
    return {name: families.examples(name).make(0, seed=families.SEED, epoch=0) for name in families.OBJECTIVES}


def test_two_stacks_see_as_a_prefix_language_model(cases):
    """T5's encoder, decoder and cross-attention in one square are the mask with its source as the prefix."""
    seen = families.seen_pairs(cases)
    source, n = len(cases["spans"].source), len(seen["T5"])
    mask = AttentionMask(causal=True, prefix_lengths=np.array([source]))
    np.testing.assert_array_equal(seen["T5"], mask.array(n, n)[0, 0])
    np.testing.assert_array_equal(seen["GPT"], np.tri(len(seen["GPT"]), dtype=bool))
    assert seen["BERT"].all()


def test_every_objective_is_of_the_whole_sentence(cases):
    """Words that are read or predicted make up the sentence, under each objective."""
    sentence = families.SENTENCE.split()
    plain = lambda ids: [word for word in families.words(ids) if not word.startswith("<")]  # noqa: E731
    assert plain(cases["none"].targets) == sentence
    assert plain(np.where(cases["mask"].predicted, cases["mask"].targets, cases["mask"].tokens)) == sentence
    assert plain(cases["prefix"].source) + plain(cases["prefix"].targets) == sentence
    assert sorted(plain(cases["spans"].source) + plain(cases["spans"].targets)) == sorted(sentence)

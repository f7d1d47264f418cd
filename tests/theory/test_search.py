"""The chains of the decoding claim: their outputs are all there are, and what is said of them by hand is so."""

import itertools

import numpy as np

from experiments.theory import search


def test_all_outputs_are_all_there_are():
    """Probabilities of every output, ended or cut, sum to one; and there are as many as a count by hand says."""
    tables = np.log(np.random.default_rng(0).dirichlet(np.ones(3), size=(5, 4)))
    log_p, lengths = search.all_outputs(tables, 4)
    np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1.0, rtol=1e-12)
    assert len(lengths) == 1 + 2 + 4 + 8 + 16
    assert len(set(search.outputs_of(3, 4))) == len(lengths)


def test_chains_by_hand():
    """Every row of a chain is a distribution; a walk by hand gives what the searches of the claim give (B29)."""
    for chain in (search.GREEDY_IS_WRONG, search.WIDER_IS_WORSE, search.SHORT_IS_LIKELY):
        assert all(abs(sum(row.values()) - 1.0) < 1e-12 for row in chain.values())
    names = search.letters(search.GREEDY_IS_WRONG)
    for beams, expected in ((1, "A."), (2, "B.")):
        found = search.searched(search.table(search.GREEDY_IS_WRONG)[None], beams=beams, length=4)
        text = "".join(names[i] for i in found.tokens[0, 0, : found.lengths[0, 0]])
        steps = itertools.pairwise(["", *text])
        walked = np.prod([search.GREEDY_IS_WRONG[before][after] for before, after in steps])
        assert text == expected
        np.testing.assert_allclose(np.exp(found.log_probs[0, 0]), walked, rtol=1e-6)

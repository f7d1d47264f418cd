"""How the claim `saturation` counts updates."""

import numpy as np

from experiments.theory.scale_training import LEARNED, updates


def test_updates_until_ten_losses_have_a_mean_below_the_limit():
    curve = np.where(np.arange(100) < 40, 2.0 * LEARNED, 0.0)
    # of ten losses at most four may be old ones: 4 * 2 / 10 < 1
    assert updates(curve) == 46


def test_a_model_that_never_learns_took_all_of_them():
    assert updates(np.full(100, 2.0 * LEARNED)) == 100

"""Measuring: the loss over a data set, and scores of translations."""

from typing import Any

import jax
import numpy as np
import sacrebleu

from tfm_jax import config
from tfm_jax.data.batches import Batches
from tfm_jax.sharding import batch_sharding
from tfm_jax.train.step import Objective, eval_step


def evaluate_loss(
    params: dict, batches: Batches, *, objective: Objective, mesh: jax.sharding.Mesh
) -> dict[str, float]:
    """The objective's metrics per target token over one pass of `batches`, whatever their sizes; no dropout."""
    totals: dict[str, np.ndarray] = {}
    for step in range(batches.steps_per_epoch):
        batch = jax.device_put(batches[step], batch_sharding(mesh))
        sums = jax.device_get(eval_step(params, batch, objective=objective))
        for name, pair in sums.items():
            totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    return {name: float(total / max(weight, 1.0)) for name, (total, weight) in totals.items()}


def score_translations(
    hypotheses: list[str], references: list[str], *, decode: config.Decode
) -> dict[str, Any]:
    """BLEU (Papineni et al. 2002) and chrF (Popovic 2015) by sacreBLEU, and the share of exact matches.

    Keys: bleu, bleu_signature, chrf, exact_match. Both sides are text: give detokenised text with a tokeniser of
    sacreBLEU's (13a), or text that is tokenised on both sides with the tokeniser "none". Raises `ValueError` for
    unequal counts, which sacreBLEU lets pass.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references: one for each is needed")
    bleu = sacrebleu.BLEU(tokenize=decode.bleu_tokenizer, lowercase=decode.lowercase, force=True)
    score = bleu.corpus_score(hypotheses, [references]).score
    fold = str.lower if decode.lowercase else str
    return {
        "bleu": score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": sacrebleu.CHRF(lowercase=decode.lowercase).corpus_score(hypotheses, [references]).score,
        "exact_match": float(np.mean([fold(h) == fold(r) for h, r in zip(hypotheses, references, strict=True)])),
    }

"""Measuring: the loss over a data set, and scores of translations."""

from typing import Any, Literal

import jax
import numpy as np
import sacrebleu

from tfm_jax import config
from tfm_jax.data.batches import Batches
from tfm_jax.data.sources import Text
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.text import TOO_LONG, one_line, translate
from tfm_jax.models import Model
from tfm_jax.train.feed import feed
from tfm_jax.train.report import LineCounter, plot_alignments, plot_heads, write_whole
from tfm_jax.train.run import Fitted
from tfm_jax.train.step import Objective, eval_step


def evaluate_loss(params: dict, batches: Batches, *, objective: Objective, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """The objective's metrics per target token over one pass of `batches`, whatever their sizes; no dropout."""
    totals: dict[str, np.ndarray] = {}
    for _, batch, _ in feed(batches, 0, batches.steps_per_epoch, mesh=mesh):
        sums = jax.device_get(eval_step(params, batch, objective=objective))
        for name, pair in sums.items():
            totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    return {name: float(total / max(weight, 1.0)) for name, (total, weight) in totals.items()}


def score_translations(hypotheses: list[str], references: list[str], *, decode: config.Decode) -> dict[str, Any]:
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


def evaluate_translation(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    text: Text,
    *,
    decode: config.Decode,
    too_long: Literal["error", "drop"] = "error",
) -> tuple[dict[str, Any], list[str]]:
    """Translate the source side and score it against the target: (scores, the best hypotheses).

    The scores are those of `score_translations` and too_long_lines, the count of lines that are too long for the model
    and, with too_long "drop", scored as empty translations.
    """
    with LineCounter("translating", len(text)) as counter:
        found = translate(
            model,
            params,
            tokenizer,
            text.source,
            decode=decode,
            too_long=too_long,
            where=text.where,
            progress=counter.update,
        )
    hypotheses = [best[0].text for best in found]
    count = sum(best[0] is TOO_LONG for best in found)
    return score_translations(hypotheses, text.target, decode=decode) | {"too_long_lines": count}, hypotheses


def conclude(fitted: Fitted, text: Text) -> tuple[dict[str, Any], list[str]]:
    """`evaluate_translation` at the end of a run: leaves hypotheses.txt and two plots, shows some translations."""
    model, params, tokenizer, run = fitted.model, fitted.params, fitted.tokenizer, fitted.run
    too_long = "drop" if run.data.too_long == "drop" else "error"
    scores, hypotheses = evaluate_translation(model, params, tokenizer, text, decode=run.decode, too_long=too_long)
    write_whole(fitted.directory / "hypotheses.txt", "".join(f"{one_line(text)}\n" for text in hypotheses))
    shown = _spread(len(text), 6)
    alignments = [(text.source[i], hypotheses[i]) for i in shown if hypotheses[i].strip()][:3]
    if alignments:
        layer = model.config.num_decoder_layers - 1
        plot_alignments(fitted.directory / "alignments.png", model, params, tokenizer, alignments, layer=layer)
        layer = min(layer, model.config.num_encoder_layers - 1)
        plot_heads(fitted.directory / "heads.png", model, params, tokenizer, alignments[0], layer=layer)
    for i in shown:
        print(f"\nsource     {text.source[i]}\noutput     {hypotheses[i]}\nreference  {text.target[i]}")
    return scores, hypotheses


def _spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` indices spread evenly over 0 .. count - 1."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(wanted, count))})

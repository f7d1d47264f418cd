"""Measuring: the loss over a data set, and scores of translations."""

from typing import Any, Literal

import jax
import numpy as np
import sacrebleu

from tfm_jax import config
from tfm_jax.config import require
from tfm_jax.data.batches import Batches, make_batches
from tfm_jax.data.sources import Text
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.predict import predict
from tfm_jax.decode.sampling import Sampling
from tfm_jax.decode.text import TOO_LONG, complete, one_line, translate
from tfm_jax.models import Model
from tfm_jax.sharding import make_mesh
from tfm_jax.train.feed import feed
from tfm_jax.train.objectives import check_labels, objective_of
from tfm_jax.train.report import LineCounter, plot_alignments, plot_heads, show, write_whole
from tfm_jax.train.run import Fitted
from tfm_jax.train.samples import filled_masks, restored_spans
from tfm_jax.train.step import Objective, eval_step


def evaluate_loss(params: dict, batches: Batches, *, objective: Objective, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """The objective's metrics per target token over one pass of `batches`, whatever their sizes; no dropout."""
    sums = sum_metrics(params, batches, objective=objective, mesh=mesh)
    return {name: float(total / max(weight, 1.0)) for name, (total, weight) in sums.items()}


def sum_metrics(
    params: dict, batches: Batches, *, objective: Objective, mesh: jax.sharding.Mesh
) -> dict[str, np.ndarray]:
    """Sum and weight of the objective's metrics over one pass of `batches`, in float64; no dropout."""
    totals: dict[str, np.ndarray] = {}
    for _, batch, _ in feed(batches, 0, batches.steps_per_epoch, mesh=mesh):
        sums = jax.device_get(eval_step(params, batch, objective=objective))
        for name, pair in sums.items():
            totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    return totals


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
        show(f"\nsource     {text.source[i]}\noutput     {hypotheses[i]}\nreference  {text.target[i]}")
    return scores, hypotheses


def conclude_labels(fitted: Fitted, text: Text) -> dict[str, Any]:
    """Predict the labels of a text at the end of a run: leaves predictions.tsv, shows some; gives the scores.

    accuracy and examples with head sequence; with head regression mean_squared_error and examples. Raises `ValueError`
    for two texts in one, and as `check_labels` does.
    """
    model, params, tokenizer = fitted.model, fitted.params, fitted.tokenizer
    require(len(text.columns) == 1, f"{', '.join(text.names)} are two texts in one: labels are predicted of one alone")
    check_labels(model, fitted.run.data, text)
    with LineCounter("reading", len(text)) as counter:
        numbers = predict(model, params, tokenizer, text.source, where=text.where, progress=counter.update)
    if model.config.head == "regression":
        wanted = np.asarray(text.labels, np.float64).reshape(numbers.shape)
        own = [" ".join(f"{number:.3f}" for number in row) for row in numbers]
        scores = {"mean_squared_error": float(np.square(numbers - wanted).mean())}
        right = [str(label) for label in np.asarray(text.labels).tolist()]
    else:
        best = numbers.argmax(axis=1)
        own, right = ([model.config.labels[i] for i in classes] for classes in (best, text.labels))
        scores = {"accuracy": float(np.mean(best == text.labels))}
    rows = [f"{a}\t{b}\t{one_line(line)}\n" for a, b, line in zip(own, right, text.source, strict=True)]
    write_whole(fitted.directory / "predictions.tsv", "predicted\tlabel\ttext\n" + "".join(rows))
    for i in _spread(len(text), 8):
        show(f"{own[i]:>12} (label {right[i]})  {text.source[i]}")
    return scores | {"examples": len(text)}


def conclude_language(
    fitted: Fitted, text: Text, *, prompts: list[str], sampling: Sampling
) -> dict[str, float | int | str]:
    """Measure a decoder-only model on a text at the end of a run, and show how it continues prompts.

    nats_per_token; perplexity_per_word: exp of all nats over the words between white space, each example's end
    counted as one word, which is how word-level results on WikiText are stated; tokens and words. Raises `ValueError`
    where data.too_long leaves an example out.
    """
    batches = _batches(fitted, text)
    dropped = batches.examples.dropped
    require(not dropped, f"{dropped} examples of {text.names[0]} are too long and would not be measured: split them")
    loss, tokens = _measured(fitted, batches)["loss"]
    words = sum(len(example.split()) + 1 for example in text.source)
    decode = fitted.run.decode
    with LineCounter("writing", len(prompts)) as counter:
        found = complete(
            fitted.model,
            fitted.params,
            fitted.tokenizer,
            prompts,
            decode=decode,
            sampling=sampling,
            progress=counter.update,
        )
    for prompt, (output,) in zip(prompts, found, strict=True):
        show(f"\n{prompt}|{output.text}")
    scores = {"nats_per_token": loss / tokens, "perplexity_per_word": float(np.exp(loss / words))}
    return scores | {"evaluated_tokens": int(tokens), "evaluated_words": words}


def conclude_masked(fitted: Fitted, text: Text) -> dict[str, float]:
    """Measure a masked language model on a text at the end of a run, and show what it fills in.

    loss and accuracy on the chosen tokens, and commonest_token_accuracy, that of always guessing the token which is
    the commonest of them.
    """
    batches = _batches(fitted, text)
    sums = _measured(fitted, batches)
    counts = _target_counts(batches, fitted.model.config.vocab_size)
    for line in filled_masks(fitted.model, fitted.params, fitted.tokenizer, batches[0]):
        show(f"\n{line}")
    scores = {name: total / weight for name, (total, weight) in sums.items()}
    return scores | {"commonest_token_accuracy": float(counts.max() / counts.sum())}


def conclude_spans(fitted: Fitted, text: Text) -> dict[str, float]:
    """Measure span corruption on a text at the end of a run, and show what the model writes for hidden runs.

    loss and accuracy a target token, and unigram_entropy, the entropy in nats of the targets' own frequencies: no
    model that knows these alone has a lower loss.
    """
    batches = _batches(fitted, text)
    sums = _measured(fitted, batches)
    shares = _target_counts(batches, fitted.model.config.vocab_size)
    shares = shares[shares > 0] / shares.sum()
    pairs = restored_spans(fitted.model, fitted.params, fitted.tokenizer, batches[0], decode=fitted.run.decode)
    for source, restored in pairs:
        show(f"\nread      {source}\nrestored  {restored}")
    scores = {name: total / weight for name, (total, weight) in sums.items()}
    return scores | {"unigram_entropy": float(-(shares * np.log(shares)).sum())}


def _batches(fitted: Fitted, text: Text) -> Batches:
    size = {"vocab_size": fitted.model.config.vocab_size}
    return make_batches(fitted.run.data, text, fitted.tokenizer, **size, evaluation=True)


def _measured(fitted: Fitted, batches: Batches) -> dict[str, np.ndarray]:
    """Sum and weight of each metric, of the plain loss: neither smoothed nor with z-loss."""
    objective = objective_of(fitted.model, fitted.run.data, two_sided=len(batches.shapes[0].lengths) == 2)
    mesh = make_mesh(fitted.run.mesh)
    with jax.set_mesh(mesh):
        return sum_metrics(fitted.params, batches, objective=objective, mesh=mesh)


def _target_counts(batches: Batches, vocab_size: int) -> np.ndarray:
    """How often each id is to be predicted."""
    counts = np.zeros(vocab_size, np.int64)
    for step in range(batches.steps_per_epoch):
        batch = batches[step]
        counts += np.bincount(batch["targets"][batch["weights"] > 0], minlength=vocab_size)
    return counts


def _spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` indices spread evenly over 0 .. count - 1."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(wanted, count))})

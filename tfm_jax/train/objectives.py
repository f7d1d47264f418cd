"""What models learn from: by family and data an objective, which turns a batch into sums and weights."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from tfm_jax import config
from tfm_jax.config import require
from tfm_jax.data.sources import Text
from tfm_jax.models import Model
from tfm_jax.train.losses import Sums, accuracy, cross_entropy, linear_cross_entropy, target_logit


@dataclass(frozen=True)
class TextToText:
    """Teacher forcing for encoder-decoders: the decoder reads the shifted target, the loss is on what comes next.

    Translation, span corruption, prefix language modelling and tasks as text differ in their batches alone.
    """

    model: Model
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, params: dict, batch: dict[str, Any], key: Key[Array, ""] | None) -> Sums:
        """By metric, (sum, weight): `loss` is what training minimises, `accuracy` counts target tokens."""
        names = ("source_segment_ids", "segment_ids", "source_positions", "positions")
        inputs = {name: batch[name] for name in names if name in batch}
        x = self.model.features(params, batch["source_tokens"], batch["tokens"], key=key, **inputs)
        return linear_cross_entropy(
            x,
            self.model.output_layer(params),
            batch["targets"],
            batch["weights"],
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )


@dataclass(frozen=True)
class LanguageModel:
    """Models of one text: decoders predict each token from those before it in its segment, encoders what is masked."""

    model: Model
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, params: dict, batch: dict[str, Any], key: Key[Array, ""] | None) -> Sums:
        """As `TextToText`, for a batch without a source."""
        return linear_cross_entropy(
            self.model.features(params, batch["tokens"], key=key, **_inputs(self.model, batch)),
            self.model.output_layer(params),
            batch["targets"],
            batch["weights"],
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )


@dataclass(frozen=True)
class Labels:
    """Models with a head for labels, by the head.

    sequence: the class of each row, `labels` (B) with `label_weights` (B). token: the class of each token, `targets`
    (B T) with `weights` (B T), as for words. span: where an answer starts and ends, `labels` (B 2), two distributions
    over the row's tokens, each half of the loss (Devlin et al. 2019); padding has no share of them, nor of
    label_smoothing. regression: squared error of the numbers, `labels` (B) or (B C), their mean in each row; smoothing
    and z-loss are for classes alone.
    """

    model: Model
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, params: dict, batch: dict[str, Any], key: Key[Array, ""] | None) -> Sums:
        """By metric, (sum, weight): `loss`, and `accuracy`, for spans that of both ends; a regression has none."""
        found = self.model.apply(params, batch["tokens"], key=key, **_inputs(self.model, batch))
        rate = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        match self.model.config.head:
            case "token":
                case = (found, batch["targets"], batch["weights"])
                return {"loss": cross_entropy(*case, **rate), "accuracy": accuracy(*case)}
            case "sequence":
                case = (found[:, None], batch["labels"][:, None], batch["label_weights"][:, None])
                return {"loss": cross_entropy(*case, **rate), "accuracy": accuracy(*case)}
            case "span":
                return _spans(found, batch, rate)
            case "regression":
                return {"loss": _squared_error(found, batch["labels"], batch["label_weights"])}
            case head:
                raise ValueError(f"model.head is {head!r}: sequence, token, span and regression learn labels")


def _inputs(model: Model, batch: dict[str, Any]) -> dict[str, Array]:
    """What of a batch a model of one text reads; one that knows a single kind of tokens is told no kinds."""
    kinds = ("token_types",) if getattr(model.config, "token_types", 0) > 1 else ()
    return {name: batch[name] for name in ("segment_ids", "positions", *kinds) if name in batch}


def _spans(found: Float[Array, "B T 2"], batch: dict[str, Any], rate: dict[str, float]) -> Sums:
    weights, logits = batch["label_weights"], jnp.swapaxes(found, 1, 2)  # B 2 T: the tokens are the classes
    live = (batch["segment_ids"] > 0 if "segment_ids" in batch else jnp.ones(found.shape[:2], bool))[:, None]
    both = jnp.stack([weights, weights], axis=1)
    total, _ = cross_entropy(logits, batch["labels"], both, possible=live, **rate)
    logits = jnp.where(live, logits, -jnp.inf)
    right = target_logit(logits, batch["labels"]) >= logits.max(axis=-1)
    exact = jnp.where(right.all(axis=1), weights, 0.0).sum()
    return {"loss": (total / 2, weights.sum()), "accuracy": (exact, weights.sum())}


def _squared_error(found: Float[Array, "B C"], labels: Array, weights: Float[Array, " B"]):
    wanted = labels.astype(jnp.float32).reshape(found.shape)
    # whatever stands in a row without weight, NaN included, must not reach the gradient
    found = jnp.where((weights > 0)[:, None], found, 0.0)
    wanted = jnp.where((weights > 0)[:, None], wanted, 0.0)
    return (jnp.square(found - wanted).mean(axis=1) * weights).sum(), weights.sum()


_LEARNS = {
    "encoder-decoder": "pairs, or a text with data.corruption.name spans or prefix",
    "decoder": "a text with data.corruption.name none",
    "encoder": "a text with data.corruption.name mask",
}


def objective_of(
    model: Model, data: config.Data, *, two_sided: bool, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> TextToText | LanguageModel | Labels:
    """The objective with which a model learns from batches that have a source (`two_sided`) or have none.

    Raises `ValueError` where the model cannot learn from them.
    """
    family, head = f"a {model.config.family!r} model ({model.config.kind})", getattr(model.config, "head", None)
    rates = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    if data.label:
        if head not in ("sequence", "regression"):
            raise ValueError(
                f"data.label is {data.label!r}, but {family} with head {head!r} predicts no labels of texts: "
                "model.head sequence or regression does"
            )
        return Labels(model, **rates)
    kind = "encoder-decoder" if two_sided else "encoder" if data.corruption.name == "mask" else "decoder"
    if model.config.kind != kind:
        raise ValueError(f"{family} learns from {_LEARNS[model.config.kind]}, and this data is {_LEARNS[kind]}")
    jax.eval_shape(model.output_layer, model.shapes)  # a model with another head says so here
    return (TextToText if two_sided else LanguageModel)(model, **rates)


def check_labels(model: Model, data: config.Data, *texts: Text) -> None:
    """Raise `ValueError` for labels of texts that a model with head sequence or regression cannot learn.

    For a class that is none of 0 .. len(model.labels) - 1, naming the line; for several numbers a text, of which data
    has one; for labels without data.label, and the other way round.
    """
    for text in texts:
        has = "no labels" if text.labels is None else "labels"
        require(
            (text.labels is not None) == bool(data.label),
            f"data.label is {data.label!r}, but {text.names[0]} has {has}: name the feature that holds them, or give a "
            "text without",
        )
        # of another head `objective_of` says that it predicts none
        head = getattr(model.config, "head", None) if data.label else None
        if head == "regression":
            names = model.config.labels
            require(len(names) == 1, f"model.labels is {names}, but a text has one number: give it one name")
        if head == "sequence":
            _check_classes(model.config.labels, text)


def _check_classes(names: tuple[str, ...], text: Text) -> None:
    wrong = np.flatnonzero(~np.isin(text.labels, np.arange(len(names))))
    if not len(wrong) and text.labels.dtype.kind == "f":
        wrong = np.arange(len(text))  # one 1.0 makes numbers of a whole column
    if len(wrong):
        i, classes = int(wrong[0]), ", ".join(f"{i} {name}" for i, name in enumerate(names))
        raise ValueError(
            f"{text.where(i)}: label {text.labels[i]!s} ({len(wrong)} such in all) is no class of the model, which has "
            f"{classes}: mend the labels, or give model.labels a name for each class"
        )

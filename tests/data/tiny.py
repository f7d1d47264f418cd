"""Tiny texts written as numbers, a batching of every kind of them, and what stands in the batches."""

import itertools
from collections import Counter

import numpy as np

from tfm_jax.config import Corruption, Data
from tfm_jax.data.batches import Batches, make_batches
from tfm_jax.data.corruption import restore_spans
from tfm_jax.data.examples import Examples
from tfm_jax.data.sources import Text
from tfm_jax.data.tasks import Pairs, Ragged, Special
from tfm_jax.data.tokenizer import Tokenizer

PAD, BOS, EOS, UNKNOWN, MASK = range(5)
SENTINELS = tuple(range(96, 73, -1))
VOCAB_SIZE = 97
ORDINARY = (5, 74)
"""Ids from 5 to before 74 are text."""


class Numbers(Tokenizer):
    """A tokenizer of texts that spell out their ids."""

    pad_id, bos_id, eos_id, unk_id, mask_id = PAD, BOS, EOS, UNKNOWN, MASK
    sentinel_ids = SENTINELS
    special_ids = frozenset({PAD, BOS, EOS, UNKNOWN, MASK, *SENTINELS})
    vocab_size = VOCAB_SIZE

    def __init__(self):
        pass

    def encode(self, lines):
        return [[int(word) for word in line.split()] for line in lines]


SPECIAL = Special.of(Numbers())


def text(number: int, *, columns: int = 1, longest: int = 11, seed: int = 0, labels: type | None = None) -> Text:
    """Texts of 0 to `longest` random ids; a label says which text it belongs to."""
    rng = np.random.default_rng([seed, columns])
    written = tuple(
        [" ".join(map(str, rng.integers(*ORDINARY, rng.integers(longest + 1)))) for _ in range(number)]
        for _ in range(columns)
    )
    return Text(written, tuple("abc"[:columns]), None if labels is None else np.arange(7, 7 + number, dtype=labels))


def pairs(lengths: list[tuple[int, int]]) -> Examples:
    """Pairs of the given (source, target) lengths, the end included; the ids of each tell it from the others."""
    sides = [
        Ragged.of([np.array([*[10 + i] * (length - 1), EOS], np.int32) for i, length in enumerate(side)])
        for side in zip(*lengths, strict=True)
    ]
    return Examples(Pairs(SPECIAL, Corruption()), tuple(sides), np.full(len(lengths), BOS, np.int32))


def kinds(*, evaluation: bool = False, seed: int = 0) -> dict[str, Batches]:
    """Batches of every batching and corruption that go together, of pairs, texts and labelled texts."""
    made = {}
    settings = {"max_length": 13, "tokens_per_batch": 107, "num_buckets": 3, "rows_multiple": 4, "seed": seed}
    for corruption, batching in itertools.product(("none", "mask", "spans", "prefix"), ("buckets", "packed", "blocks")):
        # more spans and more masks than the defaults give so short a text
        hidden = Corruption(corruption, rate=0.3, mean_span=1.5)
        made[f"{corruption} {batching}"] = Data(batching=batching, corruption=hidden, **settings), text(41)
    for batching in ("buckets", "packed"):
        made[f"pairs {batching}"] = Data(batching=batching, **settings), text(43, columns=2)
    for corruption in ("none", "mask", "spans", "prefix"):
        hidden = Corruption(corruption, rate=0.3, mean_span=1.5)
        cut = Data(too_long="split", corruption=hidden, batching="packed", **settings), text(13, longest=37)
        made[f"{corruption} split"] = cut
    made["classes"] = Data(**settings), text(37, longest=5, columns=2, labels=np.int32)
    made["values"] = Data(**settings), text(37, labels=np.float32)
    return {
        name: make_batches(data, own, Numbers(), vocab_size=VOCAB_SIZE, evaluation=evaluation)
        for name, (data, own) in made.items()
    }


def epoch_of(batches: Batches, epoch: int = 0) -> list[dict[str, np.ndarray]]:
    steps = batches.steps_per_epoch
    return [batches[step] for step in range(epoch * steps, (epoch + 1) * steps)]


def segments(batch: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """What has the same segment id in the same row, row by row: the ids of each array, and the row's own values."""
    found = []
    sides = [name for name in ("source_segment_ids", "segment_ids") if name in batch]
    for row in range(len(batch["tokens"])):
        for segment in range(1, 1 + max(int(batch[side][row].max()) for side in sides)):
            live = {side: batch[side][row] == segment for side in sides}
            side_of = lambda name: "source_segment_ids" if name.startswith("source_") else "segment_ids"  # noqa: E731
            found.append({n: x[row, live[side_of(n)]] if x.ndim == 2 else x[row] for n, x in batch.items()})  # noqa: B023
    return found


def text_in(segment: dict[str, np.ndarray], corruption: str) -> tuple:
    """The example's own texts, put together again from what the model reads and what it is to predict."""
    tokens, targets, source = (segment.get(name) for name in ("tokens", "targets", "source_tokens"))
    if "labels" in segment:
        types, rest = segment["token_types"][1:], tokens[1:]
        return segment["labels"].item(), tuple(rest[types == 0].tolist()), tuple(rest[types == 1].tolist())
    match corruption:
        case "mask":
            found = (np.where(segment["weights"] > 0, targets, tokens)[1:],)
        case "spans":
            found = (restore_spans(source, targets, SENTINELS, eos_id=EOS),)
        case "prefix":
            found = (np.concatenate([source[:-1], targets[:-1]]),)
        case "none":
            found = (targets,) if source is None else (source, targets)
    return tuple(tuple(side.tolist()) for side in found)


def texts_of(examples: Examples) -> Counter:
    """What `text_in` is to find in an epoch."""
    hides_its_end = examples.task.corruption.name in ("spans", "prefix")
    found = Counter()
    for i in range(len(examples)):
        own = [side[i].tolist() for side in examples.texts]
        own = [side[:-1] if hides_its_end and side[-1] == EOS else side for side in own]
        if examples.labels is not None:
            own = [examples.labels[i].item(), *own, *[[]] * (2 - len(own))]
        found[tuple(tuple(part) if isinstance(part, list) else part for part in own)] += 1
    return found


def assert_equal(one, other):
    """Dicts of arrays with the same names, types, shapes and bits."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_equal(value, other[name])
            continue
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        np.testing.assert_array_equal(value, other[name], err_msg=name)

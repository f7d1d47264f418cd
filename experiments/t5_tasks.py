"""Can one small T5 learn to translate and to judge reviews at the same time, both as text to text?

The task stands before the text (Raffel et al. 2020): "translate: I like tea." is to be answered with "Ich mag Tee.",
"review: a charming film" with "positive". Trained from scratch for 10 minutes on two CPU cores, on English-German
sentences of Tatoeba with at most 8 English words and on the phrases of SST-2. Scored are 1,000 Tatoeba sentences whose
English side does not occur in training (BLEU), and the 872 of SST-2's dev set (share of answers that are the right
word). Expected: at least 20 BLEU and 0.75 (measured: 30.6 and 0.798, 11 minutes in all).

    python experiments/t5_tasks.py --data.dir DIR --run-dir runs/t5_tasks

DIR holds tatoeba_deu_eng/deu-eng.zip (with deu.txt, English TAB German) and sst2/{train,heldout,dev}.tsv.gz.
"""

from dataclasses import replace

import numpy as np
import tyro

from tfm_jax.config import Data, Decode, Optimizer, Run, Train
from tfm_jax.data.sources import Text, parallel, read_split
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.train.evaluate import conclude, evaluate_translation
from tfm_jax.train.loop import fit
from tfm_jax.train.run import write_result

LONGEST, HELD_OUT = 8, 1_000
TIMES = 2  # so often every review is read in an epoch: there are a third as many of them as of sentence pairs
ANSWERS = ("negative", "positive")
CONFIG = Run(
    run_dir="runs/t5_tasks",
    model=TransformerConfig(
        vocab_size=4_000,
        max_length=128,
        num_encoder_layers=3,
        num_decoder_layers=3,
        d_model=128,
        d_ff=320,
        num_heads=4,
        norm="pre",
        norm_kind="rmsnorm",
        norm_eps=1e-6,
        activation="geglu_tanh",
        positions="t5",
        attention_scale="none",
        attention_bias=False,
        feed_forward_bias=False,
        embedding_scale=False,
        logits_scale=True,
        dropout=Dropout(embedding=0.0, residual=0.0, attention=0.0, feed_forward=0.0),
    ),
    data=Data(
        # what this file reads itself is named in its docstring; here stands how the texts become batches
        train_source="tatoeba_deu_eng/deu-eng.zip/deu.txt",
        tokenizer="unigram",
        max_length=128,
        too_long="drop",
        tokens_per_batch=2_048,
        num_buckets=6,
    ),
    optimizer=Optimizer(
        # its updates are shares of a parameter's size, as small queries and large embeddings want them
        name="adafactor",
        schedule="inverse_sqrt",
        learning_rate=2e-2,
        warmup_steps=400,
        clip_norm=1.0,
    ),
    train=Train(max_minutes=10.0, label_smoothing=0.1, checkpoint_every=400, keep_last=3, final="average"),
    decode=Decode(beams=4, max_new_tokens=40),
)


def translations(data: Data) -> tuple[Text, Text, Text]:
    """Short sentence pairs to train on, and for validation and test some of which no English side is in those."""
    tsv = {"format": "tsv", "test_source": data.train_source, "features": ("1", "2")}
    pairs = read_split(replace(data, **tsv), "test")
    english = sorted({text for text in pairs.source if len(text.split()) <= LONGEST})
    chosen = np.random.default_rng(0).permutation(len(english))[: HELD_OUT + 500]
    held_out = {english[i]: place for place, i in enumerate(chosen)}
    kept = [i for i, text in enumerate(pairs.source) if len(text.split()) <= LONGEST and text not in held_out]
    # the first of the translations that a sentence has
    first = {held_out[text]: i for i, text in reversed([*enumerate(pairs.source)]) if text in held_out}
    places = [first[place] for place in range(len(chosen))]
    return tuple(_task("translate", pairs, part) for part in (kept, places[HELD_OUT:], places[:HELD_OUT]))


def reviews(data: Data, file: str) -> Text:
    """Phrases with the name of their class."""
    tsv = {"format": "tsv", "test_source": f"sst2/{file}.tsv.gz", "features": ("sentence",), "label": "label"}
    text = read_split(replace(data, **tsv), "test")
    answers = parallel(text.source, [ANSWERS[i] for i in text.labels], *text.names * 2)
    return _task("review", answers, range(len(text)))


def _task(name: str, text: Text, kept) -> Text:
    source = [f"{name}: {text.source[i].strip()}" for i in kept]
    return parallel(source, [text.target[i] for i in kept], *text.names)


def _both(one: Text, other: Text) -> Text:
    return parallel(one.source + other.source, one.target + other.target, one.names[0], other.names[0])


def main(config: Run[TransformerConfig]) -> None:
    """Train on both tasks, score each."""
    if not config.data.dir:
        raise SystemExit("give the folder that holds tatoeba_deu_eng and sst2: --data.dir DIR")
    train, validation, test = translations(config.data)
    judged = {name: reviews(config.data, name) for name in ("train", "heldout", "dev")}
    validation = _both(validation, judged["heldout"].split(500)[0])
    for _ in range(TIMES):
        train = _both(train, judged["train"])
    fitted = fit(config, train=train, validation=validation)
    scores, _ = conclude(fitted, test)
    short = replace(config.decode, beams=1, max_new_tokens=8)
    of_reviews, answers = evaluate_translation(
        fitted.model, fitted.params, fitted.tokenizer, judged["dev"], decode=short
    )
    for source, answer in list(zip(judged["dev"].source, answers, strict=True))[:6]:
        print(f"{answer:>10}  {source}")
    scores |= {"sst2_accuracy": of_reviews["exact_match"]}
    path = write_result(fitted.directory, fitted.summary | scores)
    print(f"\n{path}: {scores['bleu']:.1f} BLEU, accuracy {scores['sst2_accuracy']:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Run[TransformerConfig], default=CONFIG, description=__doc__))

"""Does a small BERT, trained for 15 minutes on two CPU cores, learn to fill in the words that are masked?

15 % of the tokens of WikiText-2 are chosen, of which 80 % are masked, 10 % replaced and 10 % left (Devlin et al. 2019).
Measured is the share of the chosen tokens of the validation text that are predicted, beside that of the guess that it
is always the commonest token. Expected: at least three times the guess (measured: 0.323 against 0.045, 7.2 times).

    python experiments/bert_mlm.py --data.dir DIR --run-dir runs/bert_mlm

DIR holds wiki.train.tokens.xz and wiki.valid.tokens.xz.
"""

import tyro

from tfm_jax.config import Corruption, Data, Decode, Optimizer, Run, Train
from tfm_jax.data.sources import read_splits
from tfm_jax.models.bert import BERTConfig, Dropout
from tfm_jax.train.evaluate import conclude_masked
from tfm_jax.train.loop import fit
from tfm_jax.train.run import write_result

CONFIG = Run(
    run_dir="runs/bert_mlm",
    model=BERTConfig(
        vocab_size=8_000,
        max_length=128,
        num_layers=4,
        d_model=256,
        d_ff=1_024,
        num_heads=4,
        norm="pre",
        norm_eps=1e-5,
        dropout=Dropout(embedding=0.0, residual=0.0, attention=0.0, feed_forward=0.0),
    ),
    data=Data(
        train_source="wiki.train.tokens.xz",
        validation_source="wiki.valid.tokens.xz",
        tokenizer="wordpiece",
        too_long="split",
        batching="packed",
        max_length=128,
        tokens_per_batch=4_096,
        corruption=Corruption("mask", rate=0.15, masked=0.8, random=0.1),
    ),
    optimizer=Optimizer(
        name="adamw",
        schedule="inverse_sqrt",
        learning_rate=1e-3,
        warmup_steps=100,
        b2=0.98,
        eps=1e-8,
        weight_decay=0.01,
        no_decay=("*bias", "*scale", "*position_bias.table"),
        clip_norm=1.0,
    ),
    train=Train(max_minutes=14.0, label_smoothing=0.0, checkpoint_every=200, keep_last=1),
    decode=Decode(max_new_tokens=1),
)


def main(config: Run[BERTConfig]) -> None:
    """Train, measure the accuracy on the masked tokens of the validation text, show some."""
    if not config.data.dir:
        raise SystemExit("give the folder that holds wiki.train.tokens.xz: --data.dir DIR")
    splits = read_splits(config.data)
    fitted = fit(config, train=splits["train"], validation=splits["validation"])
    scores = conclude_masked(fitted, splits["validation"])
    path = write_result(fitted.directory, fitted.summary | scores)
    guess = scores["commonest_token_accuracy"]
    print(f"\n{path}: accuracy {scores['accuracy']:.3f}, {scores['accuracy'] / guess:.1f} times that of the guess")


if __name__ == "__main__":
    main(tyro.cli(Run[BERTConfig], default=CONFIG, description=__doc__))

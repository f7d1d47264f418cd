"""Train the encoder-decoder Transformer on your own sentence pairs, score it, and keep it for `translate`.

    python experiments/parallel_text.py --data.train-source train.en --data.train-target train.de \\
        --data.validation-source dev.en --data.validation-target dev.de --run-dir runs/mine
    python -m tfm_jax translate --run runs/mine < some.en > some.de

Files hold one sentence a line, UTF-8, plain, .gz, .xz or FILE.zip/MEMBER. --data.format tsv or jsonl reads both sides
from one file (--data.features de en), --data.format tfds from a data set of TensorFlow Datasets. Without a validation
text, the last 1,000 pairs of the training text (at most a tenth of it) are held out. With a test text
(--data.test-source) the scores in result.json are for that, else for the validation text. As it stands the model is
small and trains for 30 minutes: on two CPU cores and 30,000 short sentences that gives translations one can read. For
more text use a larger model (--model.d-model ...) and more time (--train.max-minutes).
"""

import tyro

from tfm_jax.config import Data, Decode, Optimizer, Run, Train
from tfm_jax.data.sources import read_splits
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.train.evaluate import conclude
from tfm_jax.train.loop import fit
from tfm_jax.train.run import write_result

CONFIG = Run(
    run_dir="runs/parallel_text",
    model=TransformerConfig(
        vocab_size=8_000,
        max_length=256,
        d_model=128,
        d_ff=256,
        num_heads=4,
        num_encoder_layers=4,
        num_decoder_layers=4,
        dropout=Dropout(embedding=0.2, residual=0.2, attention=0.0, feed_forward=0.0),
    ),
    data=Data(tokenizer="bpe", max_length=256, too_long="drop", tokens_per_batch=2048, num_buckets=8),
    optimizer=Optimizer(learning_rate=3e-3, warmup_steps=600, clip_norm=1.0),
    train=Train(
        max_minutes=30.0, checkpoint_every=1, checkpoint_unit="epochs", patience=5, keep_last=5, final="average"
    ),
    decode=Decode(beams=5, length_penalty=1.0, max_new_tokens=200),
)


def main(config: Run[TransformerConfig]) -> None:
    """Train, translate the test text, score it."""
    if not config.data.train_source:
        raise SystemExit("give the training text: --data.train-source FILE --data.train-target FILE")
    splits = read_splits(config.data)
    fitted = fit(config, train=splits["train"], validation=splits["validation"])
    scores, _ = conclude(fitted, splits["test"])
    print(f"\n{write_result(fitted.directory, fitted.summary | scores)}: {scores['bleu']:.2f} BLEU")


if __name__ == "__main__":
    main(tyro.cli(Run[TransformerConfig], default=CONFIG, description=__doc__))

"""Train the encoder-decoder Transformer on your own sentence pairs, score it, and keep it for `translate`.

    python experiments/parallel_text.py --data.train-source train.en --data.train-target train.de \\
        --data.validation-source dev.en --data.validation-target dev.de --run-dir runs/mine
    python -m tfm_jax translate --run runs/mine < some.en > some.de

Files hold one sentence a line, UTF-8, plain or .gz. Without validation files, the last 1,000 pairs of the training text
(at most a tenth of it) are held out for validation. With --data.test-source and --data.test-target the scores in
result.json are for those, else for the validation text. As it stands the model is small and trains for 30 minutes: on
two CPU cores and 30,000 short sentences that gives translations one can read. For more text use a larger model
(--model.d-model ...) and more time (--train.max-minutes).
"""

import tyro

from tfm_jax.config import Data, Decode, Optimizer, Run, Train
from tfm_jax.data.sources import ParallelText, read_parallel
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


def read(data: Data) -> tuple[ParallelText, ParallelText, ParallelText]:
    """Training, validation and test pairs, as the configuration names them."""
    data.refuse("dir")
    if not data.train_source:
        raise SystemExit("give the training text: --data.train-source FILE --data.train-target FILE")
    train = read_parallel(data.train_source, data.train_target)
    if data.validation_source:
        validation = read_parallel(data.validation_source, data.validation_target)
    else:
        if len(train) < 10:
            raise SystemExit("too few pairs to hold some out for validation: give --data.validation-source and -target")
        train, validation = train.split(len(train) - min(1_000, len(train) // 10))
    test = read_parallel(data.test_source, data.test_target) if data.test_source else validation
    return train, validation, test


def main(config: Run[TransformerConfig]) -> None:
    """Train, translate the test text, score it."""
    train, validation, test = read(config.data)
    fitted = fit(config, train=train, validation=validation)
    scores, _ = conclude(fitted, test)
    print(f"\n{write_result(fitted.directory, fitted.summary | scores)}: {scores['bleu']:.2f} BLEU")


if __name__ == "__main__":
    main(tyro.cli(Run[TransformerConfig], default=CONFIG, description=__doc__))

"""Can a small Transformer learn to read dates as people write them, in ten languages, and give them as ISO 8601?

    source  de: Samstag, 3. April 2021        es: 3 de abril de 2021        en: 4/3/21
    target  2021-04-03                        2021-04-03                    2021-04-03

The examples are generated, so nothing is downloaded; training, validation and test share no date. Expected: exact
match of at least 0.99 on the 2,500 test dates, in about two minutes on two CPU cores.

    python experiments/dates.py
"""

import numpy as np
import tyro

from tfm_jax.config import Data, Decode, Optimizer, Run, Train
from tfm_jax.data.sources import read_splits
from tfm_jax.data.synthetic import LANGUAGES, language_of
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.train.evaluate import conclude
from tfm_jax.train.loop import fit
from tfm_jax.train.run import write_result

CONFIG = Run(
    run_dir="runs/dates",
    model=TransformerConfig(
        vocab_size=1_000,
        max_length=64,
        d_model=128,
        d_ff=256,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dropout=Dropout(embedding=0.05, residual=0.05, attention=0.0, feed_forward=0.0),
    ),
    data=Data(
        format="dates",
        train_source="60000",
        validation_source="1000",
        test_source="2500",
        tokenizer="bpe",
        max_length=64,
        tokens_per_batch=4096,
        num_buckets=4,
    ),
    optimizer=Optimizer(learning_rate=3e-3, warmup_steps=200, clip_norm=1.0),
    train=Train(steps=600, label_smoothing=0.1, checkpoint_every=100, keep_last=3, final="average"),
    decode=Decode(beams=4, length_penalty=1.0, max_new_tokens=16),
)


def main(config: Run[TransformerConfig]) -> None:
    """Train, read the test dates, score each language."""
    splits = read_splits(config.data)
    fitted = fit(config, train=splits["train"], validation=splits["validation"])
    test = splits["test"]
    scores, outputs = conclude(fitted, test)
    right = np.array([output == target for output, target in zip(outputs, test.target, strict=True)])
    languages = np.array([language_of(source) for source in test.source])
    by_language = {language: float(right[languages == language].mean()) for language in LANGUAGES}
    result = fitted.summary | {"exact_match": scores["exact_match"], "examples": len(test)}
    path = write_result(fitted.directory, result | {"exact_match_by_language": by_language})
    print(f"\n{path}: exact match {scores['exact_match']:.4f} on {len(test)} dates")


if __name__ == "__main__":
    main(tyro.cli(Run[TransformerConfig], default=CONFIG, description=__doc__))

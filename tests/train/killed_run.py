"""The tiny run that the tests train, and a script of it that can kill itself half-way.

    python tests/train/killed_run.py RUN_DIR [UPDATE CHECKPOINT]

Without the two numbers it runs to its end, or continues to it. With them it sends itself SIGKILL before the given
update, once the given checkpoint is on disk.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from tfm_jax.config import Data, Decode, Mesh, Optimizer, Run, Train
from tfm_jax.data.sources import Text, parallel
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.train import loop

MODEL = TransformerConfig(
    vocab_size=260,  # the special tokens and the bytes, no merges: a line has a token a byte, one before and one after
    max_length=24,
    d_model=8,
    d_ff=12,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=Dropout(embedding=0.1, residual=0.1, attention=0.1, feed_forward=0.1),
)
STEPS_PER_EPOCH = 3


def words(count: int, *, seed: int, name: str) -> Text:
    """Words of 3 to 6 letters, to be written backwards."""
    rng = np.random.default_rng(seed)
    source = ["".join(rng.choice(list("abcdefg"), size=3 + i % 4)) for i in range(count)]
    return parallel(source, [word[::-1] for word in source], f"{name}.src", f"{name}.tgt")


TRAIN, VALIDATION = words(17, seed=1, name="train"), words(7, seed=2, name="validation")


def tiny_run(run_dir: str | Path, *, mesh: Mesh | None = None, **train) -> Run[TransformerConfig]:
    """Seven updates of 6 rows, 3 an epoch, with a checkpoint every 2; `train` replaces fields of that part."""
    train = {"steps": 7, "checkpoint_every": 2, "keep_last": 2, "log_every": 1} | train
    return Run(
        run_dir=str(run_dir),
        model=MODEL,
        data=Data(max_length=MODEL.max_length, tokens_per_batch=48, num_buckets=1, rows_multiple=2),
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=3),
        train=Train(**train),
        decode=Decode(beams=2, max_new_tokens=13),
        mesh=mesh or Mesh(),
    )


def kill_before(update: int, checkpoint: Path) -> None:
    """Let the process die by SIGKILL when it is about to make this update."""
    train_step = loop.train_step

    def fatal_step(state, *inputs, **options):
        if int(state.step) == update - 1:
            while not checkpoint.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(state, *inputs, **options)

    loop.train_step = fatal_step


if __name__ == "__main__":
    directory, *when = sys.argv[1:]
    if when:
        kill_before(int(when[0]), Path(directory) / loop.CHECKPOINTS / when[1])
    loop.fit(tiny_run(directory), train=TRAIN, validation=VALIDATION)

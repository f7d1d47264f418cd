"""How well does a small GPT predict the characters of Shakespeare's plays, in nanoGPT's setting for a laptop?

4 layers, 128 wide, blocks of 64 characters, 12 in a batch, 2,000 updates, no dropout. nanoGPT publishes 1.88 nats a
character, an estimate on 20 random batches; the same setting in torch over the whole validation split, the last tenth
of the text in blocks of 64, gives 1.905, a bigram model 2.48. Expected in about 2 minutes on two CPU cores: at most
1.91 (measured: 1.789). The loss counts one more prediction, the end of the text.

    python experiments/gpt_shakespeare.py --data.dir DIR --run-dir runs/gpt_shakespeare

DIR holds input.txt, 1,115,394 characters.
"""

import tyro

from tfm_jax.config import Data, Decode, Optimizer, Run, Train
from tfm_jax.data.sources import read_splits
from tfm_jax.decode.sampling import Sampling
from tfm_jax.models.gpt import Dropout, GPTConfig
from tfm_jax.train.evaluate import conclude_language
from tfm_jax.train.loop import fit
from tfm_jax.train.run import write_result

CONFIG = Run(
    run_dir="runs/gpt_shakespeare",
    model=GPTConfig(
        vocab_size=69,
        max_length=64,
        num_layers=4,
        d_model=128,
        d_ff=512,
        num_heads=4,
        activation="gelu",
        attention_bias=False,
        feed_forward_bias=False,
        dropout=Dropout(embedding=0.0, residual=0.0, attention=0.0, feed_forward=0.0),
    ),
    data=Data(
        train_source="input.txt",
        documents="file",
        tokenizer="characters",
        too_long="split",
        batching="blocks",
        max_length=64,
        tokens_per_batch=768,
        rows_multiple=4,
    ),
    optimizer=Optimizer(
        name="adamw",
        schedule="cosine",
        learning_rate=1e-3,
        final_learning_rate=1e-4,
        warmup_steps=100,
        decay_steps=2_000,
        b2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        no_decay=("*bias", "*scale", "*position_bias.table"),
        clip_norm=1.0,
    ),
    train=Train(steps=2_000, label_smoothing=0.0, checkpoint_every=250, keep_last=1),
    decode=Decode(max_new_tokens=45),
)


def main(config: Run[GPTConfig]) -> None:
    """Train on the first nine tenths of the characters, measure the loss on the others, write some."""
    if not config.data.dir:
        raise SystemExit("give the folder that holds input.txt: --data.dir DIR")
    splits = read_splits(config.data)  # the last tenth of the characters is held out
    fitted = fit(config, train=splits["train"], validation=splits["validation"])
    prompts, sampling = ["\nROMEO:\n", "\nJULIET:\n", "\nFirst Citizen:\n"], Sampling(temperature=0.8, top_k=40)
    scores = conclude_language(fitted, splits["validation"], prompts=prompts, sampling=sampling)
    path = write_result(fitted.directory, fitted.summary | scores)
    print(f"\n{path}: {scores['nats_per_token']:.4f} nats a character")


if __name__ == "__main__":
    main(tyro.cli(Run[GPTConfig], default=CONFIG, description=__doc__))

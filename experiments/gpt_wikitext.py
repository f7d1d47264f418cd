"""How well does a small GPT, trained for 11 minutes on two CPU cores, predict the words of WikiText-2?

A byte-level BPE vocabulary is learned from the training text. The perplexity is per word, so that it compares with
word-level models: exp of all nats of the validation text over its words, each line's end counted as one word, as
usual for WikiText-2 (Merity et al. 2016). Published there: AWD-LSTM (33 million parameters, hours on a GPU) 68.7.
Expected: under 400 (measured: 387).

    python experiments/gpt_wikitext.py --data.dir DIR --run-dir runs/gpt_wikitext

DIR holds wiki.train.tokens.xz and wiki.valid.tokens.xz, words between spaces.
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
    run_dir="runs/gpt_wikitext",
    model=GPTConfig(
        vocab_size=8_000,
        max_length=128,
        num_layers=4,
        d_model=256,
        d_ff=1_024,
        num_heads=4,
        dropout=Dropout(embedding=0.0, residual=0.0, attention=0.0, feed_forward=0.0),
    ),
    data=Data(
        train_source="wiki.train.tokens.xz",
        validation_source="wiki.valid.tokens.xz",
        tokenizer="bpe",
        too_long="split",
        batching="blocks",
        max_length=128,
        tokens_per_batch=2_048,
    ),
    optimizer=Optimizer(
        name="adamw",
        schedule="inverse_sqrt",
        learning_rate=2e-3,
        warmup_steps=100,
        b2=0.98,
        eps=1e-8,
        weight_decay=0.1,
        no_decay=("*bias", "*scale", "*position_bias.table"),
        clip_norm=1.0,
    ),
    train=Train(max_minutes=11.0, label_smoothing=0.0, checkpoint_every=300, keep_last=1),
    decode=Decode(max_new_tokens=60),
)


def main(config: Run[GPTConfig]) -> None:
    """Train, measure the perplexity of the validation text, write some."""
    if not config.data.dir:
        raise SystemExit("give the folder that holds wiki.train.tokens.xz: --data.dir DIR")
    splits = read_splits(config.data)
    fitted = fit(config, train=splits["train"], validation=splits["validation"])
    prompts = [" The game was", " In the 19th century ,", " = = History = ="]
    sampling = Sampling(temperature=0.8, top_p=0.9)
    scores = conclude_language(fitted, splits["validation"], prompts=prompts, sampling=sampling)
    path = write_result(fitted.directory, fitted.summary | scores)
    print(f"\n{path}: perplexity {scores['perplexity_per_word']:.1f} a word")


if __name__ == "__main__":
    main(tyro.cli(Run[GPTConfig], default=CONFIG, description=__doc__))

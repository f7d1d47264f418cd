"""Is the vocabulary of Wu et al. (ACL 2021) on Multi30k, English to German, learned and applied here to the last byte?

Published are the code file of subword-nmt (`learn-bpe -s 10000` on the English and German training text, lower-cased
and tokenised) and the six texts it was applied to. Learned here by the same library and applied by this one's
tokenizer, all seven files must have the published checksums, and the dictionary 9,712 entries.

In about ten seconds on one CPU core:

    python experiments/multi30k_bpe.py --dir DIR --out runs/multi30k_bpe

DIR holds the `tok` folder of the Multi30k data set (task 1, files NAME.lc.norm.tok.LANG.gz).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import tyro

from tfm_jax.data.sources import read_parallel
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.data.vocabulary import learn_codes
from tfm_jax.train.run import write_result

PUBLISHED = {
    "code": "5b545f318e49f24367c7399019c9aeb5e3720b6379a08f887c2792af71c37f2a",
    "train.bpe.en": "0ffe3e3bac16e6aa33ef0dd6a7dca81587479b0d18dff0db2a92ac3f32b00c86",
    "train.bpe.de": "b2c74def7ec129f7ea7023a51501c77174c377ef06c6ccc2f031adcfb5cfadbd",
    "valid.bpe.en": "193d0d18fef5d1bc9d1cddafa13a644de3c5d6a24b45ac44476dcc5e96bfac6e",
    "valid.bpe.de": "eeb95680d6a06eafb13e3494eed9f9fa99783b892f4a3c72dd36e7ce2e000b68",
    "test.2016.bpe.en": "13b5fe3f92f78c54446d66afcaaa0a00a33ab653a8411f16812c9c5ca3795d6d",
    "test.2016.bpe.de": "375c20d50f4c486149a78dfcfb161a430a04ddabe2b7d150f0c7811dc455ac60",
}
TEXTS = {"train": "train", "valid": "val", "test.2016": "test_2016_flickr"}


@dataclass(frozen=True)
class Rebuild:
    """What is read, what is learned, where it goes."""

    dir: str
    """Folder of Multi30k, which holds tok/train.lc.norm.tok.en.gz."""
    out: str
    """Folder for the files and result.json."""
    merges: int
    """Merge operations that are learned."""
    vocab_size: int
    """Entries of the dictionary, special tokens included."""


CONFIG = Rebuild(dir="", out="runs/multi30k_bpe", merges=10_000, vocab_size=9_712)


def main(config: Rebuild) -> None:
    """Learn, apply, compare."""
    if not config.dir:
        raise SystemExit("give the folder of Multi30k, which holds tok/train.lc.norm.tok.en.gz: --dir DIR")
    path = lambda name, language: Path(config.dir) / "tok" / f"{name}.lc.norm.tok.{language}.gz"  # noqa: E731
    texts = {name: read_parallel(path(file, "en"), path(file, "de")) for name, file in TEXTS.items()}
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    lines = [*texts["train"].source, *texts["train"].target]
    (out / "code").write_text(learn_codes(lines, merges=config.merges), encoding="utf-8", newline="\n")
    tokenizer = Tokenizer.from_codes(out / "code", lines, vocab_size=config.vocab_size)
    for name, text in texts.items():
        for language, column in zip(("en", "de"), text.columns, strict=True):
            segmented = "".join(f"{line}\n" for line in tokenizer.segment(column))
            (out / f"{name}.bpe.{language}").write_text(segmented, encoding="utf-8", newline="\n")
    equal = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() == sha for name, sha in PUBLISHED.items()}
    result = {"entries": tokenizer.vocab_size} | {f"{name} is the published file": same for name, same in equal.items()}
    print(f"{write_result(out, result)}: {sum(equal.values())} of {len(equal)} files are the published ones")


if __name__ == "__main__":
    main(tyro.cli(Rebuild, default=CONFIG, description=__doc__))

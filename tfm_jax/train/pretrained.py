"""Parameters that a run begins with: those of another run or of a Hugging Face directory, and what is new in them."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array

from tfm_jax import config, hf
from tfm_jax.config import differences, require, to_dict
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.hf.tokens import load_tokenizer
from tfm_jax.models import Model
from tfm_jax.train.run import TOKENIZER, is_hf, load

# What may differ between two models with parameters in common: what stands on them, and how they are trained and run.
_FREE = ("head", "labels", "head_bias", "dropout", "implementation", "remat", "unroll", "max_length")
_LABELS = "classifier."


@dataclass(frozen=True)
class Pretrained:
    """What `train.init_from` gives a run."""

    arrays: dict[str, Array]
    """The model's parameters that were found, by their dotted names."""
    tokenizer: Tokenizer
    fresh: tuple[str, ...]
    """Names of the model's parameters that were not found, and so are random."""
    left_out: tuple[str, ...]
    """Names of those found that the model does not have."""

    def into(self, params: dict) -> dict:
        """The parameters, with those that were found in the place of the random ones, laid out as these."""

        def chosen(path, x):
            found = self.arrays.get(_name(path))
            if found is None:
                return x
            # from the host: of an array over several processes each process fills its own devices
            whole = np.asarray(found.astype(x.dtype))
            return jax.make_array_from_callback(x.shape, x.sharding, lambda index: whole[index])

        return jax.tree_util.tree_map_with_path(chosen, params)

    def __str__(self) -> str:
        parts = [f"{len(self.arrays)} arrays of parameters were read"]
        parts += [f"new and random: {', '.join(self.fresh)}"] if self.fresh else []
        parts += [f"left out: {', '.join(self.left_out)}"] if self.left_out else []
        return "; ".join(parts)


def read_pretrained(model: Model, train: config.Train) -> Pretrained:
    """The parameters in `train.init_from`, for a model with the same switches, perhaps with another head.

    A layer for labels is found only where head and labels are the same: for others its numbers mean something else.
    Raises `ValueError` for a model that has other switches, by the fields; for arrays of another shape; and, unless
    `train.init_partial`, for parameters that only one of both has, by name; and as `load` does.
    """
    where = train.init_from
    theirs, params, _ = load(where)
    ours, other = ({k: v for k, v in to_dict(m.config).items() if k not in _FREE} for m in (model, theirs))
    lines = differences(ours, other)
    require(not lines, f"{where} holds another model (field: asked for, there): {'; '.join(lines)}")
    wanted, found = _by_name(model.shapes), _by_name(params)
    heads = [(getattr(m.config, "head", ""), getattr(m.config, "labels", ())) for m in (model, theirs)]
    both = sorted(name for name in wanted.keys() & found if heads[0] == heads[1] or not name.startswith(_LABELS))
    shapes = [f"{name}: {wanted[name].shape}, {found[name].shape}" for name in both]
    shapes = [line for name, line in zip(both, shapes, strict=True) if wanted[name].shape != found[name].shape]
    require(not shapes, f"arrays in {where} have other shapes (asked for, there): {'; '.join(shapes)}")
    fresh, left_out = (tuple(sorted(names.keys() - both)) for names in (wanted, found))
    require(
        train.init_partial or not (fresh or left_out),
        f"{where} lacks {', '.join(fresh) or 'nothing'} and has {', '.join(left_out) or 'nothing'} besides (head and "
        f"labels asked for, there: {heads[0]}, {heads[1]}): with train.init_partial the first begin random and the "
        "others are left out",
    )
    return Pretrained({name: found[name] for name in both}, read_vocabulary(where), fresh, left_out)


def read_vocabulary(directory: str) -> Tokenizer:
    """The vocabulary of a run or of a Hugging Face directory, as a run that begins there has it.

    Text that spells a special token is text, and what stands around a text is up to the run's objective. Raises
    `FileNotFoundError` where there is none, and `ValueError` as `Tokenizer.load`.
    """
    if not is_hf(directory):
        return Tokenizer.load(Path(directory) / TOKENIZER)
    theirs = load_tokenizer(Path(directory), hf.read_values(directory))
    return Tokenizer.load(directory, specials={"bos": theirs.bos_id})


def _by_name(tree: dict) -> dict:
    return {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")

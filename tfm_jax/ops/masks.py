"""Who may attend to whom: masks as arrays (True = attend), in the textbooks' additive form, and as data."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_mask(query_positions: Int[Array, "B T"], key_positions: Int[Array, "C S"]) -> Bool[Array, "_ 1 T S"]:
    """A query sees keys at its own position and before; a key at a negative position (an empty slot) is never seen.

    The rule speaks of positions, not of array columns, so it serves training, padding on either side and cached
    decoding alike. Either batch size may be 1.
    """
    query, key = query_positions[:, None, :, None], key_positions[:, None, None, :]
    return (key <= query) & (key >= 0)


def padding_mask(query_segment_ids: Int[Array, "B T"], key_segment_ids: Int[Array, "C S"]) -> Bool[Array, "_ 1 T S"]:
    """A query sees the keys of its own segment; segment 0 is padding, which neither sees nor is seen."""
    query, key = query_segment_ids[:, None, :, None], key_segment_ids[:, None, None, :]
    return (query == key) & (key > 0)


def additive_mask(mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """The matrix M of the textbook's softmax(Q K^T / sqrt(d_k) + M): 0 where a query may attend, else -inf; float32."""
    return jnp.where(mask, 0.0, -jnp.inf).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """The facts that decide who sees whom, from which the array is made where it is needed.

    Positions are `B T` and `B S` integers, segment ids likewise (0 = padding); None: no such restriction. All the
    restrictions given hold together.
    """

    query_positions: Any = None
    key_positions: Any = None
    query_segment_ids: Any = None
    key_segment_ids: Any = None
    causal: bool = field(default=False, metadata={"static": True})

    def array(self) -> Bool[Array, "_ 1 T S"] | None:
        """The boolean array, its batch axis 1 where no fact differs between rows; None where everything is visible.

        Raises `ValueError` where half of a fact is missing.
        """
        self._check()
        masks = []
        if self.causal:
            masks.append(causal_mask(self.query_positions, self.key_positions))
        if self.query_segment_ids is not None:
            masks.append(padding_mask(self.query_segment_ids, self.key_segment_ids))
        if not masks:
            return None
        return masks[0] if len(masks) == 1 else masks[0] & masks[1]

    def _check(self):
        # not when built: transformations rebuild the mask around what are not arrays
        if (self.query_segment_ids is None) != (self.key_segment_ids is None):
            raise ValueError("segment ids are given for one side: query_segment_ids and key_segment_ids go together")
        if self.causal and (self.query_positions is None or self.key_positions is None):
            raise ValueError("a causal mask compares positions: give query_positions and key_positions")

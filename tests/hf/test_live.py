"""Models of transformers live: outputs, gradients, generation and export of many settings, without any kept file."""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

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
# a fixture's settings and what is changed; vocabularies are odd but for one that is even
CASES = {
    "bert": ("bert", {}),
    "bert, 53 words": ("bert", {"vocab_size": 53}),
    "bert, 3 token types": ("bert", {"type_vocab_size": 3}),
    "bert, pooled": ("bert-pooled", {}),
    "bert, pooled, relu": ("bert-pooled", {"hidden_act": "relu"}),
    "roberta": ("roberta", {}),
    "roberta, 59 words": ("roberta", {"vocab_size": 59}),
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", UNTIED),
    "gpt2, 47 words": ("gpt2", {"vocab_size": 47, "n_inner": 11, "activation_function": "gelu"}),
    "llama, every head": ("llama", {"num_key_value_heads": 4}),
    "llama, grouped": ("llama", {}),
    "llama, one head of keys": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama-tied", {}),
    "llama, 48 words": ("llama", {"vocab_size": 48, "head_dim": 2, "rope_theta": 1e6}),
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
GENERATING = ("gpt2", "llama, grouped", "t5", "bart", "marian")


@functools.cache
def their_model(case):
    kind, changes = CASES[case]
    class_name, values = make.settings(kind)
    return make.random_model(class_name, values | changes, seed=len(case))


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
    """B33, B54, B58, B60: padding on either side; every number of the gradient, for the right one."""
    (model, params), (expected, gradient) = loaded(case), reference(case)
    found = compare.outputs_on(model, params, expected, side)
    compare.assert_same_outputs(model, found, expected, side)
    if side == "right":
        own = compare.theirs(their_model(case).config.model_type, model, found[-1], tmp_path)
        norm = np.sqrt(sum((x**2).sum() for x in gradient.values()))
        assert norm > 1
        compare.assert_same_gradient(own, gradient, norm)


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_is_exported(case, loaded, tmp_path):
    """B54, B60: all of it and nothing else, and computes the same."""
    import torch

    (model, params), theirs = loaded(case), their_model(case)
    hf.save(tmp_path, model, params, model_type=theirs.config.model_type)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    inputs = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in make.batch(theirs).items()}
    arguments = {"input_ids": inputs["tokens_right"], "attention_mask": inputs["mask_right"]}
    if "token_types" in inputs:
        arguments["token_type_ids"] = inputs["token_types"]
    if theirs.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = inputs["decoder_tokens"]
    with torch.no_grad():
        ours, original = again.eval()(**arguments), theirs(**arguments)
    for name in ("logits", "pooler_output", "last_hidden_state"):
        if name in original:
            np.testing.assert_allclose(ours[name], original[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", make.GENERATION)
@pytest.mark.parametrize("case", GENERATING)
def test_generation(case, how, loaded):
    """B33, B60: 50 prompts of several lengths, all hypotheses, token for token."""
    (model, params), theirs = loaded(case), their_model(case)
    tokens, mask = make.prompts_of(theirs, PROMPTS, seed=11)
    expected = make.generated(theirs, tokens, mask, make.GENERATION[how])
    assert len(np.unique(expected, axis=0)) > 10 and (expected[..., -1] < 0).any()
    own = compare.generated(model, params, tokens, mask, make.GENERATION[how], theirs.config.to_dict())
    np.testing.assert_array_equal(own, expected)

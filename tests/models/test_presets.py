"""Published models have their published sizes.

Each count is reached three ways: by the model, by a formula from the sizes in the papers and in the published
config.json, and as the number that the published weights have.
"""

from dataclasses import replace

import pytest

from tfm_jax.models import bert, build, gpt, t5, transformer


def gpt2(layers, width):
    """50,257 entries, 1,024 positions; each layer 12 D^2 weights, 9 D biases and two layer norms."""
    return (50_257 + 1024) * width + layers * (12 * width**2 + 13 * width) + 2 * width


def llama(entries, layers, width, hidden, kv_width, *, tables=2, biases=0):
    """Keys and values are kv_width wide together; biases: of query, key and value."""
    layer = 2 * width**2 + 2 * width * kv_width + 3 * width * hidden + 2 * width + biases
    return tables * entries * width + layers * layer + width


def encoder_decoder(layers, width, hidden):
    """The blocks of Vaswani et al. (2017) on either side: three attentions, two networks, five layer norms."""
    attention, network, norm = 4 * (width**2 + width), 2 * width * hidden + hidden + width, 2 * width
    return layers * (3 * attention + 2 * network + 5 * norm)


def bart(layers, width, hidden):
    """50,265 entries, 1,024 positions and a norm of the embeddings for either side."""
    return 50_265 * width + 2 * 1024 * width + 2 * 2 * width + encoder_decoder(layers, width, hidden)


def relative(entries, layers, width, hidden, heads, *, matrices, tables):
    """T5, on either side, with heads of 64, 32 buckets, no biases; matrices: of the network."""
    attention, network = 4 * width * heads * 64, matrices * width * hidden
    blocks = layers * (3 * attention + 2 * network + 5 * width)
    return tables * entries * width + blocks + 2 * 32 * heads + 2 * width


def bert_with(head, entries, layers, width, *, kinds=2):
    """512 positions, networks four times as wide; head: the parameters beside width^2 + width that it has."""
    layer = 12 * width**2 + 13 * width
    return (entries + 512 + kinds) * width + 2 * width + layers * layer + width**2 + width + head


def pooled(config):
    return replace(config, head="pooled")


V, V1_1 = 32_128, {"matrices": 3, "tables": 2}
# what the model is, the formula, the published count, and how many of that no position uses
PRESETS = [
    (gpt.gpt2_small(), gpt2(12, 768), 124_439_808, 0),
    (gpt.gpt2_medium(), gpt2(24, 1024), 354_823_168, 0),
    (gpt.gpt2_large(), gpt2(36, 1280), 774_030_080, 0),
    (gpt.gpt2_xl(), gpt2(48, 1600), 1_557_611_200, 0),
    (gpt.llama2_7b(), llama(32_000, 32, 4096, 11_008, 4096), 6_738_415_616, 0),
    (gpt.llama3_8b(), llama(128_256, 32, 4096, 14_336, 8 * 128), 8_030_261_248, 0),
    (gpt.mistral_7b(), llama(32_768, 32, 4096, 14_336, 8 * 128), 7_248_023_552, 0),
    (
        gpt.qwen2_05b(),
        llama(151_936, 24, 896, 4864, 2 * 64, tables=1, biases=896 + 2 * 128),
        494_032_768,
        0,
    ),
    (t5.t5_small(), relative(V, 6, 512, 2048, 8, matrices=2, tables=1), 60_506_624, 0),
    (t5.t5_base(), relative(V, 12, 768, 3072, 12, matrices=2, tables=1), 222_903_552, 0),
    (t5.t5_large(), relative(V, 24, 1024, 4096, 16, matrices=2, tables=1), 737_668_096, 0),
    (t5.flan_t5_small(), relative(V, 8, 512, 1024, 6, **V1_1), 76_961_152, 0),
    (t5.flan_t5_base(), relative(V, 12, 768, 2048, 12, **V1_1), 247_577_856, 0),
    (t5.flan_t5_large(), relative(V, 24, 1024, 2816, 16, **V1_1), 783_150_080, 0),
    (t5.mt5_small(), relative(250_112, 8, 512, 1024, 6, **V1_1), 300_176_768, 0),
    # BART's two tables of positions have two more rows each; bart-large-cnn, with one entry less, has 406,290,432
    (transformer.bart_base(), bart(6, 768, 3072), 139_420_416, 2 * 2 * 768),
    (transformer.bart_large(), bart(12, 1024, 4096), 406_291_456, 2 * 2 * 1024),
    # its file of weights also holds two tables of sines, 2 * 512 * 512
    (
        transformer.marian_base(),
        58_101 * 512 + 58_101 + encoder_decoder(6, 512, 2048),
        74_410_496 + 58_101,
        2 * 512 * 512,
    ),
    # of Vaswani et al. (2017) and Wu et al. (2021), millions alone are published: 65, 213, and no number
    (transformer.transformer_base(), 37_000 * 512 + encoder_decoder(6, 512, 2048), 63_082_496, 0),
    (transformer.transformer_big(), 37_000 * 1024 + encoder_decoder(6, 1024, 4096), 214_245_376, 0),
    (transformer.transformer_tiny(), 9_712 * 128 + encoder_decoder(4, 128, 256), 2_568_192, 0),
    # a norm and a bias for each entry of the vocabulary
    (bert.bert_base(), bert_with(2 * 768 + 30_522, 30_522, 12, 768), 109_514_298, 0),
    (pooled(bert.bert_base()), bert_with(0, 30_522, 12, 768), 109_482_240, 0),
    (pooled(bert.bert_large()), bert_with(0, 30_522, 24, 1024), 335_141_888, 0),
    # RoBERTa's table of positions has two more rows
    (pooled(bert.roberta_base()), bert_with(0, 50_265, 12, 768, kinds=1), 124_645_632, 2 * 768),
]
NAMES = """gpt2_small gpt2_medium gpt2_large gpt2_xl llama2_7b llama3_8b mistral_7b qwen2_05b t5_small t5_base t5_large
flan_t5_small flan_t5_base flan_t5_large mt5_small bart_base bart_large marian_base transformer_base transformer_big
transformer_tiny bert_base bert_base_pooled bert_large_pooled roberta_base_pooled""".split()


@pytest.mark.parametrize(("config", "formula", "published", "unused"), PRESETS, ids=NAMES)
def test_parameters(config, formula, published, unused):
    """B54: what is tied counts once. Counted without allocating any."""
    assert build(config).num_parameters == formula == published - unused


# as their published config.json says, beside what the sizes say
SWITCHES = {
    "gpt2": (gpt.gpt2_xl(), {"norm": "pre", "norm_eps": 1e-5, "activation": "gelu_tanh", "max_length": 1024}),
    "t5 v1.1": (t5.flan_t5_large(), {"norm_eps": 1e-6, "activation": "geglu_tanh", "logits_scale": False}),
    "t5": (t5.t5_large(), {"norm_eps": 1e-6, "activation": "relu", "logits_scale": True, "d_k": 64}),
    "bart": (transformer.bart_large(), {"norm": "post", "activation": "gelu", "embedding_norm": True}),
    "marian": (
        transformer.marian_base(),
        {"norm": "post", "activation": "silu", "embedding_scale": True, "tied_embeddings": "all", "num_heads": 8},
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_that_no_count_shows(name):
    """B58"""
    config, switches = SWITCHES[name]
    assert {switch: getattr(config, switch) for switch in switches} == switches

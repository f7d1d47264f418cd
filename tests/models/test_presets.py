"""Published models have their published sizes."""

from dataclasses import replace

import pytest

from tfm_jax.models import bert, build, gpt, t5, transformer


@pytest.mark.parametrize(
    "preset, parameters",
    [
        (gpt.gpt2_small, 124_439_808),
        (gpt.llama2_7b, 6_738_415_616),
        (gpt.llama3_8b, 8_030_261_248),
        (gpt.mistral_7b, 7_248_023_552),
        (gpt.qwen2_05b, 494_032_768),
        (t5.t5_small, 60_506_624),
        (t5.t5_base, 222_903_552),
        (t5.flan_t5_small, 76_961_152),
        (t5.flan_t5_base, 247_577_856),
        (t5.mt5_small, 300_176_768),
        # its two tables of positions have two more rows, which no position uses
        (transformer.bart_base, 139_420_416 - 2 * 2 * 768),
        (transformer.transformer_tiny, 2_568_192),
        (bert.bert_base, 109_514_298),
        (lambda: replace(bert.bert_base(), head="pooled"), 109_482_240),
        (lambda: replace(bert.bert_large(), head="pooled"), 335_141_888),
        # its table of positions has two more rows, which no position uses
        (lambda: replace(bert.roberta_base(), head="pooled"), 124_645_632 - 2 * 768),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_parameters(preset, parameters):
    """Counted without allocating any."""
    assert build(preset()).num_parameters == parameters

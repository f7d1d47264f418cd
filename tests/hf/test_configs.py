"""Published config.json files give the published models; what is written is read back; the rest is refused by name."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.hf.configs import architecture_of, read_config, write_config
from tfm_jax.models import BERTConfig, GPTConfig, TransformerConfig, bert, gpt, t5, transformer
from tfm_jax.models.architecture import Dropout
from tfm_jax.ops import Rotary

BERT_BASE = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
ROBERTA_BASE = {
    "architectures": ["RobertaForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_8B = LLAMA_2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32768,
}
QWEN2_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
FLAN_T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 1024,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}
MT5_SMALL = FLAN_T5_SMALL | {
    "architectures": ["MT5ForConditionalGeneration"],
    "model_type": "mt5",
    "tokenizer_class": "T5Tokenizer",
    "vocab_size": 250112,
}
BART_BASE = {
    "activation_dropout": 0.1,
    "activation_function": "gelu",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["BartModel"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 768,
    "decoder_attention_heads": 12,
    "decoder_ffn_dim": 3072,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 6,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_position_embeddings": 1024,
    "model_type": "bart",
    "normalize_before": False,
    "normalize_embedding": True,
    "num_hidden_layers": 6,
    "pad_token_id": 1,
    "scale_embedding": False,
    "vocab_size": 50265,
}
OPUS_MT = {
    "activation_dropout": 0.0,
    "activation_function": "swish",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["MarianMTModel"],
    "attention_dropout": 0.0,
    "bad_words_ids": [[58100]],
    "bos_token_id": 0,
    "d_model": 512,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "decoder_start_token_id": 58100,
    "decoder_vocab_size": 58101,
    "dropout": 0.1,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 6,
    "eos_token_id": 0,
    "is_encoder_decoder": True,
    "max_length": 512,
    "max_position_embeddings": 512,
    "model_type": "marian",
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 6,
    "num_hidden_layers": 6,
    "pad_token_id": 58100,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "static_position_embeddings": True,
    "vocab_size": 58101,
}
MARIAN = transformer.marian_base()
PUBLISHED = {
    "bert-base-uncased": (BERT_BASE, bert.bert_base()),
    "roberta-base": (ROBERTA_BASE, bert.roberta_base()),
    "gpt2": (GPT2, gpt.gpt2_small()),
    "Llama-2-7b": (LLAMA_2_7B, gpt.llama2_7b()),
    "Meta-Llama-3-8B": (LLAMA_3_8B, gpt.llama3_8b()),
    "Mistral-7B-v0.3": (MISTRAL_7B, gpt.mistral_7b()),
    # the file names a longer context than the 32,768 tokens of training
    "Qwen2-0.5B": (QWEN2_05B, replace(gpt.qwen2_05b(), max_length=131_072)),
    "t5-small": (T5_SMALL, t5.t5_small()),
    "t5-base": (T5_SMALL | {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 12}, t5.t5_base()),
    "flan-t5-small": (FLAN_T5_SMALL, t5.flan_t5_small()),
    "flan-t5-base": (
        FLAN_T5_SMALL | {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12},
        t5.flan_t5_base(),
    ),
    "mt5-small": (MT5_SMALL, t5.mt5_small()),
    "bart-base": (BART_BASE, transformer.bart_base()),
    "opus-mt-en-de": (OPUS_MT, MARIAN),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_b58_published_files_give_the_presets(name):
    """B58: among the rest, eps and the kind of GELU are those of the file."""
    values, config = PUBLISHED[name]
    assert read_config(values) == config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_written_and_read_back(name):
    values, config = PUBLISHED[name]
    written = write_config(config, values["model_type"])
    assert read_config(written) == config
    assert written["model_type"] == architecture_of(values) and written["dtype"] == "float32"
    assert written["architectures"] == values["architectures"]
    # a window that does not slide is written as none, and SiLU has two names
    same = values | {"sliding_window": None} | ({"activation_function": "silu"} if values is OPUS_MT else {})
    both = {name for name in written.keys() & values.keys() if not name.endswith("_token_id")}
    assert {name: written[name] for name in both} == {name: same[name] for name in both} and len(both) >= 11


def _options(**fields):
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in fields.items()})


RATES, SIZES, EPS = (0.0, 0.25), {"vocab_size": (13, 17)}, (1e-5, 1e-12)
PLAIN = ("relu", "gelu", "gelu_new", "silu", "swish", "gelu_pytorch_tanh")
ROPES = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "linear", "rope_theta": 700, "factor": 3.0},
    {"rope_type": "linear", "rope_theta": 700.0, "factor": 1.0},
    {
        "rope_type": "llama3",
        "rope_theta": 700.0,
        "factor": 5.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 19,
    },
)
ENCODER = {
    "hidden_size": (12, 24),
    "intermediate_size": (7, 11),
    "num_hidden_layers": (1, 2),
    "num_attention_heads": (2, 3),
    "layer_norm_eps": EPS,
    "type_vocab_size": (1, 2),
    "hidden_dropout_prob": RATES,
    "attention_probs_dropout_prob": RATES,
    "max_position_embeddings": (23, 29),
}
DECODER = {
    "hidden_size": (12, 24),
    "intermediate_size": (7, 11),
    "num_hidden_layers": (1, 2),
    "num_attention_heads": (6,),
    "num_key_value_heads": (2, 3, 6, None),
    "head_dim": (2, 4, None),
    "rms_norm_eps": EPS,
    "tie_word_embeddings": (True, False),
    "attention_dropout": (0.0, 0.25, None),
    "hidden_act": ("silu", "gelu", "gelu_new"),
    "max_position_embeddings": (23, 29),
    "rope_parameters": (*ROPES, None),
    "sliding_window": (None, 29),
}
T5S = {
    "d_model": (12, 24),
    "d_kv": (3, 5),
    "d_ff": (7, 11),
    "num_layers": (1, 2),
    "num_decoder_layers": (1, 3, None),
    "num_heads": (2, 3),
    "relative_attention_num_buckets": (8, 32),
    "relative_attention_max_distance": (64, 128),
    "layer_norm_epsilon": EPS,
    "dropout_rate": RATES,
    "feed_forward_proj": (*PLAIN, "gated-gelu", "gated-silu", "gated-gelu_python", "gated-gelu_new"),
    "tie_word_embeddings": (True, False),
}
BARTS = {
    "d_model": (12, 24),
    "encoder_layers": (1, 2),
    "decoder_layers": (1, 3),
    "max_position_embeddings": (23, 29),
    "scale_embedding": (True, False),
    "dropout": RATES,
    "attention_dropout": RATES,
    "activation_dropout": RATES,
    "activation_function": PLAIN,
}
BART_SIZES = {"encoder_ffn_dim": 7, "decoder_ffn_dim": 7, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
GPT2S = {
    "n_embd": (12, 24),
    "n_inner": (7, None),
    "n_layer": (1, 2),
    "n_head": (2, 3),
    "n_positions": (23, 29),
    "layer_norm_epsilon": EPS,
    "tie_word_embeddings": (True, False),
    "embd_pdrop": RATES,
    "resid_pdrop": RATES,
    "attn_pdrop": RATES,
    "activation_function": PLAIN,
    "scale_attn_weights": (True, False),
}
LABELS = {
    "id2label": (None, {"0": "bad", "1": "good"}, {"1": "b", "0": "a", "2": "c"}, {"0": "stars"}),
    "problem_type": (None, "regression"),
}


def _classes(name, *others):
    endings = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    return LABELS | {"architectures": (None, *([f"{name}{ending}"] for ending in (*endings, *others)))}


FILES = {
    "bert": _options(**ENCODER, **SIZES, **_classes("Bert", "Model", "ForMaskedLM"), hidden_act=PLAIN),
    "roberta": _options(**ENCODER, **SIZES, **_classes("Roberta", "Model", "ForMaskedLM"), hidden_act=("gelu",))
    | _options(**ENCODER, **SIZES, hidden_act=PLAIN, architectures=(["RobertaModel"],)),
    "gpt2": _options(**GPT2S, **SIZES, **_classes("GPT2", "LMHeadModel")),
    "llama": _options(**DECODER, **SIZES, **_classes("Llama"), attention_bias=(True, False), mlp_bias=(True, False)),
    "mistral": _options(**DECODER, **SIZES, **_classes("Mistral", "ForCausalLM")),
    "qwen2": _options(**DECODER, **SIZES, **_classes("Qwen2", "ForCausalLM")),
    "t5": _options(**T5S, **SIZES, n_positions=(23, 29))
    | _options(**T5S, **SIZES, scale_decoder_outputs=(True, False)),
    "mt5": _options(**T5S, **SIZES),
    "bart": _options(**BARTS, **SIZES, architectures=(["BartModel"], ["BartForConditionalGeneration"])),
    "marian": _options(**BARTS, **SIZES, share_encoder_decoder_embeddings=(False,), tie_word_embeddings=(True, False))
    | _options(**BARTS, **SIZES, architectures=(["MarianModel"], ["MarianMTModel"])),
}


@pytest.mark.parametrize("model_type", FILES)
@given(data=st.data())
def test_what_is_written_is_what_was_read(model_type, data):
    values = data.draw(FILES[model_type]) | {"model_type": model_type}
    values |= BART_SIZES if model_type in ("bart", "marian") else {}
    own_head = data.draw(st.booleans())
    config = read_config(values, own_head=own_head)
    own_head = getattr(config, "tied_embeddings", "all") != "all"
    assert read_config(write_config(config, model_type), own_head=own_head) == config


SMALL = {
    "bert": {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 3},
    "roberta": {"model_type": "roberta", "hidden_size": 12, "num_attention_heads": 3},
    "gpt2": {"model_type": "gpt2", "n_embd": 12, "n_head": 3},
    "llama": {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 6},
    "mistral": {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 8, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "hidden_size": 64},
    "t5": {"model_type": "t5"},
    "mt5": {"model_type": "mt5"},
    "bart": {"model_type": "bart"} | BART_SIZES | {"d_model": 12},
    "marian": {"model_type": "marian"} | BART_SIZES | {"d_model": 12},
}


@pytest.mark.parametrize(
    "model_type, ours",
    [
        ("bert", {"norm_eps": 1e-12, "activation": "gelu", "head": "masked", "max_length": 512, "token_types": 2}),
        ("roberta", {"norm_eps": 1e-12, "activation": "gelu", "head": "masked", "max_length": 510}),
        ("gpt2", {"norm_eps": 1e-5, "activation": "gelu_tanh", "d_ff": 48, "tied_embeddings": True}),
        ("llama", {"norm_eps": 1e-6, "num_kv_heads": 6, "tied_embeddings": False, "rope": Rotary()}),
        ("mistral", {"norm_eps": 1e-6, "num_kv_heads": 8, "tied_embeddings": False, "max_length": 131_072}),
        ("qwen2", {"attention_bias": True, "attention_output_bias": False, "max_length": 32_768}),
        ("t5", {"norm_eps": 1e-6, "activation": "relu", "tied_embeddings": "all", "logits_scale": True}),
        ("mt5", {"activation": "geglu_tanh", "tied_embeddings": "source_target", "logits_scale": False}),
        ("bart", {"norm_eps": 1e-5, "activation": "gelu", "embedding_norm": True, "embedding_scale": False}),
        ("marian", {"norm_eps": 1e-5, "activation": "gelu", "embedding_norm": False, "positions": "sinusoidal_halves"}),
    ],
)
def test_b58_what_a_file_leaves_out_has_their_default(model_type, ours):
    """B58: the defaults of each model type in transformers 5, not ours."""
    config = read_config(SMALL[model_type])
    assert {name: getattr(config, name) for name in ours} == ours


LABELLED = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    "model_type, values, named",
    [
        ("bert", {"hidden_act": "gelu_fast"}, "hidden_act"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("bert", {"type_vocab_size": 0}, "type_vocab_size"),
        ("bert", {"architectures": ["BertForMultipleChoice"]}, "BertForMultipleChoice"),
        ("bert", LABELLED | {"problem_type": "multi_label_classification"}, "problem_type"),
        ("bert", LABELLED | {"id2label": {"1": "a", "2": "b"}}, "id2label"),
        ("bert", LABELLED | {"id2label": {"0": "a", "1": "a"}}, "model.labels"),
        ("bert", LABELLED | {"id2label": {"0": "a"}, "problem_type": "single_label_classification"}, "model.labels"),
        ("bert", LABELLED | {"classifier_dropout": 0.3}, "classifier_dropout"),
        ("bert", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("bert", {"hidden_size": "12"}, "hidden_size"),
        ("bert", {"num_hidden_layers": None}, "num_layers"),
        ("roberta", {"pad_token_id": 0}, "pad_token_id"),
        ("roberta", {"architectures": ["BertModel"]}, "architectures"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function"),
        ("gpt2", {"hidden_size": 24}, "n_embd"),
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("llama", {"hidden_size": "24"}, "hidden_size"),
        ("llama", {"num_key_value_heads": "2"}, "num_kv_heads"),
        ("llama", {"hidden_size": 25, "head_dim": 4}, "hidden_size"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mistral", {"sliding_window": 4096}, "sliding_window"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj"),
        ("t5", {"feed_forward_proj": "wide-relu"}, "feed_forward_proj"),
        ("t5", {"is_decoder": True}, "is_decoder"),
        ("t5", {"architectures": ["T5EncoderModel"]}, "T5EncoderModel"),
        ("bart", {"normalize_before": True}, "normalize_before"),
        ("bart", {"add_final_layer_norm": True}, "add_final_layer_norm"),
        ("bart", {"static_position_embeddings": True}, "static_position_embeddings"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("bart", {"decoder_ffn_dim": 9}, "decoder_ffn_dim"),
        ("bart", {"encoder_layerdrop": 0.5}, "encoder_layerdrop"),
        ("marian", {"decoder_vocab_size": 59}, "decoder_vocab_size"),
        ("marian", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model_type, values, named):
    read_config(SMALL[model_type])
    with pytest.raises(ValueError, match=named):
        read_config(SMALL[model_type] | values)


@pytest.mark.parametrize(
    "values, head, labels",
    [
        ({"architectures": ["BertForSequenceClassification"]}, "sequence", ("LABEL_0", "LABEL_1")),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "stars"}}, "regression", ("stars",)),
        (LABELLED | {"id2label": {"0": "x", "1": "y"}, "problem_type": "regression"}, "regression", ("x", "y")),
        (
            {"architectures": ["BertForTokenClassification"], "num_labels": 3},
            "token",
            ("LABEL_0", "LABEL_1", "LABEL_2"),
        ),
        ({"architectures": ["BertForQuestionAnswering"]}, "span", ()),
    ],
)
def test_labels_are_those_of_the_file(values, head, labels):
    """One number is a regression, as there; what is written says so and reads the same."""
    config = read_config(SMALL["bert"] | values)
    assert (config.head, config.labels) == (head, labels)
    written = write_config(config, "bert")
    assert written["architectures"] == values["architectures"]
    assert (written.get("problem_type") == "regression") == (head == "regression")
    assert read_config(json.loads(json.dumps(written))) == config


def test_another_head_than_that_of_the_file():
    values = SMALL["bert"] | {"architectures": ["BertModel"], "id2label": {"0": "x", "1": "y"}}
    assert read_config(values, head="token").labels == ("x", "y")
    embedding = read_config(values, head="embedding")
    assert (embedding.head, embedding.labels) == ("embedding", ())
    assert write_config(embedding, "bert")["architectures"] == ["BertModel"]
    with pytest.raises(ValueError, match="head is 'span', but models of type 't5' have one head"):
        read_config(SMALL["t5"], head="span")
    with pytest.raises(ValueError, match="model.head is 'language'"):
        read_config(SMALL["bert"], head="language")


@pytest.mark.parametrize("values", [{}, {"model_type": "mbart"}, {"model_type": ["bert"]}])
def test_an_unknown_model_type_is_refused_with_the_known_ones(values):
    with pytest.raises(ValueError, match=r"model_type.*'bart', 'bert', 'gpt2', 'llama', 'marian'"):
        architecture_of(values)
    with pytest.raises(ValueError, match="model_type"):
        read_config(values)


def test_windows_that_never_slide_are_full_attention():
    short = {"sliding_window": 64, "max_position_embeddings": 64}
    assert read_config(SMALL["mistral"] | short) == read_config(SMALL["mistral"] | {"max_position_embeddings": 64})
    late = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 32}
    assert read_config(SMALL["qwen2"] | late) == read_config(SMALL["qwen2"])
    same = {"layer_types": ["full_attention"] * 32, "sliding_window": None}
    assert read_config(SMALL["qwen2"] | same) == read_config(SMALL["qwen2"])


def test_b15_rotary_settings_of_old_and_new_files_agree():
    """B15: base and scaling stand at the top, under rope_scaling or under rope_parameters."""
    llama3 = {"factor": 5.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}
    original = {"original_max_position_embeddings": 19}
    expected = Rotary(
        base=700.0,
        scaling="llama3",
        factor=5.0,
        original_length=19,
        low_frequency_factor=2.0,
        high_frequency_factor=3.0,
    )
    for values in (
        {"rope_theta": 700.0, "rope_scaling": {"rope_type": "llama3"} | llama3 | original},
        {"rope_theta": 700, "rope_scaling": {"type": "llama3"} | llama3 | original},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 700.0} | llama3 | original},
        {"rope_theta": 3.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 700.0} | llama3 | original},
        {"rope_theta": 700.0, "rope_scaling": {"type": "llama3"} | llama3, "max_position_embeddings": 19},
        {"rope_theta": 700.0, "rope_scaling": {"type": "llama3"} | llama3} | original,
    ):
        assert read_config(SMALL["llama"] | values).rope == expected


def test_b54_whether_t5_has_an_output_layer_of_its_own():
    """B54: transformers 5 saves T5 v1.1 as tied and not scaled, whatever its tensors are."""
    own = {"tied_embeddings": "source_target", "logits_scale": False}
    saved = SMALL["t5"] | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    for values, own_head, ours in (
        (SMALL["t5"] | {"tie_word_embeddings": False}, True, own),
        (saved, True, own),
        (saved, False, {"tied_embeddings": "all", "logits_scale": False}),
        (SMALL["mt5"] | {"tie_word_embeddings": True}, True, own),
        (SMALL["mt5"] | {"tie_word_embeddings": False}, False, {"tied_embeddings": "all", "logits_scale": False}),
        (SMALL["t5"], False, {"tied_embeddings": "all", "logits_scale": True}),
    ):
        config = read_config(values, own_head=own_head)
        assert {name: getattr(config, name) for name in ours} == ours


def test_derived_fields_of_t5_decide_as_they_do_there():
    """Files name the activation twice; the second name is the one that is used."""
    flan = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
    assert read_config(SMALL["t5"] | flan).activation == "geglu_tanh"
    assert read_config(SMALL["t5"] | flan | {"dense_act_fn": "gelu"}).activation == "geglu"


@pytest.mark.parametrize(
    "config, model_type, named",
    [
        (GPTConfig(13), "bert", "family"),
        (GPTConfig(13), "t5", "family"),
        (BERTConfig(13, norm="pre"), "bert", r"model\.norm: 'pre', 'post'"),
        (BERTConfig(13, activation="relu"), "roberta", r"model\.activation"),
        (BERTConfig(13, activation="swiglu"), "roberta", r"model\.activation"),
        (BERTConfig(13, token_types=0), "bert", r"model\.token_types"),
        (BERTConfig(13, positions="alibi"), "bert", r"model\.positions"),
        (BERTConfig(13, dropout=Dropout(0.1, 0.2)), "bert", r"model\.dropout\.residual"),
        (BERTConfig(13, num_kv_heads=4), "bert", r"model\.num_kv_heads"),
        (BERTConfig(13, d_k=32), "bert", r"model\.d_k"),
        (BERTConfig(13, d_v=32), "roberta", r"model\.d_v"),
        (GPTConfig(13, head_bias=True), "gpt2", r"model\.head_bias"),
        (GPTConfig(13, attention_output_bias=False), "gpt2", r"model\.attention_output_bias"),
        (GPTConfig(13), "llama", r"model\.activation"),
        (GPTConfig(13, activation="swiglu"), "llama", r"model\.norm_kind.*model\.positions"),
        (replace(gpt.llama2_7b(), feed_forward_bias=True), "mistral", r"model\.feed_forward_bias"),
        (replace(gpt.llama2_7b(), attention_bias=True), "qwen2", r"model\.attention_output_bias"),
        (replace(gpt.llama2_7b(), rope=Rotary(scaling="ntk", factor=2.0)), "llama", r"model\.rope\.scaling"),
        (replace(gpt.llama2_7b(), rope=Rotary(pairing="interleaved")), "llama", r"model\.rope\.pairing"),
        (replace(gpt.llama2_7b(), rope=Rotary(fraction=0.5)), "llama", r"model\.rope\.fraction"),
        (replace(t5.flan_t5_small(), logits_scale=True), "mt5", r"model\.logits_scale"),
        (replace(t5.t5_small(), tied_embeddings="none"), "t5", r"model\.tied_embeddings"),
        (replace(t5.t5_small(), attention_scale="sqrt"), "t5", r"model\.attention_scale"),
        (replace(transformer.bart_base(), tied_embeddings="none"), "bart", r"model\.tied_embeddings"),
        (replace(MARIAN, tied_embeddings="source_target"), "marian", r"model\.tied_embeddings"),
        (replace(MARIAN, positions="sinusoidal"), "marian", r"model\.positions"),
        (replace(MARIAN, norm_eps=1e-6), "marian", r"model\.norm_eps"),
    ],
)
def test_what_they_have_not_is_refused_by_our_name(config, model_type, named):
    with pytest.raises(ValueError, match=named):
        write_config(config, model_type)


def test_nulls_and_the_implementation_are_no_difference():
    one = replace(gpt.llama2_7b(), num_kv_heads=None, d_k=128, d_v=128, attention_output_bias=False)
    assert write_config(replace(one, implementation="reference"), "llama") == write_config(gpt.llama2_7b(), "llama")


def test_special_ids_are_written_under_their_names():
    ids = {"pad": 3, "bos": 5, "eos": 7}
    config = TransformerConfig(13, positions="sinusoidal_halves")
    written = write_config(config, "marian", ids, dtype="bfloat16")
    expected = {"pad_token_id": 3, "bos_token_id": 5, "eos_token_id": 7, "decoder_start_token_id": 5}
    assert {name: written[name] for name in expected} == expected and written["dtype"] == "bfloat16"
    # null, for theirs are ids of a larger vocabulary
    assert write_config(GPTConfig(13), "gpt2", {"eos": 7})["bos_token_id"] is None
    assert write_config(BERTConfig(13), "roberta")["pad_token_id"] == 1
    for model_type, wrong in (("roberta", {"pad": 0}), ("bert", {"pad": 13}), ("bert", {"cls": 2})):
        with pytest.raises(ValueError, match=f"special has '{next(iter(wrong))}'"):
            write_config(BERTConfig(13), model_type, wrong)

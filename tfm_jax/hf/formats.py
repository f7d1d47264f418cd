"""The ten formats of config.json that we know, with the fields and the defaults of transformers 5.

A format says which of their fields are which of ours, what all its models compute, what a file leaves out, and what
must stand there because we have nothing else. Fields that change no number are not looked at.
"""

from collections.abc import Callable
from typing import NamedTuple

from tfm_jax.hf.conversions import (
    Values,
    read_bart,
    read_bert,
    read_gpt2,
    read_llama,
    read_t5,
    write_bart,
    write_bert,
    write_gpt2,
    write_llama,
    write_t5,
)
from tfm_jax.models import BERTConfig, GPTConfig, TransformerConfig


class Format(NamedTuple):
    """A model type. Our fields are written with a dot where they lie in `dropout`."""

    family: type
    architectures: dict[str, Values]
    """Class of theirs -> our fields that it decides; the first that fits is written."""
    fields: dict[str, tuple]
    """Theirs -> ours of the same value, one or more, and last the value where the file leaves it out."""
    others: Values
    """Theirs that `read` looks at -> value where the file leaves them out; or another such value for `fields`."""
    switches: Values
    """Ours -> value that all models of this type have, where it is not the family's default."""
    only: Values
    """Theirs -> the one value that is supported, which is also what a file without the field means."""
    read: Callable[[str, Values], Values]
    """(model type, theirs) -> what `fields` does not give of ours; raises `ValueError`."""
    write: Callable[[str, Values], Values]
    """(model type, ours) -> what `fields` does not give of theirs; raises `ValueError`."""
    aliases: dict[str, str] = {}
    """Second name of a field of theirs -> first."""

    @property
    def defaults(self) -> Values:
        """Theirs -> value where the file leaves it out."""
        return {name: default for name, (*_, default) in self.fields.items()} | self.others


def _labelled(name: str) -> dict[str, Values]:
    """The classes with a number a label; regression is told from sequence by other fields (`read_labels`)."""
    heads = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token", "ForQuestionAnswering": "span"}
    return {f"{name}{ending}": {"head": head} for ending, head in heads.items()}


def _bert(architectures: dict[str, Values], *, vocab_size: int, only: Values) -> Format:
    return Format(
        BERTConfig,
        architectures,
        fields={
            "vocab_size": ("vocab_size", vocab_size),
            "hidden_size": ("d_model", 768),
            "intermediate_size": ("d_ff", 3072),
            "num_hidden_layers": ("num_layers", 12),
            "num_attention_heads": ("num_heads", 12),
            "layer_norm_eps": ("norm_eps", 1e-12),
            "type_vocab_size": ("token_types", 2),
            "hidden_dropout_prob": ("dropout.embedding", "dropout.residual", 0.1),
            "attention_probs_dropout_prob": ("dropout.attention", 0.1),
        },
        others={"hidden_act": "gelu", "max_position_embeddings": 512},
        switches={"dropout.feed_forward": 0.0},
        only={"position_embedding_type": "absolute", "tie_word_embeddings": True}
        | {"is_decoder": False, "add_cross_attention": False, "is_encoder_decoder": False}
        | only,
        read=read_bert,
        write=write_bert,
    )


def _llama(name: str, *, fields: dict[str, tuple], others: Values, switches: Values, only: Values) -> Format:
    rope = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0}
    window = {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
    return Format(
        GPTConfig,
        architectures={f"{name}ForCausalLM": {"head": "language"}, f"{name}Model": {"head": "language"}}
        | _labelled(name),
        fields={
            "vocab_size": ("vocab_size", 32_000),
            "hidden_size": ("d_model", 4096),
            "intermediate_size": ("d_ff", 11_008),
            "num_hidden_layers": ("num_layers", 32),
            "num_attention_heads": ("num_heads", 32),
            "num_key_value_heads": ("num_kv_heads", None),
            "max_position_embeddings": ("max_length", 2048),
            "rms_norm_eps": ("norm_eps", 1e-6),
            "tie_word_embeddings": ("tied_embeddings", False),
            "attention_dropout": ("dropout.attention", 0.0),
        }
        | fields,
        others={"hidden_act": "silu", "head_dim": None} | rope | window | others,
        switches={"norm_kind": "rmsnorm", "positions": "rope"}
        | {"dropout.embedding": 0.0, "dropout.residual": 0.0, "dropout.feed_forward": 0.0}
        | switches,
        only={"is_encoder_decoder": False, "add_cross_attention": False} | only,
        read=read_llama,
        write=write_llama,
    )


def _t5(name: str, *, sizes: tuple[int, int, int, int], feed_forward_proj: str) -> Format:
    vocab_size, d_ff, num_layers, num_heads = sizes
    old = {"T5WithLMHeadModel": {}} if name == "T5" else {}
    return Format(
        TransformerConfig,
        architectures={f"{name}ForConditionalGeneration": {}, f"{name}Model": {"tied_embeddings": "all"}} | old,
        fields={
            "vocab_size": ("vocab_size", vocab_size),
            "d_model": ("d_model", 512),
            "d_kv": ("d_k", 64),
            "d_ff": ("d_ff", d_ff),
            "num_layers": ("num_encoder_layers", num_layers),
            "num_decoder_layers": ("num_decoder_layers", None),
            "num_heads": ("num_heads", num_heads),
            # not a field of theirs any more: the model has no longest length, but files name the one of training
            "n_positions": ("max_length", 512),
            "relative_attention_num_buckets": ("t5_buckets", 32),
            "relative_attention_max_distance": ("t5_max_distance", 128),
            "layer_norm_epsilon": ("norm_eps", 1e-6),
            "dropout_rate": ("dropout.embedding", "dropout.residual", "dropout.attention", "dropout.feed_forward", 0.1),
        },
        others={"feed_forward_proj": feed_forward_proj, "tie_word_embeddings": True},
        switches={
            "norm": "pre",
            "norm_kind": "rmsnorm",
            "positions": "t5",
            "attention_scale": "none",
            "attention_bias": False,
            "feed_forward_bias": False,
            "embedding_scale": False,
        },
        only={"is_encoder_decoder": True, "is_decoder": False},
        read=read_t5,
        write=write_t5,
        aliases={"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
        | {"head_dim": "d_kv"},
    )


def _bart(name: str, model: str, *, fields: dict[str, tuple], switches: Values, only: Values) -> Format:
    return Format(
        TransformerConfig,
        # all files of the whole model have the bias, final_logits_bias
        architectures={model: {"head_bias": True}, f"{name}Model": {"head_bias": False}},
        fields=fields
        | {
            "d_model": ("d_model", 1024),
            "encoder_ffn_dim": ("d_ff", 4096),
            "decoder_ffn_dim": ("d_ff", 4096),
            "encoder_layers": ("num_encoder_layers", 12),
            "decoder_layers": ("num_decoder_layers", 12),
            "encoder_attention_heads": ("num_heads", 16),
            "decoder_attention_heads": ("num_heads", 16),
            "max_position_embeddings": ("max_length", 1024),
            "scale_embedding": ("embedding_scale", False),
            "dropout": ("dropout.embedding", "dropout.residual", 0.1),
            "attention_dropout": ("dropout.attention", 0.0),
            "activation_dropout": ("dropout.feed_forward", 0.0),
        },
        others={"activation_function": "gelu", "tie_word_embeddings": True, "share_encoder_decoder_embeddings": True},
        switches=switches,
        only={"is_encoder_decoder": True, "is_decoder": False}
        | {"normalize_before": False, "add_final_layer_norm": False}
        | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
        | only,
        read=read_bart,
        write=write_bart,
        aliases={"hidden_size": "d_model", "num_hidden_layers": "encoder_layers"}
        | {"num_attention_heads": "encoder_attention_heads"},
    )


FORMATS: dict[str, Format] = {
    "bert": _bert(
        {
            "BertForMaskedLM": {"head": "masked"},
            "BertModel": {"head": "pooled"},
            "BertForPreTraining": {"head": "masked"},
        }
        | _labelled("Bert"),
        vocab_size=30_522,
        only={},
    ),
    "roberta": _bert(
        {"RobertaForMaskedLM": {"head": "masked"}, "RobertaModel": {"head": "pooled"}} | _labelled("Roberta"),
        vocab_size=50_265,
        only={"pad_token_id": 1},
    ),
    "gpt2": Format(
        GPTConfig,
        architectures={"GPT2LMHeadModel": {"head": "language"}, "GPT2Model": {"head": "language"}} | _labelled("GPT2"),
        fields={
            "vocab_size": ("vocab_size", 50_257),
            "n_embd": ("d_model", 768),
            "n_inner": ("d_ff", None),
            "n_layer": ("num_layers", 12),
            "n_head": ("num_heads", 12),
            "n_positions": ("max_length", 1024),
            "layer_norm_epsilon": ("norm_eps", 1e-5),
            "tie_word_embeddings": ("tied_embeddings", True),
            "embd_pdrop": ("dropout.embedding", 0.1),
            "resid_pdrop": ("dropout.residual", 0.1),
            "attn_pdrop": ("dropout.attention", 0.1),
        },
        others={"activation_function": "gelu_new", "scale_attn_weights": True},
        switches={"dropout.feed_forward": 0.0},
        only={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "is_encoder_decoder": False},
        read=read_gpt2,
        write=write_gpt2,
        aliases={"hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
        | {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    ),
    "llama": _llama(
        "Llama",
        fields={"attention_bias": ("attention_bias", False), "mlp_bias": ("feed_forward_bias", False)},
        others={},
        switches={},
        only={},
    ),
    "mistral": _llama(
        "Mistral",
        fields={},
        others={"intermediate_size": 14_336, "num_key_value_heads": 8}
        | {"max_position_embeddings": 131_072, "sliding_window": 4096},
        switches={"attention_bias": False, "feed_forward_bias": False},
        only={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": _llama(
        "Qwen2",
        fields={},
        others={"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32}
        | {"max_position_embeddings": 32_768}
        | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        switches={"attention_bias": True, "attention_output_bias": False, "feed_forward_bias": False},
        only={"attention_bias": True, "mlp_bias": False},
    ),
    "t5": _t5("T5", sizes=(32_128, 2048, 6, 8), feed_forward_proj="relu"),
    "mt5": _t5("MT5", sizes=(250_112, 1024, 8, 6), feed_forward_proj="gated-gelu"),
    "bart": _bart(
        "Bart",
        "BartForConditionalGeneration",
        fields={"vocab_size": ("vocab_size", 50_265)},
        switches={"positions": "learned", "embedding_norm": True},
        only={"normalize_embedding": True, "static_position_embeddings": False},
    ),
    "marian": _bart(
        "Marian",
        "MarianMTModel",
        fields={"vocab_size": ("vocab_size", 58_101), "decoder_vocab_size": ("vocab_size", None)},
        switches={"positions": "sinusoidal_halves"},
        only={"normalize_embedding": False, "static_position_embeddings": True},
    ),
}

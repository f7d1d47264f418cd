"""What of a config.json is not one field there for one field here: activations, rotary positions, ties, lengths.

Each `read_` takes the model type and their fields and gives ours, each `write_` the other way round; both raise
`ValueError` for what the other side has not.
"""

from collections.abc import Callable
from typing import Any

from tfm_jax.config import require

Values = dict[str, Any]

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "swish": "silu",
}
_GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}
_PLAIN_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_GATE_NAMES = {"geglu": "gelu", "geglu_tanh": "gelu_new", "swiglu": "silu"}
# what they call gated-gelu is the approximation by tanh
_T5_NAMES = _PLAIN_NAMES | {"geglu": "gated-gelu_python", "geglu_tanh": "gated-gelu", "swiglu": "gated-silu"}
_ROPE_KINDS = {"none": "default", "linear": "linear", "llama3": "llama3"}
_LLAMA3 = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", *_LLAMA3}
_MARIAN_TIES = {(True, True): "all", (False, True): "target_output", (False, False): "none"}
"""By share_encoder_decoder_embeddings and tie_word_embeddings."""

_SINGLE = "single_label_classification"

WHERE_NULL: dict[str, Callable[[Values], Any]] = {
    "n_inner": lambda values: 4 * values["n_embd"],
    "num_key_value_heads": lambda values: values["num_attention_heads"],
    "num_decoder_layers": lambda values: values["num_layers"],
    "decoder_vocab_size": lambda values: values["vocab_size"],
    "attention_dropout": lambda values: 0.0,
}
NEVER = {"quantization_config": None, "per_layer_config": None, "pruned_heads": None, "tie_encoder_decoder": False}


def _activation(field: str, name: Any, *, gated: bool = False) -> str:
    known = {theirs: _GATED.get(ours) if gated else ours for theirs, ours in _ACTIVATIONS.items()}
    supported = [theirs for theirs, ours in known.items() if ours]
    require(name in supported, f"{field} (model.activation) is {name!r}: {supported} are supported here")
    return known[name]


def _activation_name(activation: str, names: dict[str, str]) -> str:
    require(activation in names, f"model.activation is {activation!r}: {sorted(names)} are supported here")
    return names[activation]


def read_head(model_type: str, values: Values, head: str) -> Values:
    """Ours of what stands on the model: `head`, where their fields do not make it a regression, and labels."""
    if head == "masked":
        activation = _activation("hidden_act", values["hidden_act"])
        # BERT's head repeats the activation of the blocks, RoBERTa's has its own
        right = model_type == "bert" or activation == "gelu"
        require(right, f"hidden_act (model.activation) is {activation!r}: RoBERTa's masked head has 'gelu' alone")
    if head not in ("sequence", "regression", "token"):
        return {"head": head}
    given = values.get("id2label") or {i: f"LABEL_{i}" for i in range(values.get("num_labels") or 2)}
    names = {int(i): name for i, name in given.items()}
    in_order = sorted(names) == list(range(len(names)))
    require(in_order, f"id2label (model.labels) has {sorted(names)}: numbers from 0 up are expected")
    rate = values.get("hidden_dropout_prob", values.get("resid_pdrop"))
    own_rate = values.get("classifier_dropout")
    same = own_rate is None or rate in (None, own_rate)
    require(
        same, f"classifier_dropout is {own_rate}, other layers have {rate}: one rate (dropout.residual) is supported"
    )
    kind = values.get("problem_type") or ("regression" if len(names) == 1 else _SINGLE)
    require(kind in ("regression", _SINGLE), f"problem_type is {kind!r}: 'regression' and {_SINGLE!r} are supported")
    regression = head != "token" and kind == "regression"
    return {"head": "regression" if regression else head, "labels": [names[i] for i in range(len(names))]}


def write_head(ours: Values) -> Values:
    """Theirs of a head with labels."""
    names = dict(enumerate(ours["labels"]))
    kind = {"regression": "regression", "sequence": _SINGLE}.get(ours["head"])
    return {"id2label": names, "label2id": {name: i for i, name in names.items()}, "problem_type": kind}


def read_bert(model_type: str, values: Values) -> Values:
    unused = 2 if model_type == "roberta" else 0  # positions begin at pad_token_id + 1
    activation = _activation("hidden_act", values["hidden_act"])
    kinds = values["type_vocab_size"]
    require(kinds != 0, "type_vocab_size (model.token_types) is 0: at least 1 is needed there")
    return {"activation": activation, "max_length": values["max_position_embeddings"] - unused}


def write_bert(model_type: str, ours: Values) -> Values:
    rows = ours["max_length"] + (2 if model_type == "roberta" else 0)
    return {"hidden_act": _activation_name(ours["activation"], _PLAIN_NAMES), "max_position_embeddings": rows}


def read_gpt2(model_type: str, values: Values) -> Values:
    # reorder_and_upcast_attn is how scores are rounded; ours are float32 always
    scale = "sqrt" if values["scale_attn_weights"] else "none"
    return {
        "activation": _activation("activation_function", values["activation_function"]),
        "attention_scale": scale,
    }


def write_gpt2(model_type: str, ours: Values) -> Values:
    name = _activation_name(ours["activation"], _PLAIN_NAMES)
    return {"activation_function": name, "scale_attn_weights": ours["attention_scale"] == "sqrt"}


def read_llama(model_type: str, values: Values) -> Values:
    width, heads, d_k = (values[name] for name in ("hidden_size", "num_attention_heads", "head_dim"))
    whole = model_type != "llama" or width % heads == 0  # refused there too, though head_dim would tell
    require(whole, f"hidden_size (model.d_model) is {width}, num_attention_heads {heads}: not a multiple")
    window, longest = values["sliding_window"], values["max_position_embeddings"]
    slides = values["use_sliding_window"] and values["max_window_layers"] < values["num_hidden_layers"]
    kinds = sorted(set(values["layer_types"] or ()) - {"full_attention"})
    require(not kinds, f"layer_types has {kinds}: attention windows are not among the switches, only 'full_attention'")
    require(
        window is None or not slides or window >= longest,
        f"sliding_window is {window}, max_position_embeddings {longest}: attention windows are not among the switches. "
        f"A max_position_embeddings of {window} gives the same model for inputs that short",
    )
    activation = _activation("hidden_act", values["hidden_act"], gated=True)
    return {"activation": activation, "d_k": None if d_k == width / heads else d_k, "rope": _read_rope(values)}


def _read_rope(values: Values) -> Values:
    rope = values["rope_scaling"] or values["rope_parameters"] or {}
    where, unknown = f"rope_parameters (rope_scaling) is {rope}", sorted(rope.keys() - _ROPE_FIELDS)
    require(not unknown, f"{where}: {unknown} are not supported")
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    require(share in (None, 1), f"partial_rotary_factor is {share}: whole heads turn in this model type")
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor", 1.0)
    base = rope.get("rope_theta", values["rope_theta"])
    # dynamic scaling begins beyond max_position_embeddings, which is more than the model accepts
    kinds = {"default": "none", "dynamic": "none", "linear": "linear", "llama3": "llama3"}
    require(kind in kinds, f"{where}: the types {sorted(kinds)} are supported")
    if kinds[kind] == "none" or factor == 1:
        return {"base": base}
    scaled = {"base": base, "scaling": kinds[kind], "factor": factor}
    if kind != "llama3":
        return scaled
    name = "original_max_position_embeddings"
    given = {name: values["max_position_embeddings"]} | rope | ({name: values[name]} if name in values else {})
    missing = sorted(_LLAMA3.keys() - given.keys())
    require(not missing, f"{where}: {missing} are missing")
    return scaled | {ours: given[theirs] for theirs, ours in _LLAMA3.items()}


def write_llama(model_type: str, ours: Values) -> Values:
    rope = ours["rope"]
    kind = _ROPE_KINDS.get(rope["scaling"])
    require(kind is not None, f"model.rope.scaling is {rope['scaling']!r}: {sorted(_ROPE_KINDS)} are supported here")
    values = {"rope_type": kind, "rope_theta": rope["base"]}
    values |= {} if kind == "default" else {"factor": rope["factor"]}
    values |= {theirs: rope[own] for theirs, own in _LLAMA3.items()} if kind == "llama3" else {}
    name = _activation_name(ours["activation"], _GATE_NAMES)
    window = {} if model_type == "llama" else {"sliding_window": None}
    return {"hidden_act": name, "head_dim": ours["d_k"], "rope_parameters": values} | window


def read_t5(model_type: str, values: Values) -> Values:
    name, tied = values["feed_forward_proj"], values["tie_word_embeddings"] is not False
    prefix, _, activation = name.rpartition("-")
    require(prefix in ("", "gated"), f"feed_forward_proj is {name!r}: an activation or gated-activation is expected")
    activation = "gelu_new" if name == "gated-gelu" else activation
    gated = values.get("is_gated_act", prefix == "gated")
    ours = {"activation": _activation("feed_forward_proj", values.get("dense_act_fn", activation), gated=gated)}
    scaled = model_type == "t5" and values.get("scale_decoder_outputs", tied)
    tied = tied and scaled  # who does not scale has an output layer of its own: `own_head`
    return ours | {"logits_scale": scaled, "tied_embeddings": "all" if tied else "source_target"}


def write_t5(model_type: str, ours: Values) -> Values:
    name, tied = _activation_name(ours["activation"], _T5_NAMES), ours["tied_embeddings"] == "all"
    scaled = {"scale_decoder_outputs": ours["logits_scale"]} if model_type == "t5" else {}
    return {"feed_forward_proj": name, "tie_word_embeddings": tied} | scaled


def read_bart(model_type: str, values: Values) -> Values:
    shared, tied = values["share_encoder_decoder_embeddings"], values["tie_word_embeddings"]
    ties = _MARIAN_TIES.get((shared, tied))
    require(
        ties is not None,
        f"tie_word_embeddings is {tied}: an output layer of its own beside shared embeddings is not supported here",
    )
    return {
        "activation": _activation("activation_function", values["activation_function"]),
        "tied_embeddings": ties,
    }


def write_bart(model_type: str, ours: Values) -> Values:
    ties = {own: theirs for theirs, own in _MARIAN_TIES.items() if model_type == "marian" or own == "all"}
    tied = ours["tied_embeddings"]
    require(tied in ties, f"model.tied_embeddings is {tied!r}: {sorted(ties)} are supported here")
    share = {"share_encoder_decoder_embeddings": ties[tied][0]} if model_type == "marian" else {}
    name = _activation_name(ours["activation"], _PLAIN_NAMES)
    return {"activation_function": name, "tie_word_embeddings": ties[tied][1]} | share

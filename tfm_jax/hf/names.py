"""What Hugging Face calls each parameter, by model type: one table a layout.

An entry says where a tensor stands in our tree, what it is called there, and how it is written. Names are without the
prefix of the base model (`bert.`, `model.`, ...), which some files have and some have not.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

How = Literal["same", "vector", "row", "linear_in", "linear_out", "conv_out", "third", "rows"]


class Entry(NamedTuple):
    """A tensor: its path in our tree, the layer of a stack it belongs to (None: no stack), its name there."""

    path: tuple[str, ...]
    layer: int | None
    name: str
    how: How = "same"
    part: int = 0
    """Which third of their tensor it is, for "third"."""
    head: bool = False
    """Whether it stands beside the base model and so never has its prefix."""


class Layout(NamedTuple):
    """The entries of a model; `prefix` of the base model, `copies`: name -> name of what it repeats where they tie
    tensors, `ignored`: endings of names that hold no parameter."""

    prefix: str
    entries: tuple[Entry, ...]
    copies: dict[str, str]
    ignored: tuple[str, ...] = ()


def read(entry: Entry, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Their tensor as ours, of this shape (of one layer)."""
    match entry.how:
        case "linear_in" | "linear_out":
            return tensor.T.reshape(shape)
        case "third":
            return np.split(tensor, 3, axis=-1)[entry.part].reshape(shape)
        case "rows":
            return tensor[-shape[0] :]
        case _:
            return tensor.reshape(shape)


def written_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of their tensor for ours (of one layer)."""
    size = int(np.prod(shape))
    match entry.how:
        case "vector":
            return (size,)
        case "row":
            return (1, size)
        case "linear_in":
            return (size // shape[0], shape[0])
        case "linear_out":
            return (shape[-1], size // shape[-1])
        case "conv_out":
            return (size // shape[-1], shape[-1])
        case "third":
            return (3 * size,) if len(shape) == 2 else (shape[0], 3 * size // shape[0])
        case "rows":
            return (shape[0] + 2, *shape[1:])
        case _:
            return shape


def write(entry: Entry, array: np.ndarray) -> np.ndarray:
    """Our array (of one layer) as theirs; for "third" only that third."""
    match entry.how:
        case "linear_in":
            return array.reshape(array.shape[0], -1).T
        case "linear_out":
            return array.reshape(-1, array.shape[-1]).T
        case "third":
            return array.reshape(-1) if array.ndim == 2 else array.reshape(array.shape[0], -1)
        case "rows":
            return np.concatenate([np.zeros((2, *array.shape[1:]), array.dtype), array])
        case _:
            return array.reshape(written_shape(entry, array.shape))


def layout(model_type: str, config: Any) -> Layout:
    """The names of a model of this type; raises `ValueError` for a type that is not known."""
    if model_type not in _LAYOUTS:
        raise ValueError(f"model_type is {model_type!r}: one of {sorted(_LAYOUTS)} is expected")
    return _LAYOUTS[model_type](config)


def _norm(path: tuple[str, ...], layer: int | None, name: str, kind: str) -> Iterator[Entry]:
    yield Entry((*path, "scale"), layer, f"{name}.weight")
    if kind == "layernorm":
        yield Entry((*path, "bias"), layer, f"{name}.bias")


def _linear(
    path: tuple[str, ...], layer: int | None, name: str, *, bias: bool, how: How = "linear_in", head: bool = False
) -> Iterator[Entry]:
    *parent, own = path
    yield Entry(path, layer, f"{name}.weight", how, head=head)
    if bias:
        yield Entry((*parent, f"{own}_bias"), layer, f"{name}.bias", "vector", head=head)


def _attention(path: tuple[str, ...], layer: int, names: tuple[str, str, str, str], config: Any) -> Iterator[Entry]:
    for ours, theirs in zip(("query", "key", "value"), names[:3], strict=True):
        yield from _linear((*path, ours), layer, theirs, bias=config.attention_bias)
    bias = config.attention_bias and config.attention_output_bias
    yield from _linear((*path, "output"), layer, names[3], bias=bias, how="linear_out")


def _stack(stack: str, count: int, block) -> Iterator[Entry]:
    for layer in range(count):
        yield from block((stack, "layers"), layer)


def _bert(config: Any, prefix: str, head: dict[str, str]) -> Layout:
    def block(path, i):
        at, kind = f"encoder.layer.{i}.", config.norm_kind
        names = tuple(f"{at}attention.{x}" for x in ("self.query", "self.key", "self.value", "output.dense"))
        yield from _attention((*path, "attention"), i, names, config)
        yield from _norm((*path, "attention_norm"), i, f"{at}attention.output.LayerNorm", kind)
        yield from _linear((*path, "feed_forward", "up"), i, f"{at}intermediate.dense", bias=True)
        yield from _linear((*path, "feed_forward", "down"), i, f"{at}output.dense", bias=True)
        yield from _norm((*path, "feed_forward_norm"), i, f"{at}output.LayerNorm", kind)

    rows: How = "rows" if prefix == "roberta." else "same"
    entries = [
        Entry(("embedding", "table"), None, "embeddings.word_embeddings.weight"),
        Entry(("position_embedding", "table"), None, "embeddings.position_embeddings.weight", rows),
        Entry(("token_type_embedding", "table"), None, "embeddings.token_type_embeddings.weight"),
        *_norm(("embedding_norm",), None, "embeddings.LayerNorm", config.norm_kind),
        *_stack("encoder", config.num_layers, block),
    ]
    own, copies, unread = _bert_head(config, head)
    # what BERT's and RoBERTa's own training had besides, and this head does not read
    return Layout(prefix, (*entries, *own), copies, ("embeddings.position_ids", *unread))


def _bert_head(config: Any, head: dict[str, str]) -> tuple[list[Entry], dict[str, str], tuple[str, ...]]:
    """Entries of a head, tensors it repeats, and endings of tensors it does not read."""
    if config.head == "masked":
        entries = [*_linear(("masked", "dense"), None, head["dense"], bias=True, head=True)]
        entries += [entry._replace(head=True) for entry in _norm(("masked", "norm"), None, head["norm"], "layernorm")]
        entries.append(Entry(("masked", "bias"), None, head["bias"], "vector", head=True))
        copies = {f"{head['decoder']}.weight": "embeddings.word_embeddings.weight"}
        return entries, copies | {f"{head['decoder']}.bias": head["bias"]}, _OTHER_HEADS
    if config.head == "pooled":
        return [*_linear(("pooler", "dense"), None, "pooler.dense", bias=True)], {}, ()
    if config.head == "embedding":
        return [], {}, _OTHER_HEADS
    if config.head in ("token", "span"):
        return [*_linear(("classifier", "dense"), None, _LABELS[config.head], bias=True, head=True)], {}, _OTHER_HEADS
    # RoBERTa's classifier has a pooler of its own
    beside = head["pooler"].startswith("classifier")
    entries = [*_linear(("pooler", "dense"), None, head["pooler"], bias=True, head=beside)]
    entries += _linear(("classifier", "dense"), None, head["classifier"], bias=True, head=True)
    return entries, {}, _OTHER_HEADS if beside else ()


def _gpt2(config: Any) -> Layout:
    def block(path, i):
        at = f"h.{i}."
        yield from _norm((*path, "attention_norm"), i, f"{at}ln_1", config.norm_kind)
        for part, name in enumerate(("query", "key", "value")):
            yield Entry((*path, "attention", name), i, f"{at}attn.c_attn.weight", "third", part)
            yield Entry((*path, "attention", f"{name}_bias"), i, f"{at}attn.c_attn.bias", "third", part)
        yield from _linear((*path, "attention", "output"), i, f"{at}attn.c_proj", bias=True, how="conv_out")
        yield from _norm((*path, "feed_forward_norm"), i, f"{at}ln_2", config.norm_kind)
        yield from _linear((*path, "feed_forward", "up"), i, f"{at}mlp.c_fc", bias=True, how="same")
        yield from _linear((*path, "feed_forward", "down"), i, f"{at}mlp.c_proj", bias=True, how="same")

    entries = (
        Entry(("embedding", "table"), None, "wte.weight"),
        Entry(("position_embedding", "table"), None, "wpe.weight"),
        *_stack("decoder", config.num_layers, block),
        *_norm(("decoder", "norm"), None, "ln_f", config.norm_kind),
    )
    buffers = (".attn.bias", ".attn.masked_bias")
    if config.head != "language":
        return _labelled("transformer.", entries, config, {"token": "classifier"}, buffers)
    return _with_head("transformer.", entries, config.tied_embeddings, "wte.weight", buffers)


def _llama(config: Any, span_prefix: str = "transformer.") -> Layout:
    def block(path, i):
        at = f"layers.{i}."
        names = tuple(f"{at}self_attn.{x}_proj" for x in "qkvo")
        yield from _norm((*path, "attention_norm"), i, f"{at}input_layernorm", config.norm_kind)
        yield from _attention((*path, "attention"), i, names, config)
        yield from _norm((*path, "feed_forward_norm"), i, f"{at}post_attention_layernorm", config.norm_kind)
        for name in ("gate", "up", "down"):
            yield from _linear((*path, "feed_forward", name), i, f"{at}mlp.{name}_proj", bias=config.feed_forward_bias)

    entries = (
        Entry(("embedding", "table"), None, "embed_tokens.weight"),
        *_stack("decoder", config.num_layers, block),
        *_norm(("decoder", "norm"), None, "norm", config.norm_kind),
    )
    buffers = ("rotary_emb.inv_freq",)
    if config.head != "language":
        return _labelled(span_prefix if config.head == "span" else "model.", entries, config, {}, buffers)
    return _with_head("model.", entries, config.tied_embeddings, "embed_tokens.weight", buffers)


def _labelled(prefix: str, entries: tuple, config: Any, names: dict[str, str], ignored: tuple[str, ...]) -> Layout:
    """A decoder with a number a label in the place of its output layer."""
    name = ({"token": "score", "sequence": "score", "regression": "score", "span": "qa_outputs"} | names)[config.head]
    bias = config.head in ("token", "span")
    head = _linear(("classifier", "dense"), None, name, bias=bias, head=True)
    return Layout(prefix, (*entries, *head), {}, ignored)


def _with_head(prefix: str, entries: tuple, tied: bool, table: str, ignored: tuple[str, ...]) -> Layout:
    head = () if tied else (Entry(("head",), None, "lm_head.weight", head=True),)
    return Layout(prefix, (*entries, *head), {"lm_head.weight": table} if tied else {}, ignored)


def _t5(config: Any) -> Layout:
    def sublayers(stack):
        names = {"attention": "SelfAttention", "cross_attention": "EncDecAttention", "feed_forward": "DenseReluDense"}
        return [(x, names[x]) for x in names if stack == "decoder" or x != "cross_attention"]

    def block(path, i):
        (stack, _) = path
        for number, (ours, theirs) in enumerate(sublayers(stack)):
            at = f"{stack}.block.{i}.layer.{number}."
            yield from _norm((*path, f"{ours}_norm"), i, f"{at}layer_norm", config.norm_kind)
            if ours != "feed_forward":
                names = tuple(f"{at}{theirs}.{x}" for x in "qkvo")
                yield from _attention((*path, ours), i, names, config)
                continue
            gated = config.activation in ("geglu_tanh", "geglu", "swiglu")
            matrices = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
            for name, their in matrices.items():
                yield from _linear((*path, ours, name), i, f"{at}{theirs}.{their}", bias=False)

    entries = [Entry(("embedding", "table"), None, "shared.weight")]
    for stack, count in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        entries.append(Entry((stack, "position_bias", "table"), None, bias))
        entries += _stack(stack, count, block)
        entries += _norm((stack, "norm"), None, f"{stack}.final_layer_norm", config.norm_kind)
    copies = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
    tied = config.tied_embeddings == "all"
    found = _with_head("", tuple(entries), tied, "shared.weight", ())
    return found._replace(copies=found.copies | copies)


def _bart(config: Any) -> Layout:
    def block(path, i):
        (stack, _), kind = path, config.norm_kind
        at = f"{stack}.layers.{i}."
        for ours, theirs in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            if stack == "decoder" or ours == "attention":
                names = tuple(f"{at}{theirs}.{x}_proj" for x in ("q", "k", "v", "out"))
                yield from _attention((*path, ours), i, names, config)
                yield from _norm((*path, f"{ours}_norm"), i, f"{at}{theirs}_layer_norm", kind)
        yield from _linear((*path, "feed_forward", "up"), i, f"{at}fc1", bias=True)
        yield from _linear((*path, "feed_forward", "down"), i, f"{at}fc2", bias=True)
        yield from _norm((*path, "feed_forward_norm"), i, f"{at}final_layer_norm", kind)

    shared = config.tied_embeddings in ("all", "source_target")
    table = "shared.weight" if shared else "decoder.embed_tokens.weight"
    entries = [Entry(("embedding", "table"), None, table)]
    for stack, side, count in (
        ("encoder", "source_", config.num_encoder_layers),
        ("decoder", "", config.num_decoder_layers),
    ):
        if config.positions == "learned":
            path = (f"{side}position_embedding", "table")
            entries.append(Entry(path, None, f"{stack}.embed_positions.weight", "rows"))
        if config.embedding_norm:
            entries += _norm((f"{side}embedding_norm",), None, f"{stack}.layernorm_embedding", "layernorm")
        entries += _stack(stack, count, block)
    if config.head_bias:
        entries.append(Entry(("head_bias",), None, "final_logits_bias", "row", head=True))
    copies = {"lm_head.weight": table}
    if shared:
        copies |= {f"{stack}.embed_tokens.weight": table for stack in ("encoder", "decoder")}
    else:
        entries.append(Entry(("source_embedding", "table"), None, "encoder.embed_tokens.weight"))
    if config.tied_embeddings in ("source_target", "none"):
        del copies["lm_head.weight"]
        entries.append(Entry(("head",), None, "lm_head.weight", head=True))
    # the sinusoidal table, which some files hold, is a constant
    ignored = () if config.positions == "learned" else ("embed_positions.weight",)
    return Layout("model.", tuple(entries), copies, ignored)


_OTHER_HEADS = (
    "pooler.dense.weight",
    "pooler.dense.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
)
_BERT_HEAD = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "bias": "cls.predictions.bias",
    "decoder": "cls.predictions.decoder",
    "pooler": "pooler.dense",
    "classifier": "classifier",
}
_ROBERTA_HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "bias": "lm_head.bias",
    "decoder": "lm_head.decoder",
    "pooler": "classifier.dense",
    "classifier": "classifier.out_proj",
}
_LABELS = {"token": "classifier", "span": "qa_outputs"}
_LAYOUTS = {
    "bert": lambda config: _bert(config, "bert.", _BERT_HEAD),
    "roberta": lambda config: _bert(config, "roberta.", _ROBERTA_HEAD),
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": lambda config: _llama(config, "model."),
    "qwen2": _llama,
    "t5": _t5,
    "mt5": _t5,
    "bart": _bart,
    "marian": _bart,
}

"""Every kind of positions in a whole model: against NumPy in float64, decoded with a cache, padded, packed, in blocks.

Parameters are random in every leaf, the tables of T5 and Shaw included. Sentences are longer than the distances from
which on T5 and Shaw distinguish nothing, so that clipping and buckets of several distances occur.
"""

import dataclasses
import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from tfm_jax import config, oracle, oracle_blocks
from tfm_jax.models import build
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.ops import Rotary
from tfm_jax.sharding import make_mesh
from tfm_jax.train.step import abstract_params

V, D, N, H, E, F, L = 157, 10, 3, 6, 5, 7, 2
# One shape of batch for most of the tests: what is called without compiling is compiled operation by operation.
B, S, T, MAX = 8, 13, 19, 29
PLAIN = TransformerConfig(
    V,
    max_length=MAX,
    d_model=D,
    d_ff=F,
    num_heads=N,
    num_encoder_layers=L,
    num_decoder_layers=L,
    d_k=H,
    d_v=E,
    implementation="reference",
    tied_embeddings="none",
    dropout=Dropout(embedding=0.0, residual=0.0),
)
KINDS = {
    "sinusoidal": PLAIN,
    "learned": replace(PLAIN, positions="learned"),
    "rope": replace(PLAIN, positions="rope", rope=Rotary(base=50.0)),
    "rope_interleaved": replace(
        PLAIN, positions="rope", norm="pre", rope=Rotary("interleaved", fraction=4.1 / 6, scaling="linear", factor=1.5)
    ),
    "alibi": replace(PLAIN, positions="alibi"),
    "shaw": replace(PLAIN, positions="shaw", shaw_distance=3),
    "t5": replace(PLAIN, positions="t5", t5_buckets=6, t5_max_distance=7),
    "none": replace(PLAIN, positions="none"),
}
ABSOLUTE = {"sinusoidal", "learned"}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def prepared(config):
    """A model with random numbers in every leaf, the same for each implementation."""
    model, rng = build(config), np.random.default_rng(0)

    def leaf(path, shape):
        values = rng.standard_normal(shape.shape)
        is_scale = jax.tree_util.keystr(path).endswith("['scale']")
        return jnp.asarray(1 + 0.3 * values if is_scale else 0.4 * values, jnp.float32)

    return model, jax.tree_util.tree_map_with_path(leaf, model.shapes)


def random_tokens(seed, length):
    return np.random.default_rng(seed).integers(0, V, length, dtype=np.int32)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


# Three sentence pairs (source, target): the longest there is, and two that fit into one row of its size.
PAIRS = {"long": (S, T), "short": (5, 8), "middle": (7, 10)}
PAIRS = {name: tuple(random_tokens(i + 7 * n, n) for n in PAIRS[name]) for i, name in enumerate(PAIRS)}


# ----------------------------------------------------------------------------------------------------------------------
# The model in NumPy, one sentence pair at a time, without padding
# ----------------------------------------------------------------------------------------------------------------------


class Oracle:
    """All that a forward pass makes for one pair, in float64: logits, hidden states, attention weights by layer."""

    def __init__(self, config, params, source, tokens):
        self.config, self.params = config, jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.hidden, self.weights = {"encoder": [], "decoder": []}, {"encoder": [], "decoder": [], "cross": []}
        x = self._embed(source, "source_")
        for layer in self._layers("encoder"):
            self.hidden["encoder"].append(x)
            x = self._sublayer(layer, "attention", x, lambda h, p: self._self_attention(p, h, "encoder"))
            x = self._sublayer(layer, "feed_forward", x, self._feed_forward)
        encoded = self._last("encoder", x)
        x = self._embed(tokens, "")
        for layer in self._layers("decoder"):
            self.hidden["decoder"].append(x)
            x = self._sublayer(layer, "attention", x, lambda h, p: self._self_attention(p, h, "decoder"))
            x = self._sublayer(layer, "cross_attention", x, lambda h, p: self._attend(p, h, encoded, "cross"))
            x = self._sublayer(layer, "feed_forward", x, self._feed_forward)
        self.logits = self._last("decoder", x) @ self.params["head"].T

    def _layers(self, stack):
        return [jax.tree.map(lambda x, i=i: x[i], self.params[stack]["layers"]) for i in range(L)]

    def _embed(self, tokens, side):
        x = self.params[f"{side}embedding"]["table"][tokens][None] * D**0.5
        if self.config.positions == "sinusoidal":
            x = x + oracle_blocks.sinusoidal_table(len(tokens), D)
        if self.config.positions == "learned":
            x = x + self.params[f"{side}position_embedding"]["table"][: len(tokens)]
        return x

    def _sublayer(self, layer, name, x, function):
        norm = functools.partial(oracle_blocks.layer_norm, layer[f"{name}_norm"], eps=self.config.norm_eps)
        return x + function(norm(x), layer[name]) if self.config.norm == "pre" else norm(x + function(x, layer[name]))

    def _last(self, stack, x):
        if self.config.norm == "pre":
            x = oracle_blocks.layer_norm(self.params[stack]["norm"], x, eps=self.config.norm_eps)
        self.hidden[stack].append(x)
        return x

    def _feed_forward(self, x, params):
        return oracle_blocks.feed_forward(params, x, activation=self.config.activation)

    def _self_attention(self, params, x, stack):
        positions = np.arange(x.shape[1])[None]
        mask = oracle.causal_mask(positions, positions) if stack == "decoder" else None
        bias = None
        if self.config.positions == "alibi":
            bias = oracle.ALiBi(oracle.alibi_slopes(N), positions, positions)
        if self.config.positions == "t5":
            table, most = self.params[stack]["position_bias"]["table"], self.config.t5_max_distance
            bias = oracle.T5Bias(table, positions, positions, bidirectional=stack == "encoder", max_distance=most)
        if self.config.positions == "shaw":
            bias = oracle.ShawBias(params["relative_key"], params["relative_value"], positions, positions)
        return self._attend(params, x, x, stack, mask=mask, bias=bias)

    def _attend(self, params, x, y, place, *, mask=None, bias=None):
        query, key, value = (
            np.einsum("BTD,DNH->BTNH", inputs, params[name]) + params[f"{name}_bias"]
            for name, inputs in (("query", x), ("key", y), ("value", y))
        )
        if self.config.positions == "rope" and place != "cross":
            turn = functools.partial(oracle_blocks.rotary_embedding, **dataclasses.asdict(self.config.rope))
            query, key = (turn(heads, np.arange(x.shape[1])[None]) for heads in (query, key))
        self.weights[place].append(oracle.attention_weights(query, key, mask=mask, bias=bias))
        heads = oracle.dot_product_attention(query, key, value, mask=mask, bias=bias)
        return np.einsum("BTNE,NED->BTD", heads, params["output"]) + params["output_bias"]


@functools.cache
def expected(kind, pair):
    model, params = prepared(KINDS[kind])
    return Oracle(model.config, params, *PAIRS[pair])


# ----------------------------------------------------------------------------------------------------------------------
# Whole sequences
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Placed:
    """A sentence pair in a row of a batch: the column of each of its tokens, and the position of its first ones."""

    pair: str
    source: np.ndarray
    target: np.ndarray
    shift: int = 0


def placed(pair, source_start, start):
    source, target = PAIRS[pair]
    return Placed(pair, source_start + np.arange(len(source)), start + np.arange(len(target)))


def shuffled(length):
    return np.random.default_rng(length).permutation(length)


ROWS = [
    [placed("short", 0, 0)],
    [placed("short", S - 5, T - 8)],
    [placed("short", 1, 11), placed("middle", 6, 0)],
    [placed("middle", 0, 0), placed("short", 7, 10)],
    [placed("middle", 4, 8)],
    [Placed("long", np.arange(S), np.arange(T), shift=5)],
    [Placed("long", shuffled(S), shuffled(T))],
    [placed("long", 0, 0)],
]


def batch(rows, side):
    """Tokens, segment ids and positions of one side; around the sentences, junk at segment 0 and position -1."""
    length = (S, T)[side]
    tokens = np.stack([random_tokens(100 + i, length) for i in range(len(rows))])
    segments, positions = np.zeros_like(tokens), np.full_like(tokens, -1)
    for row, sentences in enumerate(rows):
        for segment, one in enumerate(sentences, start=1):
            columns = (one.source, one.target)[side]
            tokens[row, columns], segments[row, columns] = PAIRS[one.pair][side], segment
            positions[row, columns] = one.shift + np.arange(len(columns))
    return [jnp.asarray(x) for x in (tokens, segments, positions)]


def forward(model, params, source, tokens, **inputs):
    """Logits, hidden states and the attention weights of every layer; called, for that is quicker than to compile."""
    with jax.disable_jit():
        weights = [model.attention_weights(params, source, tokens, layer=layer, **inputs) for layer in range(L)]
        logits, hidden = (f(params, source, tokens, **inputs) for f in (model.apply, model.hidden_states))
    return logits, hidden, {place: np.stack([layer[place] for layer in weights]) for place in weights[0]}


def assert_is_the_oracles(found, row, one, oracle):
    logits, hidden, weights = found
    columns = {"encoder": one.source, "decoder": one.target}
    assert_close(logits[row, one.target], oracle.logits[0])
    for stack, of_stack in columns.items():
        assert_close(hidden[stack][:, row, of_stack], np.concatenate(oracle.hidden[stack]))
    for place, queries, keys in (
        ("encoder", one.source, one.source),
        ("decoder", one.target, one.target),
        ("cross", one.target, one.source),
    ):
        seen = weights[place][:, row][:, :, queries]
        assert_close(seen[..., keys], np.concatenate(oracle.weights[place]))
        np.testing.assert_allclose(seen.sum(axis=-1), 1.0, rtol=1e-6)
        assert (np.delete(seen, keys, axis=-1) == 0).all()


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@every_kind
def test_padded_packed_and_shuffled_sentences_are_those_of_the_oracle(kind, implementation):
    """B33, B40, I03, I10, I18: logits, hidden states, attention weights of all layers, wherever a sentence stands.

    The order of the columns does not matter where positions are given, nor where in a text relative positions begin.
    """
    model, params = prepared(KINDS[kind])
    model = build(replace(model.config, implementation=implementation))
    (source, source_segments, source_positions), (tokens, segments, positions) = (batch(ROWS, side) for side in (0, 1))
    found = forward(
        model,
        params,
        source,
        tokens,
        source_segment_ids=source_segments,
        segment_ids=segments,
        source_positions=source_positions,
        positions=positions,
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    for row, sentences in enumerate(ROWS):
        for one in sentences:
            if one.shift and kind in ABSOLUTE:
                assert np.abs(found[0][row, one.target] - expected(kind, one.pair).logits[0]).max() > 0.1
            else:
                assert_is_the_oracles(found, row, one, expected(kind, one.pair))


@every_kind
def test_positions_left_out_are_a_count_and_matter(kind):
    """I09: without segments and positions too; a source in another order means something else, unless none is told."""
    model, params = prepared(KINDS[kind])
    source, tokens = (np.stack([x] * B) for x in PAIRS["long"])
    source[1] = source[0, shuffled(S)]
    found = forward(model, params, jnp.asarray(source), jnp.asarray(tokens))
    assert_is_the_oracles(found, 0, placed("long", 0, 0), expected(kind, "long"))
    moved = np.abs(found[0][1] - found[0][0]).max()
    assert moved < 2e-5 if kind == "none" else moved > 0.003


# ----------------------------------------------------------------------------------------------------------------------
# Decoding
# ----------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="model")
def decode_step(model, params, tokens, cache, positions):
    return model.decode_step(params, tokens, cache, positions=positions)


@every_kind
def test_decoding_with_a_cache_is_the_full_forward_pass(kind):
    """I07, B13, B15, B33: 19 tokens one by one and seven at a time, at the start and later; shorter rows are padded on
    the left, and the cache has columns that stay empty. T5's bias stands where the query does, and nowhere in
    cross-attention."""
    model, params = prepared(KINDS[kind])
    rows = [[placed("long", 0, 0)], [placed("short", S - 5, T - 8)], [placed("middle", 0, T - 10)]]
    (source, segments, source_positions), (tokens, _, positions) = (batch(rows, side) for side in (0, 1))
    with jax.disable_jit():
        encoded = model.encode(params, source, source_segment_ids=segments, source_positions=source_positions)
        empty = model.init_cache(params, 3, T + 4, encoded=encoded, encoded_segment_ids=segments)
    one = (1,)
    for split in (one * T, (7, 7, *one * 5), (*one * 4, 7, *one, 7), (7, *one * 12)):
        cache, found = empty, []
        for start, count in zip(np.cumsum((0, *split)), split, strict=False):
            columns = slice(start, start + count)
            logits, cache = decode_step(model, params, tokens[:, columns], cache, positions[:, columns])
            found.append(logits)
        found = np.concatenate(found, axis=1)
        for row, (sentence,) in enumerate(rows):
            assert_close(found[row, sentence.target], expected(kind, sentence.pair).logits[0])


# key position - query position, and the bucket that T5's own code gives: 32 buckets, of distances up to 128
BOTH_SIDES = {0: 0, 1: 17, 7: 23, 8: 24, 11: 24, 12: 25, 16: 26, 23: 27, 32: 28, 46: 29, 64: 30, 91: 31, 128: 31}
BOTH_SIDES |= {-distance: bucket - 16 for distance, bucket in BOTH_SIDES.items() if distance}
CAUSAL = {0: 0, -15: 15, -16: 16, -22: 18, -31: 21, -45: 23, -64: 26, -90: 29, -127: 31, -130: 31}
T5 = replace(PLAIN, positions="t5", max_length=131, num_heads=1, vocab_size=5)


def test_t5_has_its_published_buckets_in_every_layer():
    """B15: the encoder's on two sides, the decoder's on one, and none in cross-attention: without queries and keys, the
    logarithm of a weight is the bias."""
    model, params = prepared(T5)
    queries = lambda path: any(name in jax.tree_util.keystr(path) for name in ("query", "key"))  # noqa: E731
    params = jax.tree_util.tree_map_with_path(lambda path, x: 0 * x if queries(path) else x, params)
    for stack in ("encoder", "decoder"):
        params[stack] |= {"position_bias": {"table": jnp.arange(32, dtype=jnp.float32)[:, None] / 8}}
    tokens = jnp.zeros((1, 131), jnp.int32)
    for layer in range(L):
        with jax.disable_jit():
            weights = model.attention_weights(params, tokens, tokens, layer=layer)
        for stack, buckets in (("encoder", BOTH_SIDES), ("decoder", CAUSAL)):
            for distance, bucket in buckets.items():
                query = 0 if distance > 0 else 130
                row = weights[stack][0, 0, query]
                np.testing.assert_allclose(8 * np.log(row[query + distance] / row[query]), bucket, atol=1e-3)
        np.testing.assert_allclose(weights["cross"], 1 / 131, rtol=1e-5)


def test_t5_decodes_beyond_its_largest_distance():
    """I07, B15: 131 tokens of 32 buckets; a bias as if the query stood at position 0 would be that of no distance."""
    model, params = prepared(T5)
    source, tokens = (jnp.asarray(random_tokens(seed, length)[None] % 5) for seed, length in ((1, 7), (2, 131)))
    full = jax.jit(model.apply)(params, source, tokens)
    cache, found = model.init_cache(params, 1, 131, encoded=jax.jit(model.encode)(params, source)), []
    for start, stop in ((0, 64), (64, 65), (65, 129), (129, 130), (130, 131)):
        positions = jnp.arange(start, stop, dtype=jnp.int32)[None]
        logits, cache = decode_step(model, params, tokens[:, start:stop], cache, positions)
        found.append(logits)
    assert_close(jnp.concatenate(found, axis=1), full)
    moved = jax.tree.map(lambda x: x, params)
    moved["decoder"]["position_bias"] = {"table": params["decoder"]["position_bias"]["table"].at[31].add(1.0)}
    changed = np.abs(jax.jit(model.apply)(moved, source, tokens) - full).max(axis=(0, 2))
    assert (changed[:113] == 0).all() and (changed[113:] > 0).all()


@every_kind
def test_too_long_an_input_is_refused(kind):
    """B17: by every kind of positions, on either side, while tracing; the limit itself is accepted."""
    model, _ = prepared(KINDS[kind])
    fits, too_long = (jax.ShapeDtypeStruct((1, length), jnp.int32) for length in (MAX, MAX + 1))
    for source, tokens in ((too_long, fits), (fits, too_long)):
        with pytest.raises(ValueError, match=f"{MAX + 1} tokens.*accepts {MAX}"):
            jax.eval_shape(model.apply, model.shapes, source, tokens)
    assert jax.eval_shape(model.apply, model.shapes, fits, fits).shape == (1, MAX, V)


def test_decoding_beyond_a_learned_table_is_nan():
    """B17: not the last row again; other rows and the padding at position -1 do not suffer."""
    model, params = prepared(KINDS["learned"])
    tokens, source = jnp.asarray(np.stack([random_tokens(1, 7)] * 3)), jnp.asarray(np.stack([PAIRS["long"][0]] * 3))
    positions = jnp.asarray([np.arange(MAX - 6, MAX + 1), np.arange(MAX - 7, MAX), [-1] * 6 + [0]], jnp.int32)
    with jax.disable_jit():
        cache = model.init_cache(params, 3, T + 4, encoded=model.encode(params, source))
    found, _ = decode_step(model, params, tokens, cache, positions)
    assert np.isnan(found[0, 6]).all() and np.isfinite(found[1]).all() and np.isfinite(found[2, 6]).all()


# ----------------------------------------------------------------------------------------------------------------------
# Gradients
# ----------------------------------------------------------------------------------------------------------------------


@every_kind
def test_gradients_are_causal_and_the_same_in_blocks(kind):
    """I06, B10, I11: with dropout of the weights too, both implementations agree in the logits and in the slope of
    every parameter. Each row counts its logits at one position, and all tokens differ, so that the gradient of the
    embedding table holds rows of the Jacobian: exactly 0 after the position, and not 0 before.
    """
    at = np.asarray([0, 1, 2, 4, 7, 11, 15, 18])
    source, tokens = (jnp.asarray(np.arange(B * n).reshape(B, n)[:, shuffled(n)], jnp.int32) for n in (S, T))
    direction = jnp.asarray(np.random.default_rng(1).standard_normal((B, V)), jnp.float32)
    params, setting = prepared(KINDS[kind])[1], replace(KINDS[kind], dropout=Dropout(0.0, 0.0, 0.3, 0.0))

    def loss(params, model):
        logits = model.apply(params, source, tokens, key=jax.random.key(5))
        return jnp.einsum("BV,BV->", logits[np.arange(B), at], direction), logits

    found = {}
    for implementation in ("reference", "blockwise"):
        model = build(replace(setting, implementation=implementation))
        with jax.disable_jit():
            gradient, logits = jax.grad(loss, has_aux=True)(params, model)
        found[implementation] = logits, gradient
        by_token = np.abs(gradient["embedding"]["table"]).max(axis=-1)[np.asarray(tokens)]
        before = np.arange(T) <= at[:, None]
        assert (by_token[~before] == 0).all() and (by_token[before] > 1e-6).all()
        assert (np.abs(gradient["source_embedding"]["table"]).max(axis=-1)[np.asarray(source)] > 1e-6).all()
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            # the bias of the keys adds the same to all scores of a query, unless it is turned
            name, turned = jax.tree_util.keystr(path), model.config.positions == "rope"
            assert np.abs(leaf).max() > 1e-5 or ("key_bias" in name and not (turned and "['attention']" in name)), name
    reference, blockwise = (jax.tree.leaves(x) for x in found.values())
    largest = max(np.abs(x).max() for x in reference)
    for one, other in zip(reference, blockwise, strict=True):
        # what cancels, as for the bias of the keys, keeps the rounding of its terms
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(one).max() + 2e-6 * largest)


# ----------------------------------------------------------------------------------------------------------------------
# Parameters
# ----------------------------------------------------------------------------------------------------------------------


@every_kind
def test_parameters_of_each_kind(kind):
    """B15: one T5 table a stack, whatever its layers; Shaw's tables in each layer of self-attention; else none."""
    config = KINDS[kind]
    norms = 2 * 2 * D if config.norm == "pre" else 0
    more = {"learned": 2 * MAX * D, "t5": 2 * 6 * N, "shaw": 2 * L * (2 * 3 + 1) * (H + E)}.get(kind, 0)
    assert build(config).num_parameters == build(KINDS["none"]).num_parameters + norms + more


def test_tables_have_axes_and_are_born_in_their_shards():
    """B22: T5's over heads, Shaw's whole; the same numbers as on one device, and the same logits."""
    model, mesh = build(replace(KINDS["t5"], vocab_size=24, d_ff=9)), make_mesh(config.Mesh(fsdp=2, model=3))
    shardings = jax.tree.map(lambda x: x.sharding, abstract_params(model, mesh))
    params, alone = (jax.jit(model.init, out_shardings=x)(jax.random.key(0)) for x in (shardings, None))
    for stack in ("encoder", "decoder"):
        assert model.axes[stack]["position_bias"] == {"table": (None, "heads")}
        assert {x.data.shape for x in params[stack]["position_bias"]["table"].addressable_shards} == {(6, 1)}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7), params, alone)
    source, tokens = (jnp.asarray(np.stack([x % 24] * 2)) for x in PAIRS["short"])
    with jax.set_mesh(mesh):
        found = jax.jit(model.apply)(params, source, tokens)
    assert_close(found, jax.jit(model.apply)(alone, source, tokens))

    model = build(replace(KINDS["shaw"], vocab_size=24, d_ff=9))
    tables = {"relative_key": (L, 7, H), "relative_value": (L, 7, E)}
    layers = abstract_params(model, mesh)["decoder"]["layers"]
    assert tables.keys().isdisjoint(layers["cross_attention"])
    for name, shape in tables.items():
        assert model.axes["decoder"]["layers"]["attention"][name] == (None, None, None)
        assert layers["attention"][name].shape == shape and layers["attention"][name].sharding.is_fully_replicated


# ----------------------------------------------------------------------------------------------------------------------
# Configuration
# ----------------------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"positions": "alibi", "rope": Rotary(base=5.0)}, r"model.rope is .*base=5.0.*positions is 'alibi', not 'rope'"),
    ({"positions": "t5", "shaw_distance": 3}, r"model.shaw_distance is 3.*positions is 't5', not 'shaw'"),
    ({"positions": "shaw", "t5_buckets": 8}, r"model.t5_buckets is 8.*positions is 'shaw', not 't5'"),
    ({"t5_max_distance": 9}, r"model.t5_max_distance is 9.*positions is 'sinusoidal', not 't5'"),
    ({"positions": "rope", "d_k": 5}, r"head of size 5 is 5: an even number"),
    ({"positions": "rope", "rope": Rotary(fraction=0.5)}, r"fraction 0.5 of a head of size 6 is 3: an even number"),
    ({"positions": "shaw", "shaw_distance": 0}, r"model.shaw_distance is 0: at least 1"),
    ({"positions": "t5", "t5_buckets": 3}, r"buckets is 3: at least 4 are needed"),
    ({"positions": "t5", "t5_buckets": 32, "t5_max_distance": 8}, r"max_distance is 8, but 8 buckets are single"),
    # enough for the encoder, whose buckets lie on two sides, and too little for the decoder
    ({"positions": "t5", "t5_buckets": 32, "t5_max_distance": 16}, r"max_distance is 16, but 16 buckets are single"),
    ({"implementation": "cudnn"}, r"implementation 'cudnn' cannot train this model: "),
    ({"implementation": "cudnn", "max_length": 30, "d_k": 8, "d_v": 8}, r"implementation 'cudnn' cannot.*float32"),
    ({"implementation": "splash", "dropout": Dropout(attention=0.1)}, r"implementation 'splash' cannot.*dropout"),
    ({"implementation": "splash", "positions": "t5"}, r"implementation 'splash' cannot.*T5Bias"),
    ({"implementation": "splash", "positions": "alibi"}, r"implementation 'splash' cannot.*ALiBi"),
    ({"implementation": "splash", "positions": "shaw"}, r"implementation 'splash' cannot.*ShawBias"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_settings_that_do_not_go_together_are_refused(changes, message):
    """I34: when the configuration is built, with the reason."""
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


def test_splash_is_accepted_where_it_can_train():
    for changes in ({}, {"positions": "learned"}, {"positions": "rope"}, {"positions": "none"}):
        assert build(replace(PLAIN, implementation="splash", **changes)).num_parameters > 0


ROPE = Rotary("interleaved", 500_000.0, 4.1 / 6, "llama3", 8.0, original_length=4096, low_frequency_factor=1.5)


def test_json_gives_the_same_positions_back():
    for positions in (replace(PLAIN, positions="rope", rope=ROPE), *KINDS.values()):
        values = json.loads(config.to_json(positions))
        assert values.pop("family") == "transformer"
        assert config.from_dict(TransformerConfig, values) == positions
    values["rope"] |= {"bass": 5.0}
    with pytest.raises(ValueError, match="config.rope.*bass.*base"):
        config.from_dict(TransformerConfig, values)


def test_the_command_line_sets_every_field_of_rope(capsys):
    default = config.Run(TransformerConfig(V, d_k=6), config.Train(steps=3), "runs/x")
    values = dataclasses.asdict(ROPE)
    arguments = [part for name, x in values.items() for part in (f"--model.rope.{name.replace('_', '-')}", str(x))]
    arguments += ["--model.positions", "rope"]
    parsed = tyro.cli(config.Run[TransformerConfig], default=default, args=arguments)
    assert parsed == replace(default, model=replace(default.model, positions="rope", rope=ROPE))
    with pytest.raises((SystemExit, ValueError)):
        tyro.cli(config.Run[TransformerConfig], default=default, args=["--model.rope.base", "5"])
    assert "model.rope is Rotary(" in capsys.readouterr().err

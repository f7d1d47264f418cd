"""The Transformer against NumPy in float64 written from the paper, and the invariants of a sequence model.

Parameters are random in every leaf, biases and norms included, so nothing is hidden behind a zero or a one.
"""

import functools
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tfm_jax import config
from tfm_jax.models import build
from tfm_jax.models.t5 import t5, t5_v1_1
from tfm_jax.models.transformer import (
    Dropout,
    TransformerConfig,
    transformer_base,
    transformer_big,
    transformer_tiny,
)
from tfm_jax.sharding import make_mesh
from tfm_jax.train.checkpoint import load_params, save_params
from tfm_jax.train.objectives import TextToText
from tfm_jax.train.step import abstract_params, init_state, train_step

V, D, N, H, E, F, MAX = 23, 14, 2, 7, 5, 17, 19
NO_DROPOUT = Dropout(embedding=0.0, residual=0.0)
PLAIN = TransformerConfig(
    V,
    max_length=MAX,
    d_model=D,
    d_ff=F,
    num_heads=N,
    num_encoder_layers=3,
    num_decoder_layers=2,
    d_v=E,
    dropout=NO_DROPOUT,
)
UNTIED = replace(PLAIN, tied_embeddings="none", norm="pre", positions="learned")
POSITIONS = ("sinusoidal", "learned", "none")


def random_params(model, seed=0):
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        values = rng.standard_normal(shape.shape)
        is_scale = jax.tree_util.keystr(path).endswith("['scale']")
        return jnp.asarray(1 + 0.3 * values if is_scale else 0.4 * values, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, model.shapes)


def random_tokens(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


def lengths_to_segments(lengths, width):
    return jnp.asarray(np.arange(width)[None] < np.asarray(lengths)[:, None], jnp.int32)


@functools.partial(jax.jit, static_argnames="model")
def apply(model, params, source, tokens, **inputs):
    return model.apply(params, source, tokens, **inputs)


@functools.partial(jax.jit, static_argnames="model")
def encode(model, params, source, **inputs):
    return model.encode(params, source, **inputs)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def prepared(config):
    model = build(config)
    return model, random_params(model)


def assert_close(found, expected, atol=1e-5):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=atol)


# ----------------------------------------------------------------------------------------------------------------------
# The paper in NumPy. One row at a time is slow and clear; masks are loops over the rule.
# ----------------------------------------------------------------------------------------------------------------------


class Oracle:
    """Everything that a forward pass makes, in float64: logits, hidden states and attention weights of every layer."""

    def __init__(self, config, params, source, tokens, *, source_segments=None, segments=None):
        self.config, self.params = config, jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        source, tokens = np.asarray(source), np.asarray(tokens)
        rows = [
            self._row(
                source[b],
                tokens[b],
                np.ones(source.shape[1], int) if source_segments is None else np.asarray(source_segments[b]),
                np.ones(tokens.shape[1], int) if segments is None else np.asarray(segments[b]),
            )
            for b in range(len(tokens))
        ]
        names = ("encoder", "decoder", "encoder_weights", "decoder_weights", "cross_weights")
        self.logits = np.stack([row["logits"] for row in rows])
        # with the layer first, as Model.hidden_states has it
        self.encoder, self.decoder, self.encoder_weights, self.decoder_weights, self.cross_weights = (
            np.stack([np.stack(row[name]) for row in rows], axis=1) for name in names
        )

    def _row(self, source, tokens, source_segments, segments):
        params, config = self.params, self.config
        own = (source_segments[:, None] == source_segments[None]) & (source_segments[None] > 0)
        cross = (segments[:, None] == source_segments[None]) & (source_segments[None] > 0)
        causal = (segments[:, None] == segments[None]) & (segments[None] > 0) & np.tri(len(tokens), dtype=bool)
        made = {name: [] for name in ("encoder", "decoder", "encoder_weights", "decoder_weights", "cross_weights")}

        x = self._embed(source, params.get("source_embedding", params["embedding"]), "source_position_embedding")
        for layer in self._layers("encoder", config.num_encoder_layers):
            made["encoder"].append(x)
            x = self._sublayer(layer, "attention", x, lambda h, p: self._attend(p, h, h, own, made["encoder_weights"]))
            x = self._sublayer(layer, "feed_forward", x, self._feed_forward)
        encoded = self._last("encoder", x)
        made["encoder"].append(encoded)

        x = self._embed(tokens, params["embedding"], "position_embedding")
        for layer in self._layers("decoder", config.num_decoder_layers):
            made["decoder"].append(x)
            weights = made["decoder_weights"]
            x = self._sublayer(layer, "attention", x, lambda h, p, w=weights: self._attend(p, h, h, causal, w))
            weights = made["cross_weights"]
            x = self._sublayer(
                layer, "cross_attention", x, lambda h, p, w=weights: self._attend(p, h, encoded, cross, w)
            )
            x = self._sublayer(layer, "feed_forward", x, self._feed_forward)
        x = self._last("decoder", x)
        made["decoder"].append(x)
        head = params.get("head", params["embedding"]["table"])
        return made | {"logits": x @ head.T + params.get("head_bias", 0.0)}

    def _layers(self, stack, count):
        return [jax.tree.map(lambda x, i=i: x[i], self.params[stack]["layers"]) for i in range(count)]

    def _embed(self, ids, embedding, position_embedding):
        x = embedding["table"][ids] * math.sqrt(D)
        if self.config.positions == "learned":
            x = x + self.params[position_embedding]["table"][: len(ids)]
        if self.config.positions == "sinusoidal":
            for p, i in itertools.product(range(len(ids)), range(D)):
                x[p, i] += (math.cos if i % 2 else math.sin)(p / 10000 ** (2 * (i // 2) / D))
        return x

    def _sublayer(self, layer, name, x, function):
        norm = functools.partial(self._norm, layer[f"{name}_norm"])
        if self.config.norm == "pre":
            return x + function(norm(x), layer[name])
        return norm(x + function(x, layer[name]))

    def _last(self, stack, x):
        return self._norm(self.params[stack]["norm"], x) if self.config.norm == "pre" else x

    def _norm(self, params, x):
        mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + self.config.norm_eps) * params["scale"] + params["bias"]

    def _feed_forward(self, x, params):
        hidden = x @ params["up"] + params["up_bias"]
        erf = np.vectorize(math.erf)
        cubic = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        hidden = {
            "relu": np.maximum(hidden, 0),
            "gelu": hidden * (1 + erf(hidden / math.sqrt(2))) / 2,
            "gelu_tanh": hidden * (1 + np.tanh(cubic)) / 2,
            "silu": hidden / (1 + np.exp(-hidden)),
        }[self.config.activation]
        return hidden @ params["down"] + params["down_bias"]

    def _attend(self, params, x, y, visible, record):
        output, weights = params.get("output_bias", 0.0), []
        for n in range(N):
            query, key, value = (
                inputs @ params[name][:, n] + params.get(f"{name}_bias", np.zeros(N))[n]
                for name, inputs in (("query", x), ("key", y), ("value", y))
            )
            logits = query @ key.T / math.sqrt(query.shape[-1])
            # a query that may see nothing has no weights and takes nothing
            odds = np.where(visible, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
            weights.append(odds / np.maximum(odds.sum(axis=-1, keepdims=True), 1e-300))
            output = output + weights[-1] @ value @ params["output"][n]
        record.append(np.stack(weights))
        return output


# ----------------------------------------------------------------------------------------------------------------------
# Every combination of switches
# ----------------------------------------------------------------------------------------------------------------------


def combinations():
    """16 of 1,152: an orthogonal array of strength two, so every pair of values of two switches occurs."""
    double, triple = (0, 2, 3, 1), (0, 3, 1, 2)  # multiplication by 2 and 3 in the field of four elements
    for i, j in itertools.product(range(4), repeat=2):
        last = i ^ triple[j]
        yield replace(
            PLAIN,
            activation=("relu", "gelu", "gelu_tanh", "silu")[i],
            tied_embeddings=("all", "target_output", "source_target", "none")[j],
            positions=POSITIONS[(i ^ j) % 3],
            **({"d_k": None, "d_v": None}, {"d_k": E, "d_v": None}, {"d_k": H, "d_v": E})[(i ^ double[j]) % 3],
            norm=("post", "pre")[last & 1],
            attention_bias=bool(last >> 1),
            head_bias=bool((last & 1) ^ (last >> 1)),
        )


COMBINATIONS = list(combinations())
SWITCHES = ("activation", "tied_embeddings", "positions", "norm", "attention_bias", "head_bias", "d_k", "d_v")


def name_of(config):
    return "-".join(str(getattr(config, switch)) for switch in SWITCHES)


def test_the_combinations_hold_every_pair_of_values():
    for one, other in itertools.combinations(SWITCHES[:6], 2):
        values = [{getattr(config, name) for config in COMBINATIONS} for name in (one, other)]
        seen = {(getattr(config, one), getattr(config, other)) for config in COMBINATIONS}
        assert seen == set(itertools.product(*values))
    assert len({(config.d_k, config.d_v, config.norm, config.attention_bias) for config in COMBINATIONS}) == 12


@pytest.mark.parametrize("config", COMBINATIONS, ids=name_of)
def test_forward_pass_is_that_of_the_paper(config):
    """Logits, hidden states and attention weights, with padding on both sides."""
    model, params = prepared(config)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    segments = {
        "source_segment_ids": lengths_to_segments([6, 2, 4], 6),
        "segment_ids": lengths_to_segments([3, 5, 4], 5),
    }
    oracle = Oracle(
        config,
        params,
        source,
        tokens,
        source_segments=segments["source_segment_ids"],
        segments=segments["segment_ids"],
    )
    with jax.disable_jit():  # sixteen models, so calling is cheaper than compiling
        logits = model.apply(params, source, tokens, **segments)
        hidden = model.hidden_states(params, source, tokens, **segments)
        weights = model.attention_weights(params, source, tokens, layer=1, **segments)
        features, (table, bias) = model.features(params, source, tokens, **segments), model.output_layer(params)
    np.testing.assert_array_equal(features, hidden["decoder"][-1])
    assert_close(np.asarray(features) @ np.asarray(table).T + (0 if bias is None else np.asarray(bias)), logits)
    assert (bias is not None) == config.head_bias
    assert logits.dtype == jnp.float32
    assert_close(logits, oracle.logits, atol=2e-5)
    assert_close(hidden["encoder"], oracle.encoder)
    assert_close(hidden["decoder"], oracle.decoder)
    assert_close(weights["encoder"], oracle.encoder_weights[1])
    assert_close(weights["decoder"], oracle.decoder_weights[1])
    assert_close(weights["cross"], oracle.cross_weights[1])


def empty(model, params, source, segments=None):
    """A cache of seven columns over an encoded source."""
    encoded = model.encode(params, source, source_segment_ids=segments)
    return model.init_cache(params, len(source), 7, encoded=encoded, encoded_segment_ids=segments)


def decode(model, params, tokens, cache, split, positions=None):
    """Logits by decoding with a cache, `split` tokens at a time."""
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    found, start = [], 0
    for count in split:
        columns = slice(start, start + count)
        logits, cache = model.decode_step(params, tokens[:, columns], cache, positions=positions[:, columns])
        found.append(logits)
        start += count
    return jnp.concatenate(found, axis=1)


@pytest.mark.parametrize("config", COMBINATIONS, ids=name_of)
def test_decoding_with_a_cache_is_the_full_forward_pass(config):
    """I07: one token at a time and every cut of five tokens in two, with source padding."""
    model, params = prepared(config)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    segments = lengths_to_segments([6, 2, 4], 6)
    oracle = Oracle(config, params, source, tokens, source_segments=segments)
    with jax.disable_jit():
        cache = empty(model, params, source, segments)
        for split in ((1, 1, 1, 1, 1), (1, 4), (2, 3), (3, 2), (4, 1), (5,)):
            assert_close(decode(model, params, tokens, cache, split), oracle.logits, atol=2e-5)


def test_every_way_to_cut_five_tokens_gives_the_same_logits():
    """I07: all 16 splits."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(3, 3, 6), random_tokens(4, 3, 5)
    expected = Oracle(PLAIN, params, source, tokens).logits
    splits = {
        tuple(end - start for start, end in itertools.pairwise((0, *cuts, 5)))
        for size in range(5)
        for cuts in itertools.combinations(range(1, 5), size)
    }
    assert len(splits) == 16
    with jax.disable_jit():
        cache = empty(model, params, source)
        for split in splits:
            assert_close(decode(model, params, tokens, cache, split), expected, atol=2e-5)


@pytest.mark.parametrize("positions", POSITIONS)
def test_left_padded_prompts_decode_like_unpadded_ones(positions):
    """B33: rows of 5, 2 and 4 tokens end in the same column, junk at position -1 before them; then they go on."""
    model, params = prepared(replace(PLAIN, positions=positions))
    source, tokens, lengths = random_tokens(5, 3, 6), random_tokens(6, 3, 7), (5, 2, 4)
    expected = Oracle(model.config, params, source, tokens).logits
    with jax.disable_jit():
        cache = empty(model, params, source)
        for seed, split in ((7, (5, 1, 1)), (8, (2, 3, 2)), (9, (1, 1, 1, 1, 1, 1, 1))):
            columns = np.array(random_tokens(seed, 3, 7))
            where = np.full((3, 7), -1, np.int32)
            for row, length in enumerate(lengths):
                columns[row, 5 - length :] = tokens[row, : length + 2]
                where[row, 5 - length :] = np.arange(length + 2)
            found = decode(model, params, jnp.asarray(columns), cache, split, jnp.asarray(where))
            for row, length in enumerate(lengths):
                assert_close(found[row, 5 - length :], expected[row, : length + 2], atol=2e-5)


def test_a_full_cache_gives_nan():
    """What does not fit is never half written: logits say so."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(3, 3, 6), random_tokens(4, 3, 8)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (3, 8))

    def take(columns, cache):
        return model.decode_step(params, tokens[:, columns], cache, positions=positions[:, columns])

    with jax.disable_jit():
        logits, five = take(slice(0, 5), empty(model, params, source))
        assert np.isfinite(logits).all() and five.length == 5
        assert np.isnan(take(slice(5, 8), five)[0]).all()  # three tokens, two free columns
        logits, seven = take(slice(5, 7), five)
        assert np.isfinite(logits).all()
        assert np.isnan(take(slice(7, 8), seven)[0]).all()


def test_the_cache_keeps_the_projections_of_the_encoder():
    """Its sizes: d_k and d_v per head and layer, int32 positions that start empty, segments of 0 and 1."""
    model, params = prepared(replace(PLAIN, d_k=H))
    encoded, segments = jnp.zeros((3, 6, D)), lengths_to_segments([6, 2, 4], 6)
    with jax.disable_jit():
        cache = model.init_cache(params, 3, 11, encoded=encoded, encoded_segment_ids=4 * segments)
    assert len(cache.layers) == len(cache.cross) == 2
    for own, cross in zip(cache.layers, cache.cross, strict=True):
        assert own.key.shape == (3, N, H, 11) and own.value.shape == (3, N, 11, E)
        assert cross.key.shape == (3, N, H, 6) and cross.value.shape == (3, N, 6, E)
    assert (cache.positions == -1).all() and cache.length == 0
    np.testing.assert_array_equal(cache.cross_segment_ids, segments)


# ----------------------------------------------------------------------------------------------------------------------
# Sizes and tying
# ----------------------------------------------------------------------------------------------------------------------


def base_parameters(vocab, d, f, layers):
    """Tied, post-LN, d_k = d_v = d / heads: 4 d^2 + 4 d an attention, 2 d f + d + f a feed-forward, 2 d a norm."""
    attention, feed_forward, norm = 4 * d * d + 4 * d, 2 * d * f + d + f, 2 * d
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    return vocab * d + layers * (encoder + decoder)


def test_presets_have_the_published_sizes():
    assert build(transformer_tiny()).num_parameters == 2_568_192
    assert build(transformer_base()).num_parameters == base_parameters(37_000, 512, 2048, 6) == 63_082_496
    assert build(transformer_big()).num_parameters == base_parameters(37_000, 1024, 4096, 6) == 214_245_376
    assert build(transformer_tiny(5)).num_parameters == base_parameters(5, 128, 256, 4)


@pytest.mark.parametrize("config", COMBINATIONS, ids=name_of)
def test_parameter_count_is_the_closed_form(config):
    """The head costs nothing where it is tied (B54); head sizes, biases, pre-LN and learned positions count."""
    d_k = D // N if config.d_k is None else config.d_k
    d_v = d_k if config.d_v is None else config.d_v
    biases = 2 * N * d_k + N * d_v + D if config.attention_bias else 0
    attention, feed_forward, norm = 2 * D * N * (d_k + d_v) + biases, 2 * D * F + D + F, 2 * D
    tables = {"all": 1, "target_output": 2, "source_target": 2, "none": 3}[config.tied_embeddings]
    total = tables * V * D + config.head_bias * V
    total += 3 * (attention + feed_forward + 2 * norm) + 2 * (2 * attention + feed_forward + 3 * norm)
    total += 2 * norm * (config.norm == "pre") + 2 * MAX * D * (config.positions == "learned")
    model = build(config)
    assert model.num_parameters == total
    assert set(model.shapes) >= {"embedding", "encoder", "decoder"}


def test_tied_gradient_is_the_sum_of_its_parts_and_stays_tied():
    """B54, I26, I33: one leaf; its slope is that of source, target and output table together, in NumPy's float64."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    assert set(params) == {"embedding", "encoder", "decoder"} and set(params["embedding"]) == {"table"}
    gradient = jax.jit(jax.grad(lambda p: jnp.sin(model.apply(p, source, tokens)).sum()))(params)

    untied = replace(PLAIN, tied_embeddings="none")
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    direction = np.random.default_rng(0).standard_normal((V, D))

    def loss(**moved):
        tables = {name: wide["embedding"]["table"] for name in ("embedding", "source_embedding", "head")} | moved
        tables |= {name: {"table": tables[name]} for name in ("embedding", "source_embedding")}
        return np.sin(Oracle(untied, wide | tables, source, tokens).logits).sum()

    step = 1e-5 * direction
    slopes = [
        (loss(**{name: wide["embedding"]["table"] + step}) - loss(**{name: wide["embedding"]["table"] - step})) / 2e-5
        for name in ("embedding", "source_embedding", "head")
    ]
    found = np.asarray(gradient["embedding"]["table"], np.float64)
    atol = 1e-5 * np.linalg.norm(found) * np.linalg.norm(direction)
    np.testing.assert_allclose((found * direction).sum(), sum(slopes), rtol=0, atol=atol)
    assert min(map(abs, slopes)) > 100 * atol

    updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)
    assert jax.tree.structure(updated) == jax.tree.structure(model.shapes)
    assert_close(apply(model, updated, source, tokens), Oracle(PLAIN, updated, source, tokens).logits, atol=2e-5)


def test_a_tied_matrix_is_one_leaf_through_updates_shards_and_a_checkpoint(tmp_path):
    """B54, I26: over four devices, with donated states (a buffer that stood twice in them would be refused)."""
    # few parameters, for a program over devices takes long to compile
    few = {"norm_kind": "rmsnorm", "attention_bias": False, "feed_forward_bias": False, "positions": "none"}
    model, mesh = build(replace(PLAIN, vocab_size=24, d_ff=18, **few)), make_mesh(config.Mesh(fsdp=2, model=2))
    source, tokens, targets = (random_tokens(seed, 4, length) for seed, length in ((1, 6), (2, 5), (3, 5)))
    batch = {"source_tokens": source, "tokens": tokens, "targets": targets, "weights": jnp.ones(targets.shape)}
    optimizer = config.Optimizer(schedule="constant", learning_rate=0.1, warmup_steps=0)
    with jax.set_mesh(mesh):
        state = init_state(jax.random.key(0), model=model, optimizer=optimizer, mesh=mesh)
        before = np.asarray(state.params["embedding"]["table"])
        for _ in range(2):
            state, _ = train_step(state, batch, optimizer=optimizer, objective=TextToText(model))
    one = {"embedding", "encoder", "decoder"}
    for tree in (state.params, *(optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))):
        assert set(tree) == one and jax.tree.structure(tree) == jax.tree.structure(model.shapes)
    table = state.params["embedding"]["table"]
    assert {shard.data.shape for shard in table.addressable_shards} == {(12, 7)}
    assert (np.abs(table - before).max(axis=-1) > 0.05).all()

    save_params(tmp_path / "params", state.params)
    loaded = load_params(tmp_path / "params", abstract_params(model, make_mesh(config.Mesh())))
    assert set(loaded) == one
    jax.tree.map(np.testing.assert_array_equal, loaded, state.params)
    np.testing.assert_array_equal(model.output_layer(loaded)[0], table)


# ----------------------------------------------------------------------------------------------------------------------
# Padding, batches, packing
# ----------------------------------------------------------------------------------------------------------------------


def place(ids, width, start, seed):
    """A row of `width` random tokens with `ids` at `start`; its segment ids and its positions."""
    row = np.array(random_tokens(seed, width))
    row[start : start + len(ids)] = ids
    inside = (np.arange(width) >= start) & (np.arange(width) < start + len(ids))
    return row, inside.astype(np.int32), np.where(inside, np.arange(width) - start, -1).astype(np.int32)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_padding_does_not_matter(positions):
    """I03, B33: whatever stands before or after the sentence, and however much of it, on either side."""
    model, params = prepared(replace(PLAIN, positions=positions))
    source, tokens = np.array(random_tokens(1, 4)), np.array(random_tokens(2, 3))
    expected = apply(model, params, jnp.asarray(source)[None], jnp.asarray(tokens)[None])
    starts = [(0, 0), (0, 0), (3, 0), (0, 4), (3, 4), (1, 2)]
    sides = [place(source, 7, start, seed) for seed, (start, _) in enumerate(starts)]
    others = [place(tokens, 7, start, seed) for seed, (_, start) in enumerate(starts, start=11)]
    (source_rows, source_segments, source_positions), (rows, segments, where) = (
        map(jnp.asarray, map(np.stack, zip(*x, strict=True))) for x in (sides, others)
    )
    inputs = {"source_segment_ids": source_segments, "segment_ids": segments}
    found = apply(model, params, source_rows, rows, source_positions=source_positions, positions=where, **inputs)
    for row, (_, start) in enumerate(starts):
        assert_close(found[row, start : start + 3], expected[0])


def test_training_gradients_ignore_padding():
    """I03, B01: wherever the sentence stands, whatever stands around it and in a row of nothing but padding."""
    model, params = prepared(UNTIED)
    source, tokens = np.array(random_tokens(1, 4)), np.array(random_tokens(2, 3))

    @jax.jit
    @jax.grad
    def gradient(params, source, tokens, weights, inputs):
        logits = model.apply(params, source, tokens, **inputs)
        return (jnp.cos(logits) * weights[..., None]).sum()

    def placed(source_start, start, seed):
        dead = np.zeros(0, np.int32)
        sides = [[place(ids, 7, source_start, seed + i) for i, ids in enumerate((source, dead))]]
        sides += [[place(ids, 5, start, seed + 2 + i) for i, ids in enumerate((tokens, dead))]]
        (rows, source_segments, source_where), (columns, segments, where) = (
            map(jnp.asarray, map(np.stack, zip(*side, strict=True))) for side in sides
        )
        inputs = {"source_segment_ids": source_segments, "segment_ids": segments}
        inputs |= {"source_positions": source_where, "positions": where}
        return gradient(params, rows, columns, segments.astype(jnp.float32), inputs)

    expected = placed(0, 0, seed=3)
    for found in (placed(0, 0, seed=30), placed(3, 2, seed=40)):
        jax.tree.map(assert_close, found, expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1


def test_rows_do_not_depend_on_their_batch():
    """I02: alone, in any order, beside any other row."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    segments = lengths_to_segments([6, 2, 4], 6)
    whole = apply(model, params, source, tokens, source_segment_ids=segments)
    order = np.array([2, 0, 1])
    shuffled = apply(model, params, source[order], tokens[order], source_segment_ids=segments[order])
    assert_close(shuffled, whole[order])
    for row in range(3):
        one = slice(row, row + 1)
        alone = apply(model, params, source[one], tokens[one], source_segment_ids=segments[one])
        assert_close(alone, whole[one])


@pytest.mark.parametrize("positions", POSITIONS)
def test_packed_sentences_equal_separate_ones(positions):
    """B40, I18: two pairs in one row, positions from 0 in each; cross-attention keeps to its own source."""
    model, params = prepared(replace(PLAIN, positions=positions))
    lengths = {"source": (3, 2), "target": (2, 4)}
    source, tokens = random_tokens(1, 1, 7), random_tokens(2, 1, 7)

    def packed(first, second):
        padding = 7 - first - second
        ids = [1] * first + [2] * second + [0] * padding
        where = [*range(first), *range(second), *[0] * padding]
        return jnp.asarray([ids], jnp.int32), jnp.asarray([where], jnp.int32)

    (source_segments, source_positions), (segments, where) = packed(*lengths["source"]), packed(*lengths["target"])

    def run(source):
        return apply(
            model,
            params,
            source,
            tokens,
            source_segment_ids=source_segments,
            segment_ids=segments,
            source_positions=source_positions,
            positions=where,
        )

    found = run(source)
    # the second pair alone, in a row of the same width
    alone = apply(
        model,
        params,
        jnp.roll(source, -3, axis=1),
        jnp.roll(tokens, -2, axis=1),
        source_segment_ids=lengths_to_segments([2], 7),
        segment_ids=lengths_to_segments([4], 7),
    )
    assert_close(found[:, 2:6], alone[:, :4])
    first = apply(
        model,
        params,
        source,
        tokens,
        source_segment_ids=lengths_to_segments([3], 7),
        segment_ids=lengths_to_segments([2], 7),
    )
    assert_close(found[:, :2], first[:, :2])
    other = run(source.at[:, :3].set((source[:, :3] + 1) % V))
    np.testing.assert_array_equal(other[:, 2:6], found[:, 2:6])
    assert np.abs(other[:, :2] - found[:, :2]).max() > 1e-3


def test_padded_tail_columns_come_back():
    """B06: the output has the input's shape in evaluation, and training with rates of 0 gives the same numbers."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    inputs = {"source_segment_ids": lengths_to_segments([3] * 3, 6), "segment_ids": lengths_to_segments([3] * 3, 5)}
    with jax.disable_jit():
        evaluated = model.apply(params, source, tokens, **inputs)
        trained = model.apply(params, source, tokens, key=jax.random.key(0), **inputs)
        encoded = model.encode(params, source, source_segment_ids=inputs["source_segment_ids"])
    assert evaluated.shape == (3, 5, V) and encoded.shape == (3, 6, D)
    np.testing.assert_array_equal(trained, evaluated)
    assert np.isfinite(evaluated).all()


def test_segments_and_positions_left_out_are_ones_and_a_count():
    model, params = prepared(replace(PLAIN, positions="learned"))
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    ones, count = jnp.ones_like, lambda x: jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape)
    given = {"source_segment_ids": ones(source), "segment_ids": ones(tokens)}
    given |= {"source_positions": count(source), "positions": count(tokens)}
    with jax.disable_jit():
        expected = model.apply(params, source, tokens)
        for names in (list(given), list(given)[:1], list(given)[1:2], list(given)[2:]):
            found = model.apply(params, source, tokens, **{name: given[name] for name in names})
            assert_close(found, expected, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Who depends on whom
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jacobians():
    """d(logits . direction)[b, t] / d(table row of token (c, s)) as B T B S, for target and source embeddings.

    All tokens of the batch differ, so a row of an untied table is an embedding at one place.
    """
    model, params = prepared(UNTIED)
    source = jnp.asarray(np.random.default_rng(1).permutation(V)[:12].reshape(2, 6), jnp.int32)
    tokens = jnp.asarray(np.random.default_rng(2).permutation(V)[:10].reshape(2, 5), jnp.int32)
    segments = {"source_segment_ids": lengths_to_segments([6, 4], 6), "segment_ids": lengths_to_segments([5, 5], 5)}
    direction = jnp.asarray(np.random.default_rng(3).standard_normal(V), jnp.float32)

    def projected(tables):
        moved = params | {name: {"table": table} for name, table in tables.items()}
        return jnp.einsum("BTV,V->BT", model.apply(moved, source, tokens, **segments), direction)

    tables = {name: params[name]["table"] for name in ("embedding", "source_embedding")}
    found = jax.jit(jax.jacrev(projected))(tables)
    size = jax.tree.map(lambda x: np.abs(np.array(x)).max(axis=-1), found)
    return size["embedding"][:, :, np.array(tokens)], size["source_embedding"][:, :, np.array(source)]


def test_no_token_sees_a_later_one(jacobians):
    """I06, B10: exactly 0 above the diagonal, and every earlier token is seen."""
    target, _ = jacobians
    for row, t in itertools.product(range(2), range(5)):
        assert (target[row, t, row, t + 1 :] == 0).all()
        assert (target[row, t, row, : t + 1] > 1e-6).all()


def test_every_token_sees_its_whole_source_and_no_padding(jacobians):
    _, source = jacobians
    assert (source[0, :, 0] > 1e-6).all() and (source[1, :, 1, :4] > 1e-6).all()
    assert (source[1, :, 1, 4:] == 0).all()


def test_rows_are_isolated(jacobians):
    """I05, B10: exactly 0 between rows."""
    for jacobian in jacobians:
        assert (jacobian[0, :, 1] == 0).all() and (jacobian[1, :, 0] == 0).all()


def test_the_prefix_does_not_depend_on_the_suffix():
    """I06: cut off or replaced."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    whole = apply(model, params, source, tokens)
    np.testing.assert_array_equal(apply(model, params, source, tokens.at[:, 2:].set(0))[:, :2], whole[:, :2])
    assert_close(apply(model, params, source, tokens[:, :2]), whole[:, :2])


def test_the_encoder_without_positions_does_not_know_order():
    """I09: permuted input, permuted output; with positions, not."""
    source, order = random_tokens(1, 3, 6), np.array([3, 0, 5, 1, 2, 4])
    for positions, blind in (("none", True), ("sinusoidal", False), ("learned", False)):
        model, params = prepared(replace(PLAIN, positions=positions))
        difference = encode(model, params, source[:, order]) - encode(model, params, source)[:, order]
        assert (np.abs(difference).max() < 1e-5) == blind


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def test_too_long_an_input_is_refused():
    """B17: on either side and in decoding, while tracing; the limit itself is accepted."""
    model, params = prepared(UNTIED)
    fits, too_long = random_tokens(1, 1, MAX), random_tokens(1, 1, MAX + 1)
    message = f"{MAX + 1} tokens.*accepts {MAX}"
    for source, tokens in ((too_long, fits), (fits, too_long)):
        with pytest.raises(ValueError, match=message):
            model.apply(params, source, tokens)
        with pytest.raises(ValueError, match=message):
            apply(model, params, source, tokens)
    with pytest.raises(ValueError, match=message):
        model.encode(params, too_long)
    assert jax.eval_shape(model.apply, params, fits, fits).shape == (1, MAX, V)


def test_a_position_beyond_a_learned_table_is_nan():
    """B17: not the last row of the table again."""
    model, params = prepared(replace(PLAIN, positions="learned"))
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    positions = jnp.broadcast_to(jnp.arange(MAX - 3, MAX + 2, dtype=jnp.int32), (3, 5))
    with jax.disable_jit():
        assert np.isnan(model.apply(params, source, tokens, positions=positions)[:, 3:]).all()
        assert np.isfinite(model.apply(params, source, tokens, positions=positions - 2)).all()


@pytest.mark.parametrize("token", [V, V + 90, -1, -V, -V - 1])
def test_a_token_outside_the_vocabulary_poisons_its_row_alone(token):
    """B17: never silently another token; ids are checked on the host by the data pipeline."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    whole = apply(model, params, source, tokens)
    found = apply(model, params, source, tokens.at[1, 2].set(token))
    assert np.isnan(found[1, 2:]).all()
    found_source = apply(model, params, source.at[1, 2].set(token), tokens)
    assert np.isnan(found_source[1]).all()
    for rows in (found, found_source):
        assert_close(rows[::2], whole[::2])


# ----------------------------------------------------------------------------------------------------------------------
# Inside
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_hidden_states_end_with_the_output_of_the_stack(norm):
    model, params = prepared(replace(PLAIN, norm=norm))
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    with jax.disable_jit():
        hidden = model.hidden_states(params, source, tokens)
        assert set(hidden) == {"encoder", "decoder"}
        assert hidden["encoder"].shape == (4, 3, 6, D) and hidden["decoder"].shape == (3, 3, 5, D)
        np.testing.assert_allclose(hidden["encoder"][-1], model.encode(params, source), rtol=1e-6, atol=1e-6)
        logits = jnp.einsum("BTD,VD->BTV", hidden["decoder"][-1], params["embedding"]["table"])
        assert_close(logits, model.apply(params, source, tokens))


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_weights_are_rows_that_sum_to_one(layer):
    """And to zero for padding; nothing on the future, nothing on padding; those of the layer that was asked for."""
    model, params = prepared(PLAIN)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    segments = {
        "source_segment_ids": lengths_to_segments([6, 2, 4], 6),
        "segment_ids": lengths_to_segments([3, 5, 4], 5),
    }
    with jax.disable_jit():
        weights = model.attention_weights(params, source, tokens, layer=layer, **segments)
    oracle = Oracle(
        PLAIN,
        params,
        source,
        tokens,
        source_segments=segments["source_segment_ids"],
        segments=segments["segment_ids"],
    )
    assert_close(weights["encoder"], oracle.encoder_weights[layer])
    assert {name: w.shape for name, w in weights.items()} == {
        "encoder": (3, N, 6, 6),
        "decoder": (3, N, 5, 5),
        "cross": (3, N, 5, 6),
    }
    alive = {"encoder": segments["source_segment_ids"], "decoder": segments["segment_ids"]}
    for name, queries in (alive | {"cross": segments["segment_ids"]}).items():
        sums = np.broadcast_to(queries[:, None], weights[name].shape[:3])
        np.testing.assert_allclose(weights[name].sum(axis=-1), sums, atol=1e-6)
    assert (np.triu(np.array(weights["decoder"]), 1) == 0).all()
    assert (np.array(weights["cross"])[1, :, :, 2:] == 0).all()


# ----------------------------------------------------------------------------------------------------------------------
# Dropout
# ----------------------------------------------------------------------------------------------------------------------


def test_without_a_key_there_is_no_dropout():
    """B20, I13: all rates 0.5; twice the same, and that of the model with rates of 0."""
    (model, params), never = prepared(replace(PLAIN, dropout=Dropout(0.5, 0.5, 0.5, 0.5))), build(PLAIN)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    once, twice = (apply(model, params, source, tokens) for _ in range(2))
    np.testing.assert_array_equal(once, twice)
    assert_close(once, apply(never, params, source, tokens), atol=1e-6)


def test_a_key_decides_what_is_dropped():
    model, params = prepared(replace(PLAIN, dropout=Dropout(0.5, 0.5, 0.5, 0.5)))
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    run = lambda seed: apply(model, params, source, tokens, key=jax.random.key(seed))  # noqa: E731
    np.testing.assert_array_equal(run(0), run(0))
    assert np.abs(run(0) - run(1)).max() > 0.1


@pytest.mark.parametrize("site", ["embedding", "residual", "attention", "feed_forward"])
def test_every_site_has_its_rate(site):
    """Each rate acts alone, in the encoder and in the decoder."""
    model, params = prepared(replace(PLAIN, dropout=replace(NO_DROPOUT, **{site: 0.5})))
    source, tokens, key = random_tokens(1, 3, 6), random_tokens(2, 3, 5), jax.random.key(0)
    with jax.disable_jit():
        assert np.abs(model.encode(params, source, key=key) - model.encode(params, source)).max() > 1e-2
        encoded, decoder = model.encode(params, source), model.bind(params).decoder
        x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, D)), jnp.float32)
        moved = np.abs(decoder(x, encoded, key=key) - decoder(x, encoded)).max()
        assert (moved > 1e-2) == (site != "embedding")  # the embedding's is outside the stack
        assert np.abs(model.apply(params, source, tokens, key=key) - model.apply(params, source, tokens)).max() > 1e-2


# ----------------------------------------------------------------------------------------------------------------------
# Compilation and dtypes
# ----------------------------------------------------------------------------------------------------------------------


def test_compiled_equals_eager():
    """I01."""
    model, params = prepared(UNTIED)
    source, tokens = random_tokens(1, 3, 6), random_tokens(2, 3, 5)
    compiled = apply(model, params, source, tokens)
    with jax.disable_jit():
        op_by_op = model.apply(params, source, tokens)
    np.testing.assert_allclose(compiled, op_by_op, rtol=2e-6, atol=2e-6)


def test_equal_models_compile_once():
    """B55: a model built anew from an equal configuration is the same static argument."""
    traces = []

    @functools.partial(jax.jit, static_argnames="model")
    def size(model, params):
        traces.append(model)
        return sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(params))

    _, params = prepared(PLAIN)
    for _ in range(3):
        size(build(replace(PLAIN)), params)
    assert len(traces) == 1
    size(build(replace(PLAIN, norm="pre")), params)
    assert len(traces) == 2


def test_dtypes_stay_under_x64():
    """B56: float32 parameters, logits and cache, int32 positions, and the same numbers."""
    config = replace(PLAIN, norm="pre", max_length=17)  # a model that nothing has traced yet
    model = build(config)
    with jax.enable_x64(True):
        assert {x.dtype.name for x in jax.tree.leaves(model.shapes)} == {"float32"}
        born = jax.eval_shape(model.init, jax.random.key(0))
        assert {x.dtype.name for x in jax.tree.leaves(born)} == {"float32"}
        params, source, tokens = random_params(model), random_tokens(1, 3, 6), random_tokens(2, 3, 5)
        logits = apply(model, params, source, tokens, key=jax.random.key(0))
        assert logits.dtype == jnp.float32
        encoded = jax.eval_shape(model.encode, params, source)
        cache = jax.eval_shape(functools.partial(model.init_cache, batch=3, length=5), params, encoded=encoded)
        positions = jax.ShapeDtypeStruct((3, 2), jnp.int32)
        found, cache = jax.eval_shape(model.decode_step, params, tokens[:, :2], cache, positions=positions)
        assert found.dtype == jnp.float32
        assert {x.dtype.name for x in jax.tree.leaves(cache)} == {"float32", "int32"}
    assert_close(logits, apply(model, params, source, tokens, key=jax.random.key(0)))


def test_a_layer_that_only_one_stack_has_is_read_there():
    model, params = prepared(PLAIN)  # 3 + 2 layers
    source, tokens = random_tokens(1, 2, 5), random_tokens(2, 2, 7)
    read = functools.partial(model.attention_weights, params, source, tokens)
    assert set(read(layer=1)) == {"encoder", "decoder", "cross"} and set(read(layer=2)) == {"encoder"}
    for layer in (3, -1):
        with pytest.raises(ValueError, match=f"layer is {layer}: the model has layers 0 to 2"):
            read(layer=layer)


@pytest.mark.parametrize("make", [t5, t5_v1_1])
def test_a_fresh_t5_reads_and_writes_with_a_variance_of_about_one(make):
    """Its embeddings are read as they are, and what its output layer reads is divided, if that shares the table."""
    model = build(make(97, num_layers=1, d_model=64, d_ff=96, num_heads=4, d_k=16, max_length=9))
    params = model.init(jax.random.key(0))
    assert params["embedding"]["table"].std() == pytest.approx(1.0, rel=0.05)
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 97, jnp.int32)
    assert 0.5 < model.apply(params, tokens, tokens).std() < 2.0

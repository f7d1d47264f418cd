"""The oracle against what is more certain still: closed forms, one pair at a time, published numbers, differences."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tfm_jax import oracle

B, T, S, N, K, H, E = 2, 5, 7, 6, 3, 11, 13
SCALE = 0.4
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


X = {"query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, E)}
COTANGENT = normal(B, T, N, E)
# rows of a batch differ in their positions, which are far apart and in no order, as packed and padded ones may be
AT = {
    "query_positions": np.array([[3, 0, 90, 9, 4], [150, 7, 8, 2, 1]]),
    "key_positions": np.array([[0, 1, 2, 30, 4, 5, 130], [6, 5, 4, 3, 2, 1, 0]]),
}
AT_ALL = {"query_positions": np.arange(T)[None] + 1, "key_positions": np.arange(S)[None]}
MASK = RNG.random((B, N, T, S)) < 0.6
MASK[1, :, 3] = False
MASK[0, :2, 0] = False
DROPOUT = {"dropout_rate": 0.3, "keep": RNG.random((B, N, T, S)) < 0.7}
HIDING = normal(B, 1, T, S)
HIDING[RNG.random(HIDING.shape) < 0.3] = -np.inf
HIDING[0, 0, 2] = -np.inf


def bent(score, query, key, head, slope, offset):
    """A user's function of everything, with every second key after the query hidden."""
    bias = slope * np.sin(score) + (head + 1) * offset**2 * np.cos(query - key)
    return np.where((key > query) & (key % 2 == 1), -np.inf, score + bias)


def bent_derivatives(score, query, key, head, slope, offset):
    by_offset = 2 * offset * (head + 1) * np.cos(query - key)
    return 1 + slope * np.cos(score), [np.sin(score), by_offset]


DENSE = oracle.DenseBias(normal(B, N, T, S))
ALIBI = oracle.ALiBi(normal(N), **AT)
T5 = oracle.T5Bias(normal(32, N), **AT)
SHAW = oracle.ShawBias(normal(9, H), normal(5, E), **AT)
FUNCTION = oracle.ScoreFunction(bent, bent_derivatives, **AT, params=(0.7, normal(N, 1, 1)))
BIASES = {
    "none": (),
    "dense": DENSE,
    "dense broadcast": (
        oracle.DenseBias(normal(N, 1, S)),
        oracle.DenseBias(normal(B, 1, T, 1)),
        oracle.DenseBias(np.array(0.3)),
    ),
    "dense hiding": oracle.DenseBias(HIDING),
    "alibi": ALIBI,
    "t5": T5,
    "t5 causal": oracle.T5Bias(normal(7, N), **AT, bidirectional=False, max_distance=50),
    "t5 one row of positions": oracle.T5Bias(normal(8, N), **AT_ALL),
    "shaw": SHAW,
    "shaw keys": replace(SHAW, value_table=None),
    "shaw values": oracle.ShawBias(None, normal(3, E), **AT_ALL),
    "cap": oracle.SoftCap(0.8),
    "function": FUNCTION,
    "all": (T5, oracle.SoftCap(1.5), FUNCTION, SHAW, ALIBI, oracle.DenseBias(HIDING), oracle.SoftCap(2.5)),
}
SETTINGS = {
    "plain": {},
    "masked and dropped": {"mask": MASK, "scale": SCALE, **DROPOUT},
}


def as_tuple(bias):
    return bias if isinstance(bias, tuple) else (bias,)


def variations(bias, gradients):
    """(name, array, its gradient, the arguments of attention as a function of the array) of all that has a gradient."""
    for name, x in X.items():
        yield name, x, getattr(gradients, name), lambda x, name=name: X | {name: x, "bias": bias}
    for i, (one, fields) in enumerate(zip(as_tuple(bias), gradients.bias, strict=True)):

        def varied(i=i, one=one, **fields):
            return X | {"bias": (*as_tuple(bias)[:i], replace(one, **fields), *as_tuple(bias)[i + 1 :])}

        for name, gradient in fields.items():
            if name != "params":
                yield name, getattr(one, name), gradient, lambda x, name=name, varied=varied: varied(**{name: x})
                continue
            assert len(gradient) == len(one.params)
            for j, x in enumerate(one.params):

                def with_param(x, j=j, one=one, varied=varied):
                    return varied(params=(*one.params[:j], x, *one.params[j + 1 :]))

                yield f"params[{j}]", x, gradient[j], with_param


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_every_gradient_is_the_difference_of_the_forward_pass(bias, settings):
    """I33, I11: of each argument and each bias; grouped heads; with the mask, rows that see nothing, and dropout."""
    gradients = oracle.attention_gradients(**X, gradient=COTANGENT, bias=bias, **settings)
    rng, step = np.random.default_rng(1), 1e-5
    for name, x, gradient, arguments in variations(bias, gradients):
        assert np.shape(gradient) == np.shape(x)
        assert np.isfinite(gradient).all()
        for _ in range(5):
            direction = rng.standard_normal(np.shape(x))
            ahead, behind = (
                (oracle.dot_product_attention(**arguments(x + side * direction), **settings) * COTANGENT).sum()
                for side in (step, -step)
            )
            error = abs((ahead - behind) / (2 * step) - (gradient * direction).sum())
            assert error <= 1e-6 * np.linalg.norm(gradient) * np.linalg.norm(direction) + 1e-9, name


def test_the_biases_that_have_parameters_have_their_gradients():
    fields = {name: [set(one) for one in _gradients(bias).bias] for name, bias in BIASES.items()}
    assert fields["dense"] == [{"array"}]
    assert fields["alibi"] == [{"slopes"}]
    assert fields["t5"] == [{"table"}]
    assert fields["shaw"] == [{"key_table", "value_table"}]
    assert (fields["shaw keys"], fields["shaw values"]) == ([{"key_table"}], [{"value_table"}])
    assert fields["cap"] == [set()]
    assert fields["function"] == [{"params"}]
    assert _gradients(None).bias == ()


def _gradients(bias, **settings):
    return oracle.attention_gradients(**X, gradient=COTANGENT, bias=bias, **settings)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_weights_sum_to_one_or_to_zero(bias, settings):
    settings = {name: x for name, x in settings.items() if name in ("mask", "scale")}
    weights = oracle.attention_weights(X["query"], X["key"], bias=bias, **settings)
    assert weights.shape == (B, N, T, S)
    assert (weights >= 0).all()
    total = weights.sum(axis=3)
    np.testing.assert_allclose(total, np.where(weights.any(axis=3), 1.0, 0.0), rtol=1e-14)
    if "mask" in settings:
        assert (total[1, :, 3] == 0).all() and (weights[~MASK] == 0).all()


def test_a_closed_form():
    """Scores 0 and log 3: weights 1/4 and 3/4."""
    query, key = np.array([2.0, 0.0]).reshape(1, 1, 1, 2), np.array([[0.0, 5.0], [math.log(3) / 2, 7.0]])[None, :, None]
    value = np.array([[8.0, 0.0, 4.0], [0.0, 4.0, 4.0]])[None, :, None]
    np.testing.assert_allclose(oracle.attention_weights(query, key, scale=1.0)[0, 0, 0], [0.25, 0.75], rtol=1e-15)
    output = oracle.dot_product_attention(query, key, value, scale=1.0)
    np.testing.assert_allclose(output[0, 0, 0], [2.0, 3.0, 4.0], rtol=1e-15)
    # the scale is 1 / sqrt(d_k) unless given: query and key together grow by sqrt(2)
    np.testing.assert_allclose(oracle.dot_product_attention(query, key * math.sqrt(2), value), output, rtol=1e-15)
    # one of two dropped, the other divided by 1 - rate
    dropped = oracle.dot_product_attention(
        query, key, value, scale=1.0, dropout_rate=0.5, keep=np.array([True, False]).reshape(1, 1, 1, 2)
    )
    np.testing.assert_allclose(dropped[0, 0, 0], [4.0, 0.0, 2.0], rtol=1e-15)


def steps(b, t, s):
    return int(AT["key_positions"][b, s]) - int(AT["query_positions"][b, t])


def shaw_row(table, b, t, s):
    reach = len(table) // 2
    return table[max(-reach, min(reach, steps(b, t, s))) + reach]


PAIRS = {
    "dense": lambda score, b, n, t, s: score + DENSE.array[b, n, t, s],
    "dense hiding": lambda score, b, n, t, s: score + HIDING[b, 0, t, s],
    "alibi": lambda score, b, n, t, s: score - ALIBI.slopes[n] * abs(steps(b, t, s)),
    "t5": lambda score, b, n, t, s: score + T5.table[oracle.relative_position_bucket(steps(b, t, s), True, 32, 128), n],
    "shaw": lambda score, b, n, t, s: score + X["query"][b, t, n] @ shaw_row(SHAW.key_table, b, t, s) * SCALE,
    "cap": lambda score, b, n, t, s: 0.8 * math.tanh(score / 0.8),
    "function": lambda score, b, n, t, s: float(
        bent(score, AT["query_positions"][b, t], AT["key_positions"][b, s], n, 0.7, FUNCTION.params[1][n, 0, 0])
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_bias_is_its_equation_pair_by_pair(name):
    weights = np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        scores = {}
        for s in np.flatnonzero(MASK[b, n, t]):
            score = PAIRS[name](X["query"][b, t, n] @ X["key"][b, s, n // 2] * SCALE, b, n, t, s)
            scores |= {s: score} if score > -math.inf else {}
        for s, score in scores.items():
            weights[b, n, t, s] = math.exp(score) / sum(map(math.exp, scores.values()))
    settings = {"bias": BIASES[name], "mask": MASK, "scale": SCALE}
    np.testing.assert_allclose(oracle.attention_weights(X["query"], X["key"], **settings), weights, rtol=1e-12)

    kept = np.where(DROPOUT["keep"], weights / 0.7, 0)
    output = np.zeros((B, T, N, E))
    for b, n, t, s in np.ndindex(B, N, T, S):
        relative = shaw_row(SHAW.value_table, b, t, s) if name == "shaw" else 0.0
        output[b, t, n] += kept[b, n, t, s] * (X["value"][b, s, n // 2] + relative)
    np.testing.assert_allclose(oracle.dot_product_attention(**X, **settings, **DROPOUT), output, rtol=1e-12, atol=1e-14)


def test_biases_apply_in_order_and_arrays_are_biases():
    cap = oracle.SoftCap(0.8)
    first, last = (oracle.attention_weights(X["query"], X["key"], bias=b) for b in ((DENSE, cap), [cap, DENSE.array]))
    assert np.abs(first - last).max() > 0.01
    np.testing.assert_array_equal(last, oracle.attention_weights(X["query"], X["key"], bias=((cap,), DENSE)))
    np.testing.assert_array_equal(_gradients(DENSE.array).bias[0]["array"], _gradients(DENSE).bias[0]["array"])
    # what a bias hides stays hidden, whatever a later one makes of -inf
    weights = oracle.attention_weights(X["query"], X["key"], bias=(HIDING, cap))
    assert (weights[np.broadcast_to(np.isneginf(HIDING), weights.shape)] == 0).all()


def test_key_heads_are_shared_in_a_row():
    """Query heads 0 and 1 use key head 0, 2 and 3 the next; gradients add up."""
    repeated = X | {name: np.repeat(X[name], N // K, axis=2) for name in ("key", "value")}
    settings = {"bias": BIASES["all"], "mask": MASK, **DROPOUT}
    expected = oracle.dot_product_attention(**repeated, **settings)
    np.testing.assert_allclose(oracle.dot_product_attention(**X, **settings), expected, rtol=1e-13)
    shared = _gradients(BIASES["all"], mask=MASK, **DROPOUT)
    separate = oracle.attention_gradients(**repeated, gradient=COTANGENT, **settings)
    np.testing.assert_allclose(shared.query, separate.query, rtol=1e-11, atol=1e-14)
    for name in ("key", "value"):
        total = getattr(separate, name).reshape(B, S, K, N // K, -1).sum(axis=3)
        np.testing.assert_allclose(getattr(shared, name), total, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient(bias):
    """B01, B05."""
    mask = MASK & (np.arange(T) != 2)[:, None]
    assert not oracle.dot_product_attention(**X, mask=mask, bias=bias)[:, 2].any()
    dead = np.zeros_like(COTANGENT)
    dead[:, 2] = 7.0
    gradients = oracle.attention_gradients(**X, gradient=dead, mask=mask, bias=bias)
    parts = [part for fields in gradients.bias for part in fields.values()]
    for gradient in [*gradients[:3], *(x for part in parts for x in (part if isinstance(part, tuple) else (part,)))]:
        assert not np.any(gradient)
    assert not _gradients(bias, mask=mask).query[:, 2].any()


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_what_is_hidden_never_matters(bias):
    """B01: NaN in keys and values that nobody sees, in queries that see nothing and in what they get as gradient."""
    mask = MASK.copy()
    mask[0, :, :, 4] = mask[:, :, :, 6] = mask[1, :, 3] = False
    filled = {name: x.copy() for name, x in X.items()}
    cotangent = COTANGENT.copy()
    for x in (filled["key"], filled["value"]):
        x[0, 4] = x[:, 6] = np.nan
    filled["query"][1, 3] = cotangent[1, 3] = np.nan
    settings = {"mask": mask, "bias": bias, **DROPOUT}
    expected = oracle.dot_product_attention(**X, **settings)
    np.testing.assert_array_equal(oracle.dot_product_attention(**filled, **settings), expected)
    expected = oracle.attention_gradients(**X, gradient=COTANGENT, **settings)
    found = oracle.attention_gradients(**filled, gradient=cotangent, **settings)
    np.testing.assert_equal(found._asdict(), expected._asdict())


def test_nan_in_a_pair_that_is_hidden_reaches_nobody():
    """Not only slots that nobody sees: a later key, or the bias of a hidden pair, is nothing to this query."""
    mask = oracle.causal_mask([range(T)], [range(S)])
    filled = {name: x.copy() for name, x in X.items()}
    filled["key"][:, 4] = filled["value"][:, 4] = np.nan
    bias = DENSE.array.copy()
    bias[np.broadcast_to(~mask, bias.shape)] = np.nan
    first, last = slice(0, 4), slice(4, 5)
    expected = oracle.dot_product_attention(**X, mask=mask, bias=(DENSE, T5))
    found = oracle.dot_product_attention(**filled, mask=mask, bias=(bias, T5))
    np.testing.assert_array_equal(found[:, first], expected[:, first])
    assert np.isnan(found[:, last]).all()
    expected = _gradients((DENSE, T5), mask=mask)
    found = oracle.attention_gradients(**filled, gradient=COTANGENT, mask=mask, bias=(bias, T5))
    np.testing.assert_array_equal(found.query[:, first], expected.query[:, first])
    np.testing.assert_array_equal(found.bias[0]["array"][:, :, first], expected.bias[0]["array"][:, :, first])


def test_nan_in_a_hidden_pair_of_a_parameter_reaches_no_gradient():
    """A derivative there is NaN, and so is its product with the zero that is the gradient of a hidden score."""

    def times(score, query, key, head, factor, offset):
        return score * factor + offset

    def derivatives(score, query, key, head, factor, offset):
        return factor, [score, factor / factor]

    factor = normal(B, N, T, S)
    one, same = (
        oracle.ScoreFunction(times, derivatives, **AT, params=(x, 0.3))
        for x in (factor, np.where(MASK, factor, np.nan))
    )
    expected, found = _gradients((T5, one), mask=MASK), _gradients((T5, same), mask=MASK)
    np.testing.assert_equal(found._asdict(), expected._asdict())


def drawn(*rows):
    """x where a query (a row) sees a key."""
    return np.array([[mark == "x" for mark in row] for row in rows])


def test_masks_say_who_sees_whom():
    """Positions count, not indices; a key at a negative position is never seen; B08, B40."""
    queries, keys = [[1, 2, 4]], [[-1, 0, 1, 2, 3, 4]]
    at = {"query_positions": queries, "key_positions": keys}
    causal = oracle.causal_mask(**at)
    assert causal.shape == (1, 1, 3, 6)
    np.testing.assert_array_equal(causal[0, 0], drawn(".xx...", ".xxx..", ".xxxxx"))
    np.testing.assert_array_equal(oracle.window_mask(**at, window=(1, 0))[0, 0], drawn(".xx...", "..xx..", "....xx"))
    np.testing.assert_array_equal(oracle.window_mask(**at, window=(2, 1))[0, 0], drawn(".xxx..", ".xxxx.", "...xxx"))
    np.testing.assert_array_equal(oracle.window_mask(**at, window=(None, 1))[0, 0], drawn(".xxx..", ".xxxx.", ".xxxxx"))
    np.testing.assert_array_equal(oracle.window_mask(**at, window=(0, None))[0, 0], drawn("..xxxx", "...xxx", ".....x"))
    one_sided = oracle.window_mask(**at, window=(0, 0), query_global=[[False, True, False]])
    np.testing.assert_array_equal(one_sided[0, 0], drawn("..x...", ".xxxxx", ".....x"))
    both = oracle.window_mask(
        **at, window=(0, 0), query_global=[[False, True, False]], key_global=[[True, True, False, False, False, False]]
    )
    np.testing.assert_array_equal(both[0, 0], drawn(".xx...", ".xxxxx", ".x...x"))
    prefix = oracle.prefix_mask(**at, prefix_lengths=[0, 3])
    assert prefix.shape == (2, 1, 3, 6)
    np.testing.assert_array_equal(prefix[0, 0], causal[0, 0])
    np.testing.assert_array_equal(prefix[1, 0], drawn(".xxx..", ".xxx..", ".xxxxx"))
    padding = oracle.padding_mask([[1, 2, 0]], [[1, 1, 2, 0], [0, 2, 2, 1]])
    np.testing.assert_array_equal(padding[0, 0], drawn("xx..", "..x.", "...."))
    np.testing.assert_array_equal(padding[1, 0], drawn("...x", ".xx.", "...."))


def test_a_function_is_asked_of_every_pair_and_head():
    calls = []

    def function(query, key, query_segment, key_segment, head):
        assert all(np.ndim(x) == 0 for x in (query, key, query_segment, key_segment, head))
        calls.append((query, key, query_segment, key_segment, head))
        return ~(key > query) & (key % 2 == head)

    queries, keys = [[1, 2]], [[-1, 0, 1]]
    mask = oracle.function_mask(function, queries, keys, None, None, 2)
    assert mask.shape == (1, 2, 2, 3)
    np.testing.assert_array_equal(mask[0], [drawn(".x.", ".x."), drawn("..x", "..x")])
    assert {call[2:4] for call in calls} == {(1, 1)}
    mask = oracle.function_mask(function, queries, keys, [[1, 2], [2, 2]], [[1, 1, 2]], 2)
    assert mask.shape == (2, 2, 2, 3)
    np.testing.assert_array_equal(mask[0], [drawn(".x.", "..."), drawn("...", "..x")])
    assert (2, -1, 2, 1, 1) in calls


# Distance key after query -> bucket of 32, the largest distance 128.
AFTER = {0: 0, 1: 17, 7: 23, 8: 24, 11: 24, 12: 25, 16: 26, 23: 27, 32: 28, 46: 29, 64: 30, 91: 31, 128: 31, 1000: 31}
CAUSAL = {0: 0, 15: 15, 16: 16, 22: 18, 31: 21, 45: 23, 64: 26, 90: 29, 127: 31, 1000: 31}


def test_golden_buckets_of_t5():
    """B15: those of the published model, encoder and decoder."""
    for distance, bucket in AFTER.items():
        assert oracle.relative_position_bucket(distance, True, 32, 128) == bucket
        assert oracle.relative_position_bucket(-distance, True, 32, 128) == (bucket - 16 if distance else 0)
    for distance, bucket in CAUSAL.items():
        assert oracle.relative_position_bucket(-distance, False, 32, 128) == bucket
        assert oracle.relative_position_bucket(distance, False, 32, 128) == 0


def test_single_and_double_logarithms_agree_on_buckets():
    """B15: for all distances below 300, so that checkpoints made in float32 mean the same."""
    for bidirectional, exact in ((True, 8), (False, 16)):
        for distance in range(exact, 300):
            growth = np.log(np.float32(distance) / np.float32(exact)) / np.float32(math.log(128 / exact))
            single = min(exact + int(growth * np.float32(exact)), 2 * exact - 1)
            assert oracle.relative_position_bucket(-distance, bidirectional, 32, 128) == single


def test_published_slopes_of_alibi():
    """Press et al. (2022), section 3, and their code for heads that are no power of two."""
    assert oracle.alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(oracle.alibi_slopes(12), oracle.alibi_slopes(8) + between, rtol=1e-14)
    np.testing.assert_allclose(oracle.alibi_slopes(3), [1 / 16, 1 / 256, 1 / 4], rtol=1e-14)
    assert oracle.alibi_slopes(1) == [1 / 256]


def test_masks_and_biases_are_not_confused():
    with pytest.raises(ValueError, match="mask has dtype float64: a boolean array is expected"):
        oracle.attention_weights(X["query"], X["key"], mask=np.zeros((T, S)))
    with pytest.raises(ValueError, match="bias is boolean"):
        oracle.attention_weights(X["query"], X["key"], bias=MASK)

"""Cross entropy and accuracy against NumPy in float64, and what sums and weights must not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from tfm_jax import config
from tfm_jax.sharding import batch_sharding, make_mesh
from tfm_jax.train import losses

B, T, V = 3, 5, 7
jitted = jax.jit(losses.cross_entropy, static_argnames=("label_smoothing", "z_loss"))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def cross_entropy(*case, **options):
    return losses.cross_entropy(*map(jnp.asarray, case), **options)


def accuracy(*case):
    return losses.accuracy(*map(jnp.asarray, case))


def random_case(seed=0, *, rows=B, spread=3.0):
    """Logits, targets and weights in 0 and 1."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((rows, T, V))).astype(np.float32)
    targets = rng.integers(0, V, (rows, T)).astype(np.int32)
    weights = (rng.random((rows, T)) < 0.7).astype(np.float32)
    return logits, targets, weights


def token_losses(logits, targets, smoothing):
    """-sum_v q_v log p_v of every position, written out."""
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    q = np.full(logits.shape, smoothing / logits.shape[-1])
    np.put_along_axis(q, targets[..., None], 1 - smoothing + smoothing / logits.shape[-1], axis=-1)
    np.testing.assert_allclose(q.sum(axis=-1), 1.0)
    return -(q * log_p).sum(axis=-1)


def log_totals(logits):
    """log sum_v exp logit_v of every position."""
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1)
    return top + np.log(np.exp(logits - top[..., None]).sum(axis=-1))


def naive(logits, targets, weights, smoothing, z_loss=0.0):
    """The same for automatic differentiation."""
    q = jax.nn.one_hot(targets, V) * (1 - smoothing) + smoothing / V
    drift = z_loss * jnp.log(jnp.exp(logits).sum(axis=-1)) ** 2
    return -(q * jax.nn.log_softmax(logits) * weights[..., None]).sum() + (drift * weights).sum()


@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_cross_entropy_is_that_of_numpy(smoothing, z_loss):
    """With fractional weights, as a user may give them; z_loss times the square of log sum exp."""
    logits, targets, weights = random_case()
    weights = weights * np.linspace(0.3, 1.9, B * T, dtype=np.float32).reshape(B, T)
    total, weight = cross_entropy(logits, targets, weights, label_smoothing=smoothing, z_loss=z_loss)
    assert total.dtype == weight.dtype == jnp.float32 and total.shape == weight.shape == ()
    expected = token_losses(logits, targets, smoothing) + z_loss * log_totals(logits) ** 2
    np.testing.assert_allclose(total, (expected * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-6)


def test_no_smoothing_is_plain_cross_entropy():
    """B26: equal to -log p of the target, and no log(0) where another class is impossible."""
    logits, targets, weights = random_case(1)
    logits[0, 0, (targets[0, 0] + 1) % V] = -np.inf
    plain = -np.take_along_axis(np.array(jax.nn.log_softmax(jnp.asarray(logits))), targets[..., None], axis=-1)[..., 0]
    total, _ = cross_entropy(logits, targets, np.ones_like(weights))
    np.testing.assert_allclose(total, plain.sum(), rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: cross_entropy(x, targets, np.ones_like(weights))[0])(logits)).all()


def test_smoothing_has_the_constants_of_the_published_rule():
    """B26: eps spread over all V entries; an ignored row changes neither sum nor weight."""
    p = np.array([0.1, 0.2, 0.4, 0.2, 0.1])
    logits, target = np.log(p).astype(np.float32)[None, None], np.full((1, 1), 2, np.int32)
    one = np.ones((1, 1), np.float32)
    np.testing.assert_allclose(cross_entropy(logits, target, one, label_smoothing=0.1)[0], 0.999468, atol=1e-6)
    # the least loss there is, where p is the smoothed target itself
    q = np.array([0.02, 0.02, 0.92, 0.02, 0.02])
    least = cross_entropy(np.log(q).astype(np.float32)[None, None], target, one, label_smoothing=0.1)[0]
    np.testing.assert_allclose(least, 0.389673, atol=1e-6)
    rows = np.concatenate([logits, 5 * logits]), np.concatenate([target, target]), np.array([[1.0], [0.0]], np.float32)
    both = cross_entropy(*rows, label_smoothing=0.1)
    np.testing.assert_allclose(both, (0.999468, 1.0), atol=1e-6)


@given(seed=st.integers(0, 2**31), smoothing=st.sampled_from([0.0, 0.1]))
def test_ignored_tokens_and_the_cut_into_rows_do_not_matter(seed, smoothing):
    """I17, B26: tokens without weight, rows without weight, other targets there, rows split in two."""
    logits, targets, weights = random_case(seed)
    expected = jitted(logits, targets, weights, label_smoothing=smoothing)
    elsewhere = np.where(weights > 0, targets, (targets + 3) % V).astype(np.int32)
    other = np.where(weights[..., None] > 0, logits, -9 * logits)
    more = [np.concatenate([x, y]) for x, y in ((other, logits), (elsewhere, targets), (weights, 0 * weights))]
    np.testing.assert_allclose(jitted(*more, label_smoothing=smoothing), expected, rtol=2e-6, atol=1e-6)
    halves = [[x[:, cut] for x in (logits, targets, weights)] for cut in (slice(0, 2), slice(2, None))]
    parts = [jitted(*half, label_smoothing=smoothing) for half in halves]
    np.testing.assert_allclose(np.sum(parts, axis=0), expected, rtol=2e-6, atol=1e-6)


def test_uniform_logits_cost_log_v():
    """I17: whatever the smoothing."""
    case = np.full((B, T, V), 2.5, np.float32), random_case()[1], np.ones((B, T), np.float32)
    for smoothing in (0.0, 0.1):
        total, weight = cross_entropy(*case, label_smoothing=smoothing)
        np.testing.assert_allclose(total / weight, np.log(V), rtol=1e-6)


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2), (0.1, 0.2)])
def test_gradient_is_that_of_the_plain_formula(smoothing, z_loss):
    """I33: against automatic differentiation of the formula written out, under jit too."""
    logits, targets, weights = random_case(2)
    weights = 0.5 * weights
    ours = lambda x: cross_entropy(x, targets, weights, label_smoothing=smoothing, z_loss=z_loss)[0]  # noqa: E731
    expected = jax.grad(naive)(logits, targets, weights, smoothing, z_loss)
    np.testing.assert_allclose(jax.grad(ours)(logits), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(ours))(logits), expected, rtol=1e-5, atol=1e-6)


def test_gradient_is_the_slope():
    """I33: central differences of the NumPy formula in float64."""
    logits, targets, weights = random_case(3)
    gradient = jax.grad(lambda x: cross_entropy(x, targets, weights, label_smoothing=0.1, z_loss=0.2)[0])(logits)
    rng = np.random.default_rng(0)

    def whole(logits):
        return ((token_losses(logits, targets, 0.1) + 0.2 * log_totals(logits) ** 2) * weights).sum()

    for _ in range(5):
        along = rng.standard_normal(logits.shape)
        up, down = (whole(logits + step * along) for step in (1e-5, -1e-5))
        np.testing.assert_allclose((gradient * along).sum(), (up - down) / 2e-5, rtol=1e-5, atol=1e-5)


def test_the_gradient_flows_to_each_input_scale():
    """The cotangent of the sum multiplies the gradient, and the weight has none."""
    logits, targets, weights = random_case(4)
    _, pull = jax.vjp(lambda x: cross_entropy(x, targets, weights), logits)
    (once,), (thrice,) = pull((jnp.float32(1.0), jnp.float32(0.0))), pull((jnp.float32(3.0), jnp.float32(7.0)))
    np.testing.assert_allclose(thrice, 3 * once, rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_z_loss_is_bit_for_bit_the_loss_without(smoothing):
    """The float32 formula written out, with gradients, and the fused layer's sums: no term, not a term of zero."""
    logits, targets, weights = map(jnp.asarray, random_case(14))

    def plain(logits):
        found = jnp.where((weights > 0)[..., None], logits, 0.0)
        loss = jax.nn.logsumexp(found, axis=-1)
        loss = loss - (1.0 - smoothing) * jnp.take_along_axis(found, targets[..., None], axis=-1)[..., 0]
        loss = loss - smoothing * found.mean(axis=-1) if smoothing else loss
        return jnp.where(weights > 0, loss * weights, 0.0).sum()

    options = {"label_smoothing": smoothing, "z_loss": 0.0}
    ours = lambda logits: losses.cross_entropy(logits, targets, weights, **options)[0]  # noqa: E731
    for found, expected in zip(jax.value_and_grad(ours)(logits), jax.value_and_grad(plain)(logits), strict=True):
        np.testing.assert_array_equal(found, expected)
    case = linear_case(14)
    programs = [
        str(jax.make_jaxpr(jax.grad(lambda x, z=z: linear(x, *case[1:], smoothing, **z)["loss"][0]))(case[0]))
        for z in ({}, {"z_loss": 0.0}, {"z_loss": 1e-4})
    ]
    assert programs[0] == programs[1] != programs[2]
    assert programs[2].count("square") + programs[2].count("integer_pow") > 0 == programs[1].count("square")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_stay_finite(smoothing):
    """B26: +-1e4, right and wrong."""
    logits = np.full((1, 2, V), -1e4, np.float32)
    logits[0, :, 3] = 1e4
    targets, weights = np.array([[3, 0]], np.int32), np.ones((1, 2), np.float32)
    f = lambda x: cross_entropy(x, targets, weights, label_smoothing=smoothing)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(f)(logits)
    np.testing.assert_allclose(value, token_losses(logits, targets, smoothing).sum(), rtol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_stands_where_the_weight_is_zero_never_matters(poison, smoothing):
    """B27's kind: NaN times a weight of zero would be NaN, in the value or in the gradient."""
    logits, targets, weights = random_case(5)
    f = lambda x: cross_entropy(x, targets, weights, label_smoothing=smoothing)[0] / weights.sum()  # noqa: E731
    expected, slope = jax.value_and_grad(f)(logits)
    value, gradient = jax.value_and_grad(f)(np.where(weights[..., None] > 0, logits, np.float32(poison)))
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, slope)
    assert (np.array(gradient)[weights == 0] == 0).all()
    right, _ = accuracy(np.where(weights[..., None] > 0, logits, np.float32(poison)), targets, weights)
    np.testing.assert_array_equal(right, accuracy(logits, targets, weights)[0])


@pytest.mark.parametrize("target", [-100, -1, V, V + 1, 2**31 - 1])
def test_a_target_outside_the_vocabulary_is_nan_with_a_weight_and_nothing_without(target):
    """B17, B27: -1 is not the last class, V is not NaN's neighbour, and -100 may stand where nothing is asked."""
    logits, targets, weights = random_case(6)
    weights[1, 2] = 0.0
    expected = jax.value_and_grad(lambda x: cross_entropy(x, targets, weights, label_smoothing=0.1)[0])(logits)
    correct = accuracy(logits, targets, weights)
    targets[1, 2] = target
    found = jax.value_and_grad(lambda x: cross_entropy(x, targets, weights, label_smoothing=0.1)[0])(logits)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(accuracy(logits, targets, weights), correct)
    weights[1, 2] = 1.0
    assert np.isnan(cross_entropy(logits, targets, weights)[0])
    assert np.isnan(cross_entropy(logits, targets, weights, label_smoothing=0.1)[0])
    assert accuracy(logits, targets, weights) == (correct[0], correct[1] + 1)


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.3, 0.2)])
def test_entries_that_are_not_possible_are_as_if_they_were_not_there(smoothing, z_loss):
    """Value and gradient are those of the columns that are left, whatever stands in the others."""
    logits, targets, weights = random_case(15)
    left = np.array([0, 2, 3, 6])
    targets, options = targets % len(left), {"label_smoothing": smoothing, "z_loss": z_loss}
    few = lambda x: cross_entropy(x, targets, weights, **options)[0]  # noqa: E731
    expected, slope = jax.value_and_grad(few)(logits[..., left])
    possible = np.isin(np.arange(V), left)
    for poison in (1e6, np.nan, np.inf):
        spoilt = np.where(possible, logits, np.float32(poison))
        for mask in (np.broadcast_to(possible, (B, 1, V)), np.broadcast_to(possible, (B, T, V))):
            ours = lambda x, mask=mask: cross_entropy(  # noqa: E731
                x, left[targets].astype(np.int32), weights, **options, possible=jnp.asarray(mask)
            )[0]
            found, gradient = jax.value_and_grad(ours)(spoilt)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            np.testing.assert_allclose(gradient[..., left], slope, rtol=1e-5, atol=1e-7)
            assert (np.asarray(gradient)[..., ~possible] == 0).all()
    assert np.isinf(cross_entropy(logits, np.full_like(targets, 1), weights, possible=jnp.asarray(mask))[0])


def test_where_nothing_is_possible_and_nothing_asked_there_is_no_gradient():
    """B27: a row of padding alone."""
    logits, targets, weights = random_case(16)
    weights[1] = 0.0
    possible = jnp.ones((B, 1, V), bool).at[1].set(False)
    f = lambda x: cross_entropy(x, targets, weights, label_smoothing=0.1, z_loss=0.2, possible=possible)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(f)(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all() and (gradient[1] == 0).all()


def test_a_batch_without_targets_sums_to_zero():
    """B27: labels all -100: loss 0, weight 0, gradient 0."""
    logits, targets = random_case()[0], np.full((B, T), -100, np.int32)
    f = lambda x: cross_entropy(x, targets, np.zeros((B, T), np.float32), label_smoothing=0.1, z_loss=0.2)  # noqa: E731
    (total, weight), gradient = f(logits), jax.grad(lambda x: f(x)[0])(logits)
    assert total == 0 and weight == 0 and (gradient == 0).all()


def test_half_precision_logits_are_summed_in_float32():
    """B09: 512 tokens, of which bfloat16 could not count more than 256."""
    logits = jnp.zeros((2, 256, V), jnp.bfloat16)
    targets, weights = jnp.zeros((2, 256), jnp.int32), jnp.ones((2, 256))
    total, weight = cross_entropy(logits, targets, weights)
    assert total.dtype == jnp.float32 and weight == 512
    np.testing.assert_allclose(total, 512 * np.log(V), rtol=1e-6)
    gradient = jax.grad(lambda x: cross_entropy(x, targets, weights)[0])(logits)
    assert gradient.dtype == jnp.bfloat16


def sharded_case():
    """Four rows of eight tokens with 8, 1, 0 and 3 targets; their losses are 2 in row 0 and 1 elsewhere."""
    weights = (np.arange(8)[None] < np.array([[8], [1], [0], [3]])).astype(np.float32)
    p = np.where(np.arange(4) == 0, np.exp(-2.0), np.exp(-1.0))[:, None]
    logits = np.log(np.stack([p, 1 - p], axis=-1)) + np.zeros((4, 8, 2))
    return logits.astype(np.float32), np.zeros((4, 8), np.int32), weights


def test_sums_over_devices_are_those_of_one_device():
    """B25: 16 and 1 over 8 and 1 tokens make 17/9, not 1.5; a device without a target is legal."""
    logits, targets, weights = sharded_case()
    np.testing.assert_allclose(np.divide(*cross_entropy(logits[:2], targets[:2], weights[:2])), 17 / 9, rtol=1e-6)

    def mean(logits, targets, weights):
        total, weight = cross_entropy(logits, targets, weights)
        right, _ = accuracy(logits, targets, weights)
        return total / weight, (weight, right)

    step = jax.jit(jax.value_and_grad(mean, has_aux=True))
    alone = step(logits, targets, weights)
    mesh = make_mesh(config.Mesh(data=4))
    shared = step(*jax.device_put((logits, targets, weights), batch_sharding(mesh)))
    np.testing.assert_allclose(alone[0][0], 20 / 12, rtol=1e-6)
    assert alone[0][1] == (12, 0 + 0 + 0 + 0)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), shared, alone)


def test_sums_can_be_added_inside_shard_map():
    """B25 by hand: psum of sums over psum of weights."""
    logits, targets, weights = sharded_case()
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    add = lambda *case: jax.lax.psum(losses.cross_entropy(*case), "data")  # noqa: E731
    total, weight = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(spec, spec, spec), out_specs=PartitionSpec()))(
        logits, targets, weights
    )
    np.testing.assert_allclose((total, weight), (20, 12), rtol=1e-6)


def test_accuracy_counts_weighted_targets_with_the_largest_logit():
    logits, targets, weights = random_case(7, rows=11)
    right, weight = accuracy(logits, targets, 0.5 * weights)
    assert weight == weights.sum() / 2
    np.testing.assert_allclose(right, (0.5 * weights * (logits.argmax(axis=-1) == targets)).sum())
    assert 0 < right < weight


def test_accuracy_takes_a_tie_as_right():
    logits = np.zeros((1, 3, V), np.float32)
    logits[0, 2, 4] = 1.0
    right, weight = accuracy(logits, np.array([[0, 6, 6]], np.int32), np.ones((1, 3), np.float32))
    assert (right, weight) == (2, 3)


def linear_case(seed, *, rows=B, length=T, D=6):
    """Features, output layer with a bias, targets, weights."""
    rng = np.random.default_rng(seed)
    x, table, bias = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((rows, length, D), (V, D), (V,))
    )
    targets = jnp.asarray(rng.integers(0, V, (rows, length)), jnp.int32)
    weights = jnp.asarray(0.5 * rng.integers(0, 4, (rows, length)), jnp.float32)
    return x, table, bias, targets, weights


def linear(x, table, bias, targets, weights, smoothing=0.1, z_loss=0.0):
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    return losses.linear_cross_entropy(x, (table, bias), targets, weights, **options)


def through_logits(x, table, bias, targets, weights, smoothing=0.1, z_loss=0.0):
    logits = jnp.einsum("BTD,VD->BTV", x, table) + (0.0 if bias is None else bias[None, None])
    loss = losses.cross_entropy(logits, targets, weights, label_smoothing=smoothing, z_loss=z_loss)
    return {"loss": loss, "accuracy": losses.accuracy(logits, targets, weights)}


# one piece; three pieces of 170 columns, the last one padded; more rows than a piece has tokens
@pytest.mark.parametrize(("rows", "length"), [(B, T), (3, 401), (521, 3)])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.03)])
def test_the_output_layer_in_pieces_is_the_whole(rows, length, smoothing, z_loss):
    """Sums and the gradients for features, table and bias, by automatic differentiation of all the logits."""
    case = linear_case(8, rows=rows, length=length)

    def both(function):
        def scaled(x, table, bias):
            sums = function(x, table, bias, *case[3:], smoothing, z_loss)
            return 3.0 * sums["loss"][0] / sums["loss"][1], sums

        return jax.jit(jax.value_and_grad(scaled, argnums=(0, 1, 2), has_aux=True))(*case[:3])

    found, expected = both(linear), both(through_logits)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), found, expected)
    # without a gradient it goes another way
    sums = jax.jit(linear, static_argnums=(5, 6))(*case, smoothing, z_loss)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), sums, expected[0][1])


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_the_output_layers_loss_is_numpys(z_loss):
    """Sums in float64, and the gradient against automatic differentiation of the formula written out."""
    x, table, bias, targets, weights = linear_case(12)
    wide = [np.asarray(array, np.float64) for array in (x, table, bias)]
    logits, chosen = np.einsum("BTD,VD->BTV", *wide[:2]) + wide[2], np.asarray(targets)
    expected = (token_losses(logits, chosen, 0.1) + z_loss * log_totals(logits) ** 2) * np.asarray(weights)
    right = (np.asarray(weights) * (logits.argmax(axis=-1) == chosen)).sum()
    sums = linear(x, table, bias, targets, weights, 0.1, z_loss)
    np.testing.assert_allclose(sums["loss"], (expected.sum(), weights.sum()), rtol=1e-5)
    np.testing.assert_allclose(sums["accuracy"], (right, weights.sum()), rtol=1e-6)

    def plain(x, table, bias):
        logits = jnp.einsum("BTD,VD->BTV", x, table) + bias[None, None]
        return naive(logits, targets, weights, 0.1, z_loss)

    ours = lambda *arrays: linear(*arrays, targets, weights, 0.1, z_loss)["loss"][0]  # noqa: E731
    found, wanted = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(x, table, bias) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, wanted)


def test_the_output_layer_may_have_no_bias():
    x, table, _, targets, weights = linear_case(9)
    found, expected = (jax.jit(f)(x, table, None, targets, weights) for f in (linear, through_logits))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_features_without_a_weight_never_matter(poison):
    """B27's kind, through the output layer: neither in the sums nor in any gradient; -100 may be their target."""
    x, table, bias, targets, weights = linear_case(10)
    # jit once: the gradient, and what it is of
    run = jax.jit(jax.value_and_grad(lambda *case: linear(*case, z_loss=0.03)["loss"][0], argnums=(0, 1, 2)))
    expected = run(x, table, bias, targets, weights)
    other = jnp.where(weights[..., None] > 0, x, poison), jnp.where(weights > 0, targets, -100)
    found = run(other[0], table, bias, other[1], weights)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert (found[1][0][weights == 0] == 0).all() and (weights == 0).any()
    # with a weight, a target that is no entry of the vocabulary is NaN
    for target in (-1, V):
        assert np.isnan(run(x, table, bias, jnp.where(weights > 0, target, targets), weights)[0])


def test_the_output_layer_over_devices_is_that_of_one():
    """B25: rows over four devices, one of them without a target; sums and gradients."""
    x, table, bias, targets, _ = linear_case(11, rows=4, length=8)
    weights = jnp.asarray(sharded_case()[2])
    run = jax.jit(jax.value_and_grad(lambda *case: linear(*case, z_loss=0.03)["loss"][0] / 12.0, argnums=(0, 1, 2)))
    alone = jax.device_get(run(x, table, bias, targets, weights))
    mesh = make_mesh(config.Mesh(data=4))
    with jax.set_mesh(mesh):
        x, targets, weights = jax.device_put((x, targets, weights), batch_sharding(mesh))
        shared = jax.device_get(run(x, table, bias, targets, weights))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), shared, alone)

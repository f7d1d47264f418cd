"""Sinusoidal and rotary positions: their published values, and the properties that made their authors choose them."""

import dataclasses
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import oracle_blocks
from tfm_jax.ops import Rotary, rotary_embedding, sinusoidal_positions, sinusoidal_table


def encode(*positions, d_model):
    return np.asarray(sinusoidal_positions(jnp.asarray([positions], jnp.int32), d_model)[0])


def test_golden_values():
    """B11: columns 2i and 2i + 1 share an exponent; an odd width ends with a sine."""
    np.testing.assert_allclose(encode(1, d_model=5)[0], [0.841471, 0.540302, 0.025116, 0.999685, 0.000631], atol=1e-6)
    np.testing.assert_array_equal(encode(0, d_model=5)[0], [0, 1, 0, 1, 0])


@pytest.mark.parametrize("d_model", [1, 2, 5, 29, 127])
def test_every_width_is_the_oracles(d_model):
    """B11"""
    table = sinusoidal_table(53, d_model)
    assert table.shape == (53, d_model) and table.dtype == jnp.float32
    # an angle of 52 has an error of half a unit in its last place, 2e-6, and so has what its rate was rounded to
    np.testing.assert_allclose(table, oracle_blocks.sinusoidal_table(53, d_model), atol=8e-6)


def test_positions_are_rows_of_the_table():
    positions = jnp.asarray([[0, 3, 3, 51], [7, 2, 0, 1], [52, 9, 8, 6]], jnp.int32)
    encoded = jax.jit(sinusoidal_positions, static_argnums=1)(positions, 11)
    np.testing.assert_allclose(encoded, np.asarray(sinusoidal_table(53, 11))[np.asarray(positions)], atol=1e-6)
    np.testing.assert_allclose(encoded, oracle_blocks.sinusoidal_positions(positions, 11), atol=8e-6)


@pytest.mark.parametrize("d_model", [0, -2])
def test_no_width_is_refused(d_model):
    with pytest.raises(ValueError, match=f"d_model is {d_model}"):
        sinusoidal_table(3, d_model)


@pytest.mark.parametrize("x64", [False, True])
def test_the_table_is_float32_whatever_the_flag(x64):
    """B14, B56"""
    with jax.enable_x64(x64):
        for dtype in (jnp.int32, jnp.int64) if x64 else (jnp.int32, jnp.int16):
            assert sinusoidal_positions(jnp.asarray([[0, 257]], dtype), 7).dtype == jnp.float32


def test_neighbours_differ_where_bfloat16_cannot_count():
    """B14: bfloat16 has no 257 and float16 no 2049."""
    for position in (256, 2048, 4094, 32766):
        one, next_one = encode(position, position + 1, d_model=8)
        assert np.abs(one - next_one).max() > 0.1
        expected = oracle_blocks.sinusoidal_positions([[position, position + 1]], 8)[0]
        # half a unit in the last place of the angle, and of its rate
        np.testing.assert_allclose([one, next_one], expected, atol=position * 2.0**-23)


@pytest.mark.parametrize("offset", [1, 3, 17])
def test_an_offset_is_a_rotation_that_does_not_depend_on_the_position(offset):
    """PE(pos + k) is PE(pos) with pair i rotated by the angle k / 10000 ** (2i / d_model)."""
    d_model = 14
    for position in (0, 5, 50):
        here, there = encode(position, position + offset, d_model=d_model).astype(np.float64)
        for i in range(d_model // 2):
            angle = offset / 10000 ** (2 * i / d_model)
            rotation = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
            np.testing.assert_allclose(there[2 * i : 2 * i + 2], rotation @ here[2 * i : 2 * i + 2], atol=1.5e-5)


def test_a_product_depends_on_the_distance_alone():
    """B11"""
    for position in (0, 5, 50):
        one, other = encode(position, position + 3, d_model=8).astype(np.float64)
        np.testing.assert_allclose(one @ other, 1.964889526, atol=1e-5)
        np.testing.assert_allclose(one @ one, 4, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Rotary embedding
# ----------------------------------------------------------------------------------------------------------------------

FIXTURES = Path(__file__).parent.parent / "fixtures"
KEPT = json.loads((FIXTURES / "rope.json").read_text())
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_length": 64}
# heads of 14, of which 14, 10 or 8 elements turn
ROTARIES = {
    "half": Rotary(),
    "interleaved": Rotary("interleaved"),
    "partial": Rotary(base=500.0, fraction=10 / 14),
    "partial interleaved": Rotary("interleaved", fraction=8.1 / 14),
    "linear": Rotary(scaling="linear", factor=3.5),
    "ntk": Rotary("interleaved", fraction=10 / 14, scaling="ntk", factor=5.0),
    "llama3": Rotary(base=50.0, **LLAMA3),
    "llama3 partial": Rotary(
        "interleaved", 30.0, 8 / 14, **LLAMA3, low_frequency_factor=1.5, high_frequency_factor=2.0
    ),
}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def at(*rows):
    return jnp.asarray(rows, jnp.int32)


rotate = jax.jit(rotary_embedding, static_argnames="settings")


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [("interleaved", [-1.14264, 1.922076, 2.959851, 4.0298]), ("half", [-1.984111, 1.959901, 2.462378, 4.0198])],
)
def test_rotary_golden_values(pairing, expected):
    """B12: [1, 2, 3, 4] at position 1, base 10,000, in both pairings."""
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0])[None, None, None]
    np.testing.assert_allclose(rotate(x, at([1]), Rotary(pairing))[0, 0, 0], expected, atol=2e-6)
    np.testing.assert_array_equal(rotate(x, at([0]), Rotary(pairing)), x)


@pytest.mark.parametrize("settings", ROTARIES.values(), ids=list(ROTARIES))
def test_rotary_is_the_oracles(settings):
    """B12, I33: both pairings, partial rotation and every scaling; the gradient turns back, which the oracle can do."""
    positions = at([0, 1, 2, 3, 4], [7, 6, 90, 5, 5], [-1] * 5)
    x, gradient, fields = normal(0, 3, 5, 2, 14), normal(1, 3, 5, 2, 14), dataclasses.asdict(settings)
    found, backward = jax.vjp(lambda x: rotate(x, positions, settings), x)
    assert found.dtype == jnp.float32
    # an angle of 90 is rounded to half a unit in its last place, 4e-6, and so has been its rate
    np.testing.assert_allclose(found, oracle_blocks.rotary_embedding(x, positions, **fields), atol=3e-5)
    expected = oracle_blocks.rotary_embedding(gradient, -positions, **fields)
    np.testing.assert_allclose(backward(gradient)[0], expected, atol=3e-5)


@pytest.mark.parametrize("settings", ROTARIES.values(), ids=list(ROTARIES))
def test_rotary_keeps_norms_and_what_does_not_turn(settings):
    """B12: nothing moves at position 0; no vector changes its length; elements beyond the fraction are bit-equal."""
    x, positions = normal(0, 3, 5, 2, 14), at([0, 1, 2, 3, 4], [7, 6, 90, 5, 5], [0, 0, 300, 0, 0])
    found, R = np.asarray(rotate(x, positions, settings)), settings.rotated(14)
    still = np.asarray(positions) == 0
    np.testing.assert_array_equal(found[still], np.asarray(x)[still])
    np.testing.assert_array_equal(found[..., R:], x[..., R:])
    assert R == 14 or np.abs(x[..., R:]).min() > 0
    assert (np.abs(found - x)[~still][..., :R].max(axis=(0, 1)) > 0.02).all()
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("settings", ROTARIES.values(), ids=list(ROTARIES))
def test_a_score_depends_on_the_difference_of_positions_alone(settings):
    """B12, I10"""
    query, key, starts = normal(0, 1, 1, 1, 14), normal(1, 1, 1, 1, 14), np.asarray([0, 1, 5, 50, 300])
    query, key = jnp.broadcast_to(query, (1, 5, 1, 14)), jnp.broadcast_to(key, (1, 5, 1, 14))
    scores = {}
    for distance in (0, 3, -2):
        turned = rotate(query, at(starts + 2), settings), rotate(key, at(starts + 2 + distance), settings)
        scores[distance] = np.einsum("BTNH,BTNH->T", *(np.asarray(x, np.float64) for x in turned))
        np.testing.assert_allclose(scores[distance], scores[distance][0], atol=2e-4)
    np.testing.assert_allclose(scores[0], (query * key)[0, :, 0].sum(axis=-1), atol=1e-5)
    assert abs(scores[3][0] - scores[0][0]) > 0.01 and abs(scores[-2][0] - scores[3][0]) > 0.01


def test_the_pairings_are_permutations_of_each_other():
    """B12: what an importer does to query and key weights of the other convention, [0, 2, 1, 3] for four elements."""
    for size in (4, 14):
        to_half = np.arange(size).reshape(-1, 2).T.reshape(-1)
        x, positions = normal(2, 1, 5, 3, size), at([0, 1, 2, 30, 4])
        half = rotate(x[..., to_half], positions, Rotary("half"))
        np.testing.assert_allclose(half, rotate(x, positions, Rotary("interleaved"))[..., to_half], atol=1e-6)
    assert np.abs(rotate(x, positions, Rotary("half")) - rotate(x, positions, Rotary("interleaved"))).max() > 0.5


def test_an_offset_is_never_remembered():
    """B13: offsets 0, 7, 0, 7 in this order, offsets of each row, and 7 places of padding that are cut off again."""
    x, settings = normal(3, 2, 3, 2, 14), Rotary()
    count = np.arange(3)
    found = [rotate(x, at(offset + count), settings) for offset in (0, 7, 0, 7)]
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    assert np.abs(found[0] - found[1]).max() > 0.5
    padded = rotate(jnp.pad(x, ((0, 0), (7, 0), (0, 0), (0, 0))), at(np.arange(10)), settings)
    np.testing.assert_allclose(padded[:, 7:], found[1], atol=1e-6)
    by_row = rotate(x, at(5 + count, 3 + count), settings)
    for row, offset in enumerate((5, 3)):
        alone = rotate(x[row : row + 1], at(offset + count), settings)
        np.testing.assert_allclose(by_row[row : row + 1], alone, atol=1e-6)
    one_by_one = [rotate(x[:, t : t + 1], at([7 + t]), settings) for t in range(3)]
    np.testing.assert_allclose(np.concatenate(one_by_one, axis=1), found[1], atol=1e-6)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotary_angles_are_float32_whatever_is_turned(pairing):
    """B14: bfloat16 knows no 257; what it turns is the float32 result rounded once, and neighbours differ."""
    settings, x = Rotary(pairing, fraction=6 / 14), normal(4, 1, 1, 3, 14).astype(jnp.bfloat16)
    for position in (257, 4095, 32767):
        positions = at([position - 1, position, position + 1])
        rows = jnp.broadcast_to(x, (1, 3, 3, 14))
        found, wide = rotate(rows, positions, settings), rotate(rows.astype(jnp.float32), positions, settings)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))
        expected = oracle_blocks.rotary_embedding(rows, positions, **dataclasses.asdict(settings))
        # half a unit in the last place of the angle, and of its rate, times the largest pair
        np.testing.assert_allclose(wide, expected, atol=3 * position * 2.0**-23)
        steps = np.abs(np.diff(found.astype(jnp.float32), axis=1))
        assert (steps[0].max(axis=-1) > 0.1).all()


@pytest.mark.parametrize("x64", [False, True])
def test_rotary_keeps_its_dtype_whatever_the_flag(x64):
    """B56"""
    with jax.enable_x64(x64):
        for dtype in (jnp.int32, jnp.int64) if x64 else (jnp.int32, jnp.int16):
            for kind in (jnp.float32, jnp.bfloat16, jnp.float16):
                shapes = jax.ShapeDtypeStruct((1, 2, 1, 4), kind), jax.ShapeDtypeStruct((1, 2), dtype)
                assert jax.eval_shape(lambda *x: rotary_embedding(*x, Rotary()), *shapes).dtype == kind


@pytest.mark.parametrize("kept", KEPT["rates"], ids=[kept["settings"]["scaling"] for kept in KEPT["rates"]])
def test_rates_are_those_of_transformers(kept):
    """Llama 3.1's own scaling, and linear and NTK ones; float32 there."""
    settings = Rotary(**kept["settings"])
    found = settings.rates(kept["head_size"])
    assert len(found) == settings.rotated(kept["head_size"]) // 2
    np.testing.assert_allclose(found, kept["rates"], rtol=1e-6)
    # and scaling changed something: what turns slowly, by the factor, and hardly what turns fast
    plain = Rotary(base=settings.base, fraction=settings.fraction).rates(kept["head_size"])
    ratios = np.asarray(plain) / np.asarray(found)
    np.testing.assert_allclose(ratios[-1], settings.factor, rtol=1e-6)
    np.testing.assert_allclose(ratios[0], settings.factor if settings.scaling == "linear" else 1.0, rtol=1e-6)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_turned_heads_are_those_of_transformers(pairing):
    """B12: GPT-NeoX turns halves, GPT-J neighbours, both the first elements of a head."""
    kept = KEPT["turned"]
    x = jnp.asarray(kept["x"], jnp.float32)[None, :, None]
    found = rotate(x, at(kept["positions"]), Rotary(pairing, fraction=kept["fraction"]))
    # the angle 1000 is rounded to 3e-5 there too, and rates that differ in their last place differ by 6e-5 in it
    np.testing.assert_allclose(found[0, :, 0], kept[pairing], atol=2e-4)
    np.testing.assert_allclose(found[0, :3, 0], kept[pairing][:3], atol=4e-6)


@pytest.mark.oracles
def test_the_kept_numbers_are_those_that_transformers_gives():
    made = runpy.run_path(str(FIXTURES / "make_rope.py"))["numbers"]()
    assert {name: made[name] for name in ("rates", "turned")} == {name: KEPT[name] for name in ("rates", "turned")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fraction": 0.0}, "rope.fraction is 0.0: it lies in"),
        ({"fraction": 1.5}, "rope.fraction is 1.5"),
        ({"fraction": float("nan")}, "rope.fraction is nan"),
        ({"base": 1.0}, "rope.base is 1.0"),
        ({"base": float("nan")}, "rope.base is nan"),
        ({"scaling": "linear", "factor": 0.5}, "rope.factor 0.5"),
        ({"scaling": "ntk"}, "rope.scaling is 'ntk' with factor 1.0: give both or neither"),
        ({"factor": 2.0}, "rope.scaling is 'none' with factor 2.0: give both or neither"),
        (LLAMA3 | {"low_frequency_factor": 4.0}, "low_frequency_factor 4.0.*0 < low < high"),
        (LLAMA3 | {"low_frequency_factor": 0.0}, "low_frequency_factor 0.0"),
        (LLAMA3 | {"original_length": 0}, "original_length 0"),
    ],
    ids=str,
)
def test_rotary_settings_without_meaning_are_refused(fields, message):
    """I34"""
    with pytest.raises(ValueError, match=message):
        Rotary(**fields)


@pytest.mark.parametrize(("size", "fraction", "turning"), [(7, 1.0, 7), (14, 0.5, 7), (14, 0.05, 0)])
def test_an_odd_number_of_turning_elements_is_refused(size, fraction, turning):
    """B12, I34: the head, the fraction and what would turn are named, in use and where it is asked for."""
    settings, message = Rotary(fraction=fraction), f"fraction {fraction} of a head of size {size} is {turning}: an even"
    with pytest.raises(ValueError, match=message):
        settings.rotated(size)
    with pytest.raises(ValueError, match=message):
        rotary_embedding(jnp.zeros((1, 2, 1, size)), at([0, 1]), settings)


@pytest.mark.parametrize("name", ["pairing", "scaling"])
def test_an_unknown_way_to_turn_is_refused(name):
    settings = Rotary()
    object.__setattr__(settings, name, "spiral")  # past the annotation, as a user without a type checker
    with pytest.raises(ValueError, match=f"rope.{name} is 'spiral': "):
        rotary_embedding(jnp.zeros((1, 2, 1, 4)), at([0, 1]), settings)

"""What the sines and cosines of positions can do: tell all apart, stay bounded, and turn into each other.

Vaswani et al. (2017), section 3.5: PE(pos, 2i) = sin(pos w_i), PE(pos, 2i+1) = cos(pos w_i), w_i = 10000^(-2i/d).

Bounded: every pair of entries lies on the unit circle, so |PE(pos)|^2 = d / 2. Rotation: the addition theorems make
PE(pos + k) of PE(pos) by turning pair i by the angle k w_i, whatever pos. The library's rotary embedding turns by just
these angles, so it must lead from one row of the library's table to another. Unique and smooth: distances depend on k
alone,

    |PE(pos + k) - PE(pos)|^2 = sum_i 4 sin^2(k w_i / 2);

no two rows are equal, as k w_0 = k is no multiple of 2 pi, and neighbours (k = 1) are nearest of all. Wavelengths 2 pi
/ w_i grow from 2 pi to 10000^(1 - 2/d) 2 pi: the paper's 10000 x 2 pi is the limit of a wide table, 3.7 percent more
than the longest one at d = 512. All is measured on the table itself, whose float32 angles are off by up to pos 2^-23:
that is the limit of each exact claim.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.theory import Row, near, within
from experiments.theory.figure import drawn
from tfm_jax.ops import Rotary, rotary_embedding, sinusoidal_table

D, LENGTH = 512, 2048
SHIFTS = (1, 7, 100, 1024)
ROUNDING = LENGTH * 2.0**-23
RATES = np.array(Rotary().rates(D))
"""w_i in float64. Unit: radians per position."""


def turned(table: np.ndarray, shift: int) -> np.ndarray:
    """Every row with its pairs (sine, cosine) turned on by `shift` positions: clockwise, as the sine comes first."""
    back = jnp.full((1, len(table)), -shift, jnp.int32)
    return np.asarray(rotary_embedding(jnp.asarray(table)[None, :, None], back, Rotary("interleaved"))[0, :, 0])


def rotation_error(table: np.ndarray, shift: int) -> float:
    """The largest difference between PE(pos) turned by k and PE(pos + k)."""
    return float(np.abs(turned(table, shift)[:-shift] - table[shift:]).max())


def distances(table: np.ndarray) -> np.ndarray:
    """Of all pairs of rows; infinite of a row to itself."""
    wide = table.astype(np.float64)
    squares = np.maximum(D - 2.0 * wide @ wide.T, 0.0)
    return np.sqrt(np.where(np.eye(len(table), dtype=bool), np.inf, squares))


def wavelengths(table: np.ndarray) -> np.ndarray:
    """Of each pair, from how far its angle goes from the first row to the last. Unit: positions."""
    angles = np.unwrap(np.arctan2(table[:, 0::2], table[:, 1::2]), axis=0)
    return 2.0 * np.pi * (len(table) - 1) / (angles[-1] - angles[0])


def similarity(shifts: np.ndarray) -> np.ndarray:
    """The cosine between PE(pos) and PE(pos + k) for each k."""
    return np.cos(shifts[:, None] * RATES).mean(axis=1)


def measure(figures: Path) -> list[Row]:
    """Eight rows, heat maps, and what distance and wavelength look like."""
    table = np.asarray(sinusoidal_table(LENGTH, D))
    waves, apart = wavelengths(table), distances(table)
    products = table @ table.T / (D / 2)
    shifts = np.arange(LENGTH)
    expected = similarity(shifts)
    by_shift = np.array([np.diagonal(products, k).mean() for k in shifts])
    errors = [np.abs(np.diagonal(products, k) - expected[k]).max() for k in shifts]
    draw(figures, waves, by_shift)
    rows, rounding = f"d = {D}, {LENGTH:,} positions", {"distance": ROUNDING}
    return [
        within("no entry of PE is beyond 1", 1.0, np.abs(table).max(), **rounding, note=rows),
        within(
            "|PE(pos)| = sqrt(d / 2)", (D / 2) ** 0.5, _farthest(np.linalg.norm(table, axis=1)), **rounding, note=rows
        ),
        near(
            "unique: the nearest two positions are neighbours, sqrt(sum_i 4 sin^2(w_i / 2)) apart",
            float(np.sqrt((4.0 * np.sin(RATES / 2.0) ** 2).sum())),
            apart.min(),
            share=1e-3,
            note=f"{rows}, all pairs",
        ),
        within(
            "PE(pos + k) is PE(pos) turned by k w_i",
            0.0,
            max(rotation_error(table, shift) for shift in SHIFTS),
            **rounding,
            note=f"{rows}, k = {', '.join(map(str, SHIFTS))}; by the library's rotary embedding",
        ),
        within(
            "smooth: cos(PE(pos), PE(pos + k)) is the mean of cos(k w_i), whatever pos",
            0.0,
            max(errors),
            **rounding,
            note=f"{rows}, all pairs: the largest difference",
        ),
        within(
            "this similarity falls with every step until mean cos(k w_i) first rises",
            _first_rise(expected),
            _first_rise(by_shift),
            distance=0.0,
            note=f"{rows}: 'it falls with distance' is false beyond. Unit: positions",
        ),
        near("the shortest wavelength is 2 pi", 2.0 * np.pi, waves[0], share=1e-4),
        near(
            "the longest wavelength is 10000^(1 - 2/d) x 2 pi",
            2.0 * np.pi * 10000.0 ** (1.0 - 2.0 / D),
            waves[-1],
            share=1e-3,
            note=f"d = {D}: 10000 x 2 pi = 62,832 is the limit of a wide table, which no table reaches",
        ),
    ]


def _first_rise(similarities: np.ndarray) -> int:
    """The first distance at which they are no less than one before."""
    return int(np.flatnonzero(np.diff(similarities) >= 0.0)[0]) + 1


def _farthest(norms: np.ndarray) -> float:
    return float(norms[np.abs(norms - (D / 2) ** 0.5).argmax()])


def draw(figures: Path, waves: np.ndarray, by_shift: np.ndarray) -> None:
    """A small table as heat maps; similarity over distance; wavelength over pair."""
    small = np.asarray(sinusoidal_table(100, 128))
    with drawn(figures / "sinusoids_heat.png", 2) as panels:
        for first, (axes, name) in enumerate(zip(panels, ("sine", "cosine"), strict=True)):
            image = axes.imshow(small[:, first::2], aspect="auto", cmap="RdBu", vmin=-1.0, vmax=1.0)
            axes.grid(False)
            axes.set_title(f"{name}s: dimension 2i{' + 1' * first} of 128")
            axes.set_xlabel("pair i")
            axes.set_ylabel("position")
        axes.figure.colorbar(image, ax=panels, label="PE(position, dimension)")
    with drawn(figures / "sinusoids.png", 2) as (near_by, over_pairs):
        shifts = np.arange(0, 512, 16)
        near_by.plot(by_shift[:512], label="measured, mean over pos")
        near_by.plot(shifts, similarity(shifts), "o", markersize=3, label="mean of $\\cos(k w_i)$")
        near_by.set_xlabel("distance k / positions")
        near_by.set_ylabel("cosine of PE(pos) and PE(pos + k)")
        near_by.legend()
        over_pairs.semilogy(waves, label="measured in the table")
        over_pairs.axhline(2.0 * np.pi, color="0.6", linestyle="--", label="$2\\pi$")
        over_pairs.axhline(2e4 * np.pi, color="0.6", linestyle=":", label="$10000 \\cdot 2\\pi$")
        over_pairs.set_xlabel("pair i")
        over_pairs.set_ylabel("wavelength / positions")
        over_pairs.legend(loc="upper left", bbox_to_anchor=(0.0, 0.9))

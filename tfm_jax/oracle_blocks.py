"""The parts of a Transformer block in plain NumPy, float64, one position at a time: positions, norms, feed-forward,
multi-head attention on top of `oracle`, whole blocks and the loss.

Each function repeats the contract of the function of the same name in `ops` or `train.losses`, with the same parameters
and axes, and turns what it is given into float64.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from tfm_jax.oracle import dot_product_attention

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}


def sinusoidal_positions(positions: ArrayLike, d_model: int) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5).

    Positions B T to B T D.
    """
    positions = np.asarray(positions)
    table = np.zeros((*positions.shape, d_model))
    for b, t in np.ndindex(positions.shape):
        for column in range(d_model):
            angle = int(positions[b, t]) / 10000.0 ** (2 * (column // 2) / d_model)
            table[b, t, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table


def sinusoidal_table(length: int, d_model: int) -> np.ndarray:
    """Rows 0 .. length - 1 of `sinusoidal_positions`: length D."""
    return sinusoidal_positions([range(length)], d_model)[0]


def rotary_embedding(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    pairing: str = "half",
    base: float = 10_000.0,
    fraction: float = 1.0,
    scaling: str = "none",
    factor: float = 1.0,
    **llama3: float | int,
) -> np.ndarray:
    """Each pair of elements of x, B T N H, is a complex number times exp(i position rate) (Su et al. 2021, eq. 12).

    positions B T, where B may be 1; the other parameters are the fields of `ops.Rotary`.
    """
    x, positions = _wide(x), np.asarray(positions)
    R = int(x.shape[3] * fraction)
    if scaling == "ntk":
        base = base * factor ** (R / (R - 2))
    output = x.copy()
    for b, t in np.ndindex(x.shape[:2]):
        position = int(positions[b if len(positions) > 1 else 0, t])
        for i in range(R // 2):
            angle = position * base ** (-2 * i / R)
            if scaling == "linear":
                angle /= factor
            if scaling == "llama3":
                angle *= _llama3_slowdown(2 * math.pi * base ** (2 * i / R), factor, **llama3)
            one, other = {"interleaved": (2 * i, 2 * i + 1), "half": (i, i + R // 2)}[pairing]
            turned = (x[b, t, :, one] + 1j * x[b, t, :, other]) * np.exp(1j * angle)
            output[b, t, :, one], output[b, t, :, other] = turned.real, turned.imag
    return output


def _llama3_slowdown(wavelength, factor, *, original_length, low_frequency_factor, high_frequency_factor):
    """What the rate of a pair with this wavelength is multiplied by: the three cases of Llama 3.1's own code."""
    if wavelength < original_length / high_frequency_factor:
        return 1.0
    if wavelength > original_length / low_frequency_factor:
        return 1.0 / factor
    smooth = original_length / wavelength - low_frequency_factor
    smooth /= high_frequency_factor - low_frequency_factor
    return (1.0 - smooth) / factor + smooth


def layer_norm(params: dict, x: ArrayLike, *, eps: float) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps) * scale + bias of every vector of B T D (Ba et al. 2016)."""
    x, scale, bias = _wide(x), _wide(params["scale"]), _wide(params["bias"])
    output = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        mean = x[b, t].sum() / x.shape[2]
        variance = ((x[b, t] - mean) ** 2).sum() / x.shape[2]
        output[b, t] = (x[b, t] - mean) / math.sqrt(variance + eps) * scale + bias
    return output


def rms_norm(params: dict, x: ArrayLike, *, eps: float) -> np.ndarray:
    """x / sqrt(mean of x^2 + eps) * scale of every vector of B T D (Zhang and Sennrich 2019, eq. 4)."""
    x, scale = _wide(x), _wide(params["scale"])
    output = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        output[b, t] = x[b, t] / math.sqrt((x[b, t] ** 2).sum() / x.shape[2] + eps) * scale
    return output


def feed_forward(params: dict, x: ArrayLike, *, activation: str) -> np.ndarray:
    """activation(x W1 + b1) W2 + b2 of every vector of B T D (Vaswani et al. 2017, eq. 2).

    geglu, geglu_tanh and swiglu: (activation(x V + c) * (x W1 + b1)) W2 + b2 (Shazeer 2020, eq. 6).
    """
    x, up, down = _wide(x), _wide(params["up"]), _wide(params["down"])
    output = np.zeros((*x.shape[:2], down.shape[1]))
    for b, t in np.ndindex(x.shape[:2]):
        hidden = x[b, t] @ up + _wide(params.get("up_bias", 0.0))
        if activation in ("geglu", "geglu_tanh", "swiglu"):
            gate = x[b, t] @ _wide(params["gate"]) + _wide(params.get("gate_bias", 0.0))
            hidden = ACTIVATIONS[{"swiglu": "silu"}.get(activation, activation.replace("glu", "lu"))](gate) * hidden
        else:
            hidden = ACTIVATIONS[activation](hidden)
        output[b, t] = hidden @ down + _wide(params.get("down_bias", 0.0))
    return output


def multi_head_attention(
    params: dict,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """Concat(head_1, ..., head_N) W_O (Vaswani et al. 2017, section 3.2.2): query B T D, key and value B S D."""
    projected = (_heads(params, name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    heads = dot_product_attention(*projected, mask=mask, scale=scale)
    W_O = _wide(params["output"])
    N, E, D = W_O.shape
    output = np.zeros((*heads.shape[:2], D))
    for b, t in np.ndindex(heads.shape[:2]):
        output[b, t] = heads[b, t].reshape(N * E) @ W_O.reshape(N * E, D) + _wide(params.get("output_bias", 0.0))
    return output


def encoder_block(
    params: dict,
    x: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    norm: str = "post",
    norm_eps: float = 1e-5,
    activation: str = "relu",
    scale: float | None = None,
) -> np.ndarray:
    """Self-attention and feed-forward with residuals and norms: B T D to B T D, without dropout.

    norm: "post" (Vaswani et al. 2017, section 3.1) or "pre" (Xiong et al. 2020). scale: of scores; None: 1/sqrt(d_k).
    """
    x = _residual(
        params["attention_norm"],
        x,
        lambda h: multi_head_attention(params["attention"], h, h, h, mask=mask, scale=scale),
        norm=norm,
        eps=norm_eps,
    )
    return _residual(
        params["feed_forward_norm"],
        x,
        lambda h: feed_forward(params["feed_forward"], h, activation=activation),
        norm=norm,
        eps=norm_eps,
    )


def decoder_block(
    params: dict,
    x: ArrayLike,
    encoded: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    cross_mask: ArrayLike | None = None,
    norm: str = "post",
    norm_eps: float = 1e-5,
    activation: str = "relu",
    scale: float | None = None,
) -> np.ndarray:
    """Self-attention, attention to the encoder's output B S D and feed-forward, as `encoder_block`."""
    sublayers = {
        "attention": lambda h: multi_head_attention(params["attention"], h, h, h, mask=mask, scale=scale),
        "cross_attention": lambda h: multi_head_attention(
            params["cross_attention"], h, encoded, encoded, mask=cross_mask, scale=scale
        ),
        "feed_forward": lambda h: feed_forward(params["feed_forward"], h, activation=activation),
    }
    for name, sublayer in sublayers.items():
        x = _residual(params[f"{name}_norm"], x, sublayer, norm=norm, eps=norm_eps)
    return x


def cross_entropy(
    logits: ArrayLike, targets: ArrayLike, weights: ArrayLike, *, label_smoothing: float = 0.0
) -> tuple[float, float]:
    """Sum of weighted cross entropies in nats over logits B T V, and the sum of weights.

    The target distribution is 1 - label_smoothing on the target, plus label_smoothing / V on every entry.
    """
    logits, targets, weights = _wide(logits), np.asarray(targets), _wide(weights)
    V, total = logits.shape[2], 0.0
    for b, t in np.ndindex(targets.shape):
        if weights[b, t] == 0.0:
            continue
        if not 0 <= targets[b, t] < V:
            raise ValueError(f"target {targets[b, t]} at {(b, t)} has a weight: targets are 0 to {V - 1}")
        top = logits[b, t].max()
        log_probs = logits[b, t] - top - math.log(np.exp(logits[b, t] - top).sum())
        for v in range(V):
            probability = label_smoothing / V + (1.0 - label_smoothing) * (v == targets[b, t])
            if probability > 0.0:
                total -= weights[b, t] * probability * log_probs[v]
    return float(total), float(weights.sum())


def _wide(x):
    return np.asarray(x, np.float64)


def _heads(params, name, x):
    """x W + bias of each head: B T N H."""
    x, weight = _wide(x), _wide(params[name])
    bias = np.broadcast_to(_wide(params.get(f"{name}_bias", 0.0)), weight.shape[1:])
    heads = np.zeros((*x.shape[:2], *weight.shape[1:]))
    for b, t, n in np.ndindex(heads.shape[:3]):
        heads[b, t, n] = x[b, t] @ weight[:, n] + bias[n]
    return heads


def _residual(norm_params, x, sublayer, *, norm, eps):
    match norm:
        case "post":
            return _normalized(norm_params, _wide(x) + sublayer(x), eps)
        case "pre":
            return _wide(x) + sublayer(_normalized(norm_params, x, eps))
        case other:
            raise ValueError(f"norm placement must be 'pre' or 'post', got {other!r}")


def _normalized(params, x, eps):
    """RMSNorm is the one that has no bias."""
    return (layer_norm if "bias" in params else rms_norm)(params, x, eps=eps)

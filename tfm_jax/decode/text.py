"""From strings to strings: translations of lines, continuations of prompts, all at once or as they are written."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax import config
from tfm_jax.config import require
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.beam import BeamSettings, Hypotheses
from tfm_jax.decode.constraints import Constraints
from tfm_jax.decode.generate import Prompts, SampleSettings, begin, continued, generate
from tfm_jax.decode.sampling import GREEDY, Sampling
from tfm_jax.models import Model
from tfm_jax.sharding import on_host


@dataclass(frozen=True)
class Output:
    """One hypothesis: its text, score (see `BeamSettings.length_penalty`), ids with the end, and whether it ended."""

    text: str
    score: float
    ids: tuple[int, ...]
    ended: bool


BLANK = Output("", 0.0, (), True)
TOO_LONG = Output("", float("-inf"), (), False)


def translate(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    lines: list[str],
    *,
    decode: config.Decode,
    prefixes: list[str] | None = None,
    too_long: Literal["error", "drop"] = "error",
    where: Callable[[int], str] = lambda i: f"input:{i + 1}",
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[Output]]:
    """Up to `decode.nbest` translations of each line, best first; blank lines stay blank.

    Lines of similar length share a batch, in few shapes, so a file of any lengths compiles a handful of programs. The
    result of a line does not depend on the others. `prefixes`: a text for each line that its translation begins with
    ("": any may); it is part of an output's text and ids, as are the decode.forced_ids before it, and the score is that
    of what follows it.

    A line that is too long for the model is refused, by its number, before any work, or with too_long "drop" comes back
    as `TOO_LONG`; a prefix that leaves no room for max_new_tokens is refused. `where(i)` is what errors call line i,
    counted from 0. `progress` is told how many lines are done. Raises `ValueError` for a model without an encoder, and
    `FloatingPointError` when it gives NaN.
    """
    require_encoder(model)
    # white space is not translated, so its length does not matter
    encoded = tokenizer.encode_sources([line.strip() and line for line in lines])
    longest = model.config.max_length
    for i, ids in enumerate(encoded):
        require(
            len(ids) <= longest or too_long == "drop",
            f"{where(i)}: the line has {len(ids)} tokens with its end, the model accepts {longest}: "
            "split it into sentences",
        )
    prefixes = [""] * len(lines) if prefixes is None else prefixes
    require(len(prefixes) == len(lines), f'{len(prefixes)} prefixes for {len(lines)} lines: one for each, "" for none')
    begun = [[tokenizer.bos_id, *(ids and [*decode.forced_ids, *ids])] for ids in tokenizer.encode(prefixes)]
    _require_room(model, begun, decode, where)
    results = [[BLANK] if len(ids) <= longest else [TOO_LONG] for ids in encoded]
    waiting = [i for i, line in enumerate(lines) if line.strip() and len(encoded[i]) <= longest]
    done = len(lines) - len(waiting)
    for first_try in (True, False):
        cut = []
        # few lines are tried again: one shape for all costs less than compiling one for each length
        sizes = {i: len(encoded[i]) if first_try else max(len(encoded[i]) for i in waiting) for i in waiting}
        for rows, length, how in _batches(sizes, begun, decode, longest):
            settings = search_settings(tokenizer, how, length=length if first_try else None)
            source = padded([encoded[i] for i in rows], length, tokenizer.pad_id)
            prompts = Prompts(*_prompts(tokenizer, [begun[i] for i in rows], model, settings), *source)
            found = _outputs(generate(params, prompts, model=model, settings=settings), tokenizer, begun, rows)
            for i, outputs in zip(rows, found, strict=True):
                outputs = [replace(output, ids=output.ids[1:]) for output in outputs]
                # outputs that all ended had no use for more room; the others get all there is
                if settings.max_new_tokens < decode.max_new_tokens and not all(output.ended for output in outputs):
                    cut.append(i)
                else:
                    results[i], done = outputs[: decode.nbest], done + 1
            progress(done)
        waiting = cut
    return results


def complete(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    prompts: list[str],
    *,
    decode: config.Decode,
    sampling: Sampling | None = GREEDY,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[Output]]:
    """What a decoder-only model writes after each prompt, which may be empty; text and ids are without the prompt.

    One output a prompt, drawn as `sampling` says (by default the likeliest token again and again), or with sampling
    None up to `decode.nbest` by beam search, best first. Draws depend on the seed and on the prompt's place in the
    list, not on how prompts share batches, whose shapes are few as in `translate`. Raises `ValueError`, before any
    work, for a model with an encoder and, by its number, for a prompt that leaves no room for max_new_tokens, and
    `FloatingPointError` when the model gives NaN.
    """
    require_no_encoder(model)
    begun = tokenizer.encode_prompts(prompts)
    _require_room(model, begun, decode, "prompts {}".format)
    sampled = sampling is not None
    settings = (
        _sample_settings(tokenizer, decode, sampling) if sampled else search_settings(tokenizer, decode, length=None)
    )
    results: list[list[Output]] = [[] for _ in prompts]
    done, room = 0, _room(model, settings.max_new_tokens)
    sizes = {i: len(ids) for i, ids in enumerate(begun)}
    for rows, _ in buckets(sizes, longest=room, budget=decode.tokens_per_batch // (1 if sampled else decode.beams)):
        read = _prompts(tokenizer, [begun[i] for i in rows], model, settings)
        requests = np.array([*rows, *rows[:1] * (len(read[0]) - len(rows))], np.int32)
        found = generate(params, Prompts(*read, requests=requests), model=model, settings=settings)
        for i, outputs in zip(rows, _outputs(found, tokenizer, begun, rows), strict=True):
            shown = len(tokenizer.decode([begun[i]])[0])
            results[i] = [replace(o, text=o.text[shown:], ids=o.ids[len(begun[i]) :]) for o in outputs[: decode.nbest]]
        done += len(rows)
        progress(done)
    return results


def stream(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    decode: config.Decode,
    sampling: Sampling = GREEDY,
    chunk: int = 1,
) -> Iterator[str]:
    """The text that `complete` gives for this prompt alone, in pieces as it is written, every `chunk` tokens.

    A character whose bytes are not all written yet waits for the others. Raises as `complete`, at once and not at the
    first piece.
    """
    require_no_encoder(model)
    require(chunk >= 1, f"chunk is {chunk}: at least 1 token is needed")
    (begun,) = tokenizer.encode_prompts([prompt])
    _require_room(model, [begun], decode, "prompts {}".format)
    settings = _sample_settings(tokenizer, decode, sampling)
    prompts = Prompts(*_prompts(tokenizer, [begun], model, settings))
    return pieces(tokenizer, begun, _tokens(model, params, prompts, settings, chunk))


def pieces(tokenizer: Tokenizer, begun: list[int], new: Iterable[list[int]]) -> Iterator[str]:
    """The text that new ids add to that of the ids begun with: no empty piece, no part of a character."""
    ids, shown = list(begun), len(tokenizer.decode([begun])[0])
    text = ""
    for some in new:
        ids += some
        text = tokenizer.decode([ids])[0]
        # the mark for bytes that are no character: what comes may complete them
        whole = text.removesuffix("\ufffd")
        if len(whole) > shown:
            yield whole[shown:]
            shown = len(whole)
    if text[shown:]:
        yield text[shown:]


def _tokens(model, params, prompts, settings, chunk) -> Iterator[list[int]]:
    writing, seen, ended = begin(params, prompts, model=model, settings=settings), 0, False
    while seen < settings.max_new_tokens and not ended:
        writing = continued(params, writing, jnp.int32(chunk), model=model, settings=settings)
        step, tokens, log_probs, (ended,) = on_host((writing.step, writing.tokens, writing.log_probs, writing.ended))
        _require_numbers(log_probs)
        yield tokens[0, seen:step].tolist()
        seen = int(step)


def one_line(text: str) -> str:
    """The text as a line of a file: a line feed that a model wrote must not shift what follows."""
    return text.replace("\n", " ")


def require_encoder(model: Model) -> None:
    """Raise `ValueError` unless the model translates: it has an encoder and a decoder."""
    _require_kind(model, "encoder-decoder", "translate")


def require_no_encoder(model: Model) -> None:
    """Raise `ValueError` unless the model continues a text: it is a decoder alone."""
    _require_kind(model, "decoder", "continue a text")


def _require_kind(model, wanted, what):
    family, kind = model.config.family, model.config.kind
    way = {
        "encoder-decoder": "it needs a source text (translate)",
        "decoder": "it has no encoder, it continues text (complete, on the command line generate)",
        "encoder": "it has no decoder, it reads text and writes none",
    }
    require(kind == wanted, f"a {family!r} model does not {what}: {way[kind]}")
    jax.eval_shape(model.output_layer, model.shapes)  # a model with another head says so here


def _require_numbers(log_probs: np.ndarray) -> None:
    if np.isnan(log_probs).any():
        raise FloatingPointError(
            "the model's logits are NaN, or no token may follow: its parameters are not finite (load another "
            "checkpoint), or the constraints forbid everything"
        )


def _room(model: Model, max_new_tokens: int) -> int:
    """The longest prompt, with its start: the last token written is never read."""
    return model.config.max_length - max_new_tokens + 1


def _require_room(model, begun, decode, where) -> None:
    """Raise `ValueError` unless all that the rows begin with fits."""
    room = _room(model, decode.max_new_tokens)
    for i, ids in enumerate(begun):
        over = len(ids) - room
        require(
            over <= 0,
            f"{where(i)}: {len(ids)} tokens, the start included, and max_new_tokens {decode.max_new_tokens} are {over} "
            "more than the model accepts: shorten the text or lower max_new_tokens",
        )


def _batches(sizes, begun, decode, longest) -> Iterator[tuple[list[int], int, config.Decode]]:
    """As `buckets`, and how each decodes: what has a prefix has read the forced tokens, and does not write them."""
    done = {i for i in sizes if decode.forced_ids and len(begun[i]) > 1}
    for apart, how in ((False, decode), (True, replace(decode, forced_ids=()))):
        group = {i: size for i, size in sizes.items() if (i in done) == apart}
        for rows, length in buckets(group, longest=longest, budget=decode.tokens_per_batch // decode.beams):
            yield rows, length, how


def search_settings(tokenizer: Tokenizer, decode: config.Decode, *, length: int | None = None) -> BeamSettings:
    """The search's settings, with room for twice the source and a little where a first try makes sense.

    The cache has a column for each token there may be, and most outputs are much shorter than the limit.
    Without early stopping of beams the limit itself decides when a row is done, so it is given whole.
    """
    limit = decode.max_new_tokens
    if length is not None and (decode.early_stopping is True or decode.beams == 1):
        limit = min(limit, 2 * length + 8 + decode.min_new_tokens + len(decode.forced_ids))
    return BeamSettings(
        beams=decode.beams,
        max_new_tokens=limit,
        length_penalty=decode.length_penalty,
        early_stopping=decode.early_stopping,
        eos_ids=decode.eos_ids or (tokenizer.eos_id,),
        pad_id=tokenizer.pad_id,
        normalization=decode.normalization,
        constraints=_constraints(decode),
    )


def _sample_settings(tokenizer: Tokenizer, decode: config.Decode, sampling: Sampling) -> SampleSettings:
    return SampleSettings(
        max_new_tokens=decode.max_new_tokens,
        eos_ids=decode.eos_ids or (tokenizer.eos_id,),
        pad_id=tokenizer.pad_id,
        sampling=sampling,
        constraints=_constraints(decode),
        length_penalty=decode.length_penalty,
        normalization=decode.normalization,
    )


def _constraints(decode: config.Decode) -> Constraints:
    return Constraints(
        decode.repetition_penalty,
        decode.no_repeat_ngram,
        decode.min_new_tokens,
        forced_first=decode.forced_ids,
        banned=decode.suppressed_ids,
    )


def buckets(sizes: Mapping[int, int], *, longest: int, budget: int) -> Iterator[tuple[list[int], int]]:
    """Rows of similar size with the length they are padded to, longest first (memory runs out early or never).

    sizes: the length of each row, none over `longest`. budget: rows x padded length of a batch; a row that alone is
    more goes alone.
    """
    found: dict[int, list[int]] = {}
    for i, size in sizes.items():
        found.setdefault(_rounded(size, longest), []).append(i)
    for length in sorted(found, reverse=True):
        # batches are filled up to powers of two, and those of a length are alike, so most lengths have one shape
        most, count = 1 << max(0, (budget // length).bit_length() - 1), len(found[length])
        size = -(-count // -(-count // most))
        for start in range(0, count, size):
            yield found[length][start : start + size], length


def _rounded(size: int, longest: int) -> int:
    """8, 12, 16, 24, 36, 52, ..., and at most `longest`."""
    length = 8
    while length < size:
        length += max(4, length // 2 // 4 * 4)
    return min(length, longest)


def padded(rows: list[list[int]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids, int32 `B length`; B is a power of two."""
    # filled up with a row that is there: an empty one would not know when to end
    rows = [*rows, *[rows[0]] * ((1 << (len(rows) - 1).bit_length()) - len(rows))]
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], np.int32)
    return tokens, (np.arange(length, dtype=np.int32)[None] < lengths[:, None]).astype(np.int32)


def _prompts(tokenizer, rows, model, settings) -> tuple[np.ndarray, np.ndarray]:
    longest = max(map(len, rows))
    # the start alone, as of every translation without a prefix, is a shape of its own
    length = 1 if longest == 1 else _rounded(longest, _room(model, settings.max_new_tokens))
    return padded(rows, length, tokenizer.pad_id)


def _outputs(found: Hypotheses, tokenizer: Tokenizer, begun: list[list[int]], rows: list[int]) -> list[list[Output]]:
    """Of each row, text and ids with what it began with, begun[row]; the arrays may have more rows."""
    found = on_host(found)
    _require_numbers(found.scores)
    outputs = []
    for b, row in enumerate(rows):
        real = [w for w, length in enumerate(found.lengths[b]) if length > 0]
        require(bool(real), "a text has no possible output: the constraints leave no token that may be written")
        ids = [(*begun[row], *found.tokens[b, w, : found.lengths[b, w]].tolist()) for w in real]
        texts = tokenizer.decode([list(some) for some in ids])
        more = [(float(found.scores[b, w]), some, bool(found.ended[b, w])) for w, some in zip(real, ids, strict=True)]
        outputs.append([Output(text, *rest) for text, rest in zip(texts, more, strict=True)])
    return outputs

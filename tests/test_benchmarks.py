"""A benchmark measures what it says, in a size that a test has time for; what the README shows is what was kept."""

import gzip
import itertools
import json
import lzma
import os
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmarks import attention, data, decode

RESULTS = Path(__file__).parents[1] / "experiments" / "results"
TINY = replace(
    attention.CONFIG,
    num_heads=2,
    head_size=8,
    memory_lengths=(64, 128),
    reference_memory_limit=64,
    speed=((1, 64), (1, 128)),
    blocks=(128,),
    mechanisms=(1, 64),
    short_batches=(2,),
    short_lengths=(64,),
    rounds=1,
    matrix_size=32,
)
CASE = {"batch", "length", "mechanism", "implementation", "status"}
TIMES = {"compile_seconds", "median_seconds", "fastest_seconds", "spread_seconds", "floor_seconds"}
TIMED = CASE | TIMES | {"rounds", "calls", "ratio", "floor_share"}


def test_importing_it_does_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    contents = runpy.run_path(attention.__file__, run_name="attention")
    assert contents["CONFIG"].json == "runs/attention.json"
    assert "python experiments/benchmarks/attention.py --json" in contents["__doc__"]
    assert not os.listdir() and capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a tiny run, on a platform whose fused kernel refuses float32."""
    path = tmp_path_factory.mktemp("benchmark") / "new" / "attention.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "FUSED", {jax.default_backend(): ("cudnn",)})
        attention.main(replace(TINY, json=str(path)))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_json_says_where_how_and_what(result):
    assert result["benchmark"] == "attention" and result["configuration"]["memory_lengths"] == [64, 128]
    assert set(result["device"]) == {"platform", "kind", "cores", "load_before", "load_after"}
    assert set(result["versions"]) == {"python", "jax", "jaxlib"}
    assert result["seconds"] > 0 and result["matrix_flops_per_second"] > 0
    assert all(set(row) == CASE | {"bytes"} and row["bytes"] > 0 for row in result["memory"])
    measured = [(row["length"], row["implementation"]) for row in result["memory"]]
    assert measured == [(64, "blockwise"), (64, "reference"), (128, "blockwise")]


def test_every_case_is_timed_or_says_why_not(result):
    rows = result["speed"] + result["mechanisms"] + result["short"]
    for row in rows:
        if row["implementation"] == "cudnn":
            assert set(row) == CASE and row["status"].startswith("refused: ")
        else:
            assert set(row) == TIMED and row["status"] == "measured" and row["rounds"] == 1
            assert all(row[name] > 0 for name in TIMED - CASE - {"spread_seconds"})
    names = {length: [r["implementation"] for r in result["speed"] if r["length"] == length] for length in (64, 128)}
    assert set(names[64]) == {"reference", "jax.nn", "cudnn", "blockwise"}
    assert set(names[128]) == {"reference", "jax.nn", "cudnn", "blockwise", "blockwise 128"}
    assert {row["mechanism"] for row in result["mechanisms"]} == set(attention.MECHANISMS)
    assert all(row["ratio"] == 1.0 for row in result["speed"] if row["implementation"] == "reference")


def test_the_floor_counts_visible_scores_alone(result):
    floor = {r["mechanism"]: r["floor_seconds"] for r in result["mechanisms"] if r["status"] == "measured"}
    one_score = 12 * 2 * 8 / result["matrix_flops_per_second"]
    assert floor["none"] == pytest.approx(64 * 64 * one_score)
    assert floor["causal"] == pytest.approx(64 * 65 / 2 * one_score)
    assert floor["window"] == pytest.approx((64 * 8 - 28) * one_score)
    assert floor["segments"] == pytest.approx(4 * 16 * 16 * one_score)
    assert floor["padding"] == pytest.approx(48 * 48 * one_score)


def test_the_tables_show_every_row(result):
    text = attention.markdown(result)
    assert "- memory of blockwise, T = 128 / half as long: " in text
    assert text.count("refused: ") == 3 * 4 + 9 + 2
    for mechanism in attention.MECHANISMS:
        assert f"| 1 | 64 | {mechanism} |" in text


@pytest.mark.parametrize("mechanism", ["none", "causal"])
def test_what_is_compared_computes_the_same(mechanism):
    cases = [attention.Case(3, 17, mechanism, name) for name in ("reference", "jax.nn", "blockwise 5")]
    reference, *others = [attention.program(case)(*attention.inputs(TINY, case)) for case in cases]
    for other in others:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5), reference, other)


def test_rounds_end_when_the_time_is_over():
    cases = [attention.Case(1, 5, "none", "reference")]
    (row,) = attention.race(replace(TINY, rounds=7, seconds=0.0), cases, 1.0)
    assert row["rounds"] == 3


def test_claims_are_those_of_what_was_measured():
    memory = [
        {"length": n, "implementation": name, "bytes": n * factor}
        for n, name, factor in ((8_192, "blockwise", 1), (16_384, "blockwise", 1), (16_384, "reference", 200))
    ]
    speed = [
        {"batch": batch, "length": length, "mechanism": mask, "implementation": name, "ratio": 0.3}
        for batch, length, mask, name in (
            (1, 64, "none", "blockwise"),
            (1, 512, "causal", "blockwise"),
            (1, 2_048, "none", "blockwise"),
            (1, 4_096, "causal", "blockwise"),
            (8, 2_048, "none", "blockwise"),
            (1, 2_048, "none", "jax.nn"),
        )
    ]
    claims = attention.claims({"memory": memory, "speed": speed})
    assert [(claim["limit"], claim["measured"]) for claim in claims] == [
        (2.2, 2.0),
        (0.01, 0.005),
        (1.1, 0.3),
        (0.75, 0.3),
        (0.5, 0.3),
    ]


def test_the_readme_shows_the_kept_result_which_keeps_its_promises():
    kept = json.loads((RESULTS / "attention_cpu.json").read_text(encoding="utf-8"))
    assert attention.markdown(kept) in (RESULTS / "README.md").read_text(encoding="utf-8")
    assert (RESULTS / "attention_cpu.png").exists()
    fields = ("memory_lengths", "speed", "num_heads", "head_size", "dtype")
    expected = json.loads(json.dumps({name: getattr(attention.CONFIG, name) for name in fields}))
    assert {name: kept["configuration"][name] for name in fields} == expected
    assert len(kept["claims"]) == 5 + 1 + 6
    assert [claim for claim in kept["claims"] if claim["measured"] > claim["limit"]] == []


TINY_DECODE = replace(
    decode.CONFIG, sizes=("tiny",), beams=(1, 2), vocab_size=300, sentences=3, source_length=5, new_tokens=4, rounds=1
)


def test_decoding_is_measured_with_its_floor(tmp_path, monkeypatch):
    small = {"d_model": 16, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    monkeypatch.setitem(decode.SIZES, "tiny", small)
    decode.main(replace(TINY_DECODE, json=str(tmp_path / "d.json"), matrix_size=16))
    result = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    assert [(row["size"], row["beams"]) for row in result["rows"]] == [("tiny", 1), ("tiny", 2)]
    for row in result["rows"]:
        assert row["tokens_per_second"] > 0 and row["compile_seconds"] > 0 and 0 < row["share_of_floor"]


def test_the_benchmarked_model_writes_as_many_tokens_as_it_may():
    model, params = decode.random_model("tiny", TINY_DECODE)
    sources = np.arange(3, 18, dtype=np.int32).reshape(3, 5)
    search, _ = decode.ours(model, params, sources, 2, TINY_DECODE)
    tokens = search()
    assert tokens.shape == (3, 4) and not np.isin(tokens, [decode.EOS, decode.PAD]).any()


def test_the_readme_shows_the_kept_result_of_decoding():
    """At least the speed of CTranslate2 at beam 4 on base, at least 0.85 of it on tiny, and the same outputs."""
    kept = json.loads((RESULTS / "decode_cpu.json").read_text(encoding="utf-8"))
    assert decode.markdown(kept) in (RESULTS / "README.md").read_text(encoding="utf-8")
    ratios = {(row["size"], row["beams"]): row["ratio"] for row in kept["rows"] if "peer" in row}
    assert ratios["base", 4] >= 1.0 and ratios["tiny", 4] >= 0.85
    assert all(row["same_outputs"] == 1.0 for row in kept["rows"] if "peer" in row)


def test_batches_are_measured_with_their_floor(tmp_path, capsys):
    """Of a text that is there in the folders where the real ones are."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(list("abcdefg"), size=3 + i % 7)) for i in range(97)]
    for name, language in itertools.product(("train", "val"), ("en", "de")):
        path = tmp_path / "multi30k" / "tok" / f"{name}.lc.norm.tok.{language}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.train.tokens.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    run = data.CONFIG.pairs
    model = replace(run.model, vocab_size=31, max_length=19, d_model=8, d_ff=8, num_heads=2)
    model = replace(model, num_encoder_layers=1, num_decoder_layers=1)
    sizes = {"max_length": 19, "tokens_per_batch": 152, "num_buckets": 2}
    config = replace(
        data.CONFIG,
        dir=str(tmp_path),
        json=str(tmp_path / "d.json"),
        pairs=replace(
            run, model=model, data=replace(run.data, merges=0, **sizes), decode=replace(run.decode, max_new_tokens=9)
        ),
        text=replace(data.CONFIG.text, **sizes),
        text_vocab=400,
        workers=(0,),
        batches=2,
        rounds=2,
        steps=2,
        shapes=1,
    )
    data.main(config)
    result = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    assert len(result["rows"]) == len(data.cases(config)) == 10 and result["train_loop"]["steps"] == 2
    for row in result["rows"]:
        assert 0 <= row["padding_share"] < 0.7 and 0 < row["slowest"] <= row["tokens_per_second"]
    assert 0 <= result["train_loop"]["input_wait"] < 1
    assert data.markdown(result) in capsys.readouterr().out


def test_the_readme_shows_the_kept_result_of_batches():
    """Little padding in few shapes, half a million tokens a second, and a train loop that does not wait."""
    kept = json.loads((RESULTS / "data_cpu.json").read_text(encoding="utf-8"))
    assert data.markdown(kept) in (RESULTS / "README.md").read_text(encoding="utf-8")
    claims = data.claims(kept)
    assert [claim["limit"] for claim in claims] == [0.10, 16, 0.03, 500_000.0, 0.02]
    assert [claim for claim in claims if not claim["holds"]] == []

"""A benchmark measures what it says, in a size that a test has time for; what the README shows is what was kept."""

import gzip
import importlib.util
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

from experiments.benchmarks import attention, data, decode, depth, train_step
from tfm_jax.config import Mesh
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import TransformerConfig

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


SMALL = {"d_model": 8, "num_heads": 2, "d_ff": 12}
SIDES = {"num_encoder_layers": 1, "num_decoder_layers": 1}
STEPS = {
    "tiny": train_step.Size(TransformerConfig(32, **SMALL, **SIDES, dropout=train_step.TENTH), 8, 6, 0.1),
    "gpt_small": train_step.Size(GPTConfig(13, **SMALL, **train_step.GPT, num_layers=1, max_length=7), 3, 7),
    "bert_tiny": train_step.Size(BERTConfig(14, **SMALL, num_layers=1, max_length=5), 4, 5, targets=0.5),
}
TINY_STEP = replace(train_step.CONFIG, rounds=2, turn_seconds=0.001, matrix_size=16)
SHOWN = {"size", "implementation", "seconds", "tokens_per_second", "first_step_seconds", "peak_memory"}
SHOWN |= {"matmul_fraction", "spread_seconds", "matrix_rate", "steps", "times"}


def measured_steps(config, name, tmp_path, monkeypatch):
    """The result of a run with a small model under the name of a large one."""
    monkeypatch.setitem(train_step.SIZES, name, STEPS[name])
    train_step.main(replace(config, sizes=(name,), json=str(tmp_path / "s.json")))
    return json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name, tokens, devices, change",
    [
        ("gpt_small", 21, 1, {}),
        ("bert_tiny", 20, 4, {"mesh": Mesh(data=2, model=2), "micro_batches": 2, "dtype": "bfloat16"}),
    ],
)
def test_steps_are_measured_with_their_floor(name, tokens, devices, change, tmp_path, monkeypatch, capsys):
    result = measured_steps(replace(TINY_STEP, **change), name, tmp_path, monkeypatch)
    assert result["configuration"]["dtype"] == change.get("dtype", "float32")
    assert result["device"]["devices"] == devices and result["configuration"]["matrix_size"] == 16
    (row,) = result["rows"]
    assert set(row) == SHOWN and row["size"] == name and row["implementation"] == "reference"
    assert row["first_step_seconds"] > row["seconds"] > 0 and len(row["times"]) == 2
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(tokens)
    floor = train_step.products(STEPS[name]) / row["matrix_rate"]
    assert row["matmul_fraction"] == pytest.approx(floor / row["seconds"])
    # parameters and the optimizer's two moments are there at once; that new ones replace the old is counted once
    state = 12 * build(STEPS[name].model).num_parameters
    assert state / devices < row["peak_memory"] < 12 * state
    assert train_step.markdown(result) in capsys.readouterr().out


def test_the_kept_train_steps_and_depths_are_shown():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    kept = json.loads((RESULTS / "train_step_cpu.json").read_text(encoding="utf-8"))
    assert train_step.markdown(kept) in page
    assert {row["size"] for row in kept["rows"]} == {*train_step.SIZES}
    assert {row["size"] for row in kept["rows"] if "peer" in row} == {*train_step.PEERS}
    kept = json.loads((RESULTS / "depth_cpu.json").read_text(encoding="utf-8"))
    assert depth.markdown(kept) in page


def of_layers(size, *sides):
    """Products of layers in a forward pass, from the equations: of each side, the numbers of attentions and layers."""
    config, tokens = size.model, size.rows * size.length
    projections, scores = 4 * config.d_model**2, 2 * size.length * config.d_model
    network = (3 if "geglu" in config.activation else 2) * config.d_model * config.d_ff
    layers = sum(layers * (attentions * (projections + scores) + network) for attentions, layers in sides)
    return 2 * tokens * layers


def test_the_floor_is_three_times_the_products_of_the_forward_pass():
    """Those of the layers as the paper counts them, and of the output layer, which all tokens go through."""
    output = lambda size: 2 * size.rows * size.length * size.model.d_model * size.model.vocab_size  # noqa: E731
    for name in ("tiny", "base", "t5_tiny"):
        size = train_step.SIZES[name]
        layers = size.model.num_encoder_layers
        forward = of_layers(size, (1, layers), (2, layers)) + output(size)
        assert train_step.products(size) == 3 * forward
    size = train_step.SIZES["gpt_large"]
    assert train_step.products(size) == 3 * (of_layers(size, (1, 6)) + output(size))
    size = train_step.SIZES["bert_tiny"]
    head = 2 * size.rows * size.length * size.model.d_model**2
    assert train_step.products(size) == 3 * (of_layers(size, (1, 4)) + head + output(size))


def test_a_step_is_of_the_size_that_its_name_promises():
    tokens = {name: size.tokens for name, size in train_step.SIZES.items()}
    assert tokens == {"tiny": 8192, "base": 2048, "gpt_small": 768, "gpt_large": 16384, "bert_tiny": 8192} | {
        "t5_tiny": 8192
    }
    for size in train_step.SIZES.values():
        assert train_step.implementation_of(replace(TINY_STEP, dtype="float32"), size) == "reference"
        batch = train_step.batch_of(size)
        assert batch["weights"].mean() == pytest.approx(size.targets, abs=0.01)
        assert batch["tokens"].shape == (size.rows, size.length) and batch["tokens"].max() < size.model.vocab_size
        assert ("source_tokens" in batch) == isinstance(size.model, TransformerConfig)
    assert isinstance(train_step.SIZES["bert_tiny"].model, BERTConfig)


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            {"mesh": Mesh(model=2)},
            "gpt_small: parameter embedding.table: .* size 65 does not divide over mesh axis model",
        ),
        ({"mesh": Mesh(data=8)}, "gpt_small has 12 rows of 64 tokens: .*, 8, must divide the rows"),
        ({"mesh": Mesh(sequence=3)}, "mesh.sequence, 3, the tokens"),
        ({"mesh": Mesh(fsdp=2), "micro_batches": 4}, "micro_batches, 8, must divide"),
        ({"mesh": Mesh(data=2), "peers": True}, "2 devices, torch runs on one"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_before_anything_runs(change, reason):
    with pytest.raises(ValueError, match=reason):
        train_step.chosen(replace(train_step.CONFIG, sizes=("gpt_small",), **change))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch, the peer, is not installed")
def test_torch_takes_the_same_step(tmp_path, monkeypatch):
    """By turns in a process of its own, with as many parameters: a last norm on each side is all that it has more."""
    mine, theirs = measured_steps(replace(TINY_STEP, peers=True), "gpt_small", tmp_path, monkeypatch)["rows"]
    assert set(mine) == SHOWN and set(theirs) == SHOWN | {"peer", "version", "ratio"}
    assert theirs["peer"] == theirs["implementation"] == "torch"
    assert theirs["ratio"] == pytest.approx(np.median(np.divide(theirs["times"], mine["times"])))
    for name, size in itertools.islice(STEPS.items(), 2):
        with train_step.in_torch(replace(TINY_STEP, dtype="bfloat16"), size) as (steps, said):
            last_norms = 4 * size.model.d_model if name == "tiny" else 0
            assert said["parameters"] == build(size.model).num_parameters + last_norms
            assert steps(2) > 0


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_the_reason_is_given():
    with pytest.raises(RuntimeError, match="install torch or leave out --peers"):
        with train_step.in_torch(TINY_STEP, STEPS["gpt_small"]):
            pass

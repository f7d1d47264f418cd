"""A run directory is enough: model, parameters and tokenizer by its path alone, wherever it is and however far."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import tfm_jax
from tests.hf.test_text import random_params, small
from tests.train.killed_run import MODEL, TRAIN, VALIDATION, tiny_run
from tfm_jax import hf
from tfm_jax.config import Mesh, Precision, to_dict
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models import build
from tfm_jax.sharding import make_mesh
from tfm_jax.train import loop
from tfm_jax.train.run import check_run, decode_settings, is_hf, load, open_run, read_config, write_result


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("run") / "run", steps=2, final="best")
    return loop.fit(run, train=TRAIN, validation=VALIDATION)


@pytest.fixture
def copy(fitted, tmp_path):
    return shutil.copytree(fitted.directory, tmp_path / "elsewhere" / "moved")


def assert_loads(directory, fitted):
    model, params, tokenizer = load(directory)
    assert model == fitted.model == build(MODEL)
    jax.tree.map(np.testing.assert_array_equal, params, fitted.params)
    assert tokenizer.encode(["abc ü"]) == fitted.tokenizer.encode(["abc ü"])
    return params


def edit(directory, change):
    path = directory / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_finished_run_loads_by_its_path(fitted):
    params = assert_loads(str(fitted.directory), fitted)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(params)} == {1}
    assert tfm_jax.load is load


def test_a_run_and_a_model_of_hugging_face_load_over_a_mesh(fitted, tmp_path):
    """In shards, and with the same numbers."""
    theirs, mesh = small("decoder", fitted.tokenizer.vocab_size), make_mesh(Mesh(fsdp=4))
    hf.save(tmp_path / "theirs", theirs, random_params(theirs), fitted.tokenizer)
    for directory, wanted, part in (
        (fitted.directory, fitted.params, (1, 2, 12)),
        (tmp_path / "theirs", random_params(theirs), (1, 3, 17)),
    ):
        _, params, _ = load(directory, mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
        up = params["decoder"]["layers"]["feed_forward"]["up"]
        assert {shard.data.shape for shard in up.addressable_shards} == {part}


def test_a_run_may_keep_its_parameters_in_bfloat16(tmp_path):
    """They are trained, saved, continued and loaded so; sums of gradients and the optimizer are float32."""
    narrow = Precision(params="bfloat16", compute="bfloat16")
    run = replace(tiny_run(tmp_path / "run", steps=2), precision=narrow)
    assert is_dtype(loop.fit(run, train=TRAIN, validation=VALIDATION).params, "bfloat16")
    shutil.rmtree(tmp_path / "run" / "parameters")  # as if it had been killed before its end
    again = loop.fit(run, train=TRAIN, validation=VALIDATION)
    _, params, _ = load(tmp_path / "run")
    assert is_dtype(params, "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, params, again.params)
    with pytest.raises(ValueError, match="precision.compute: 'float32', 'bfloat16'"):
        check_run(replace(run, precision=Precision()))


def is_dtype(tree, name):
    return {x.dtype.name for x in jax.tree.leaves(tree)} == {name}


def test_what_is_computed_twice_may_change(copy):
    """Out of memory, a run goes on with remat; unroll is a matter of time alone."""
    run = replace(read_config(copy), run_dir=str(copy))
    check_run(replace(run, model=replace(run.model, remat="full", unroll=2)))
    with pytest.raises(ValueError, match="model.d_ff: 16, 12"):
        check_run(replace(run, model=replace(run.model, d_ff=16)))


def test_a_moved_run_loads_and_continues(copy, fitted):
    """Only the place may differ from config.json, and config.json stays as it is."""
    shutil.move(fitted.directory, fitted.directory.with_name("away"))
    try:
        assert_loads(copy, fitted)
        before = (copy / "config.json").read_bytes()
        again = loop.fit(tiny_run(copy, steps=2, final="best"), train=TRAIN, validation=VALIDATION)
        jax.tree.map(np.testing.assert_array_equal, again.params, fitted.params)
        assert (copy / "config.json").read_bytes() == before
    finally:
        shutil.move(fitted.directory.with_name("away"), fitted.directory)


def test_a_run_that_has_not_ended_loads_its_newest_checkpoint(copy, fitted):
    """The directory is only read: a run that is going on there must not notice."""
    shutil.rmtree(copy / "parameters")
    before = sorted(copy.rglob("*"))
    assert_loads(copy, fitted)
    assert sorted(copy.rglob("*")) == before


def test_a_run_without_a_checkpoint_is_refused(copy):
    shutil.rmtree(copy / "parameters")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        load(copy)


def test_a_run_without_a_vocabulary_has_nothing_saved_yet(copy):
    for name in ("parameters", "checkpoints"):
        shutil.rmtree(copy / name)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="yet"):
        load(copy)


def test_a_directory_of_hugging_face_is_told_from_a_run(copy, fitted, tmp_path):
    """By model_type in its config.json; it says in its own files how it decodes, and how text is read."""
    assert not is_hf(copy) and decode_settings(copy) == fitted.run.decode
    assert load(copy)[2].template is None
    model = small("encoder-decoder", fitted.tokenizer.vocab_size)
    hf.save(tmp_path / "theirs", model, random_params(model), fitted.tokenizer)
    hf.save_generation(tmp_path / "theirs", {"num_beams": 3, "max_length": 9})
    assert is_hf(tmp_path / "theirs")
    theirs = decode_settings(tmp_path / "theirs")
    assert (theirs.beams, theirs.max_new_tokens, theirs.normalization) == (3, 8, "transformers")
    again, params, tokenizer = load(tmp_path / "theirs")
    assert again == model and tokenizer.template == ((), (tokenizer.eos_id,))
    jax.tree.map(np.testing.assert_array_equal, params, random_params(model))


def test_no_run_is_refused_by_its_path(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="holds no run, nor a model of Hugging Face") as refusal:
            load(directory)
        assert str(directory) in str(refusal.value)


def test_an_unknown_family_is_refused_with_those_there_are(copy):
    edit(copy, lambda values: values["model"].update(family="perceptron"))
    with pytest.raises(ValueError, match="perceptron.*transformer"):
        load(copy)


def test_a_family_that_is_missing_is_refused(copy):
    edit(copy, lambda values: values["model"].pop("family"))
    with pytest.raises(ValueError, match="family"):
        load(copy)


@pytest.mark.parametrize(
    "part, said",
    [
        ((), "config: unknown fields .'depth'"),
        (("model",), "config.model: unknown fields .'depth'"),
        (("model", "dropout"), "config.model.dropout: unknown fields .'depth'"),
        (("train",), "config.train: unknown fields .'depth'"),
    ],
)
def test_an_unknown_field_is_refused_by_its_name(copy, part, said):
    def add(values):
        for name in part:
            values = values[name]
        values["depth"] = 3

    edit(copy, add)
    with pytest.raises(ValueError, match=said):
        load(copy)


def test_a_run_older_than_a_field_is_continued(copy):
    """The field has there the value it has by default, and any other is a difference."""
    run = read_config(copy)
    younger = ("nbest", "normalization", "eos_ids", "forced_ids", "suppressed_ids")
    edit(copy, lambda values: [values["decode"].pop(name) for name in younger])
    check_run(replace(run, run_dir=str(copy)))
    with pytest.raises(ValueError, match="decode.normalization: 'gnmt', 'fairseq'"):
        check_run(replace(run, run_dir=str(copy), decode=replace(run.decode, normalization="gnmt")))


def test_a_run_older_than_rows_multiple_had_none(copy):
    """B48: continued with today's default it would see other batches, so that is a difference that is named."""
    run = read_config(copy)
    edit(copy, lambda values: values["data"].pop("rows_multiple"))
    assert read_config(copy).data.rows_multiple == 1
    with pytest.raises(ValueError, match=f"data.rows_multiple: {run.data.rows_multiple}, 1"):
        check_run(replace(run, run_dir=str(copy)))


def test_parameters_of_another_model_are_refused(copy):
    edit(copy, lambda values: values["model"].update(d_ff=16))
    with pytest.raises(ValueError, match="up.*12.*16"):
        load(copy)


def test_the_configuration_comes_back_equal(tmp_path):
    run = tiny_run(tmp_path / "run", steps=None, epochs=2)
    assert open_run(run, Tokenizer.train(["abc"], kind="bpe", vocab_size=260)) == tmp_path / "run"
    assert read_config(tmp_path / "run") == run
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == to_dict(run)


def test_a_result_is_flat_json_with_its_letters(tmp_path):
    result = {"bleu": 0.1 + 0.2, "signature": "größer", "steps": 7}
    path = write_result(tmp_path, result)
    assert path == tmp_path / "result.json"
    assert json.loads(path.read_text(encoding="utf-8")) == result
    assert "größer" in path.read_text(encoding="utf-8")

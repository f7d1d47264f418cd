"""Runs that begin with the parameters and the vocabulary of another model: with all of it, or with a new head (B60)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tests.hf.test_text import FIXTURES, LINES, SPECIALS, WRITTEN, directory_of, random_params, small
from tests.train.test_loop import Stopped, assert_bit_equal, from_update
from tfm_jax import hf
from tfm_jax.config import Data, Decode, Mesh, Optimizer, Run, Train
from tfm_jax.data.sources import Text
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig, Dropout
from tfm_jax.sharding import make_mesh
from tfm_jax.train import loop
from tfm_jax.train.checkpoint import save_params
from tfm_jax.train.pretrained import read_pretrained, read_vocabulary
from tfm_jax.train.run import PARAMETERS, check_run, load, open_run
from tfm_jax.train.step import abstract_params, init_state

LETTERS = "abcdefghijklmnopqr"
ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
MODEL = BERTConfig(
    len(ENTRIES),
    num_layers=2,
    d_model=8,
    d_ff=13,
    num_heads=4,
    max_length=24,
    norm_eps=2e-4,
    head="sequence",
    labels=("negative", "positive"),
    dropout=Dropout(embedding=0.1, residual=0.1, attention=0.1, feed_forward=0.0),
)
CLASSIFIER = ("classifier.dense", "classifier.dense_bias")
POOLER = ("pooler.dense", "pooler.dense_bias")


def bert_directory(directory, kind="bert-pooled"):
    """A small BERT of Hugging Face, with a WordPiece vocabulary of letters."""
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / kind / name, directory)
    vocabulary = {entry: i for i, entry in enumerate(ENTRIES)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(ENTRIES[:5])
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | roles))
    return directory


def labelled(count, *, seed):
    """Words whose first letter decides their label."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdef"), size=2 + i % 5)) for i in range(count)]
    return Text((words,), ("words",), np.array([word[0] < "d" for word in words], np.int32))


TRAIN, VALIDATION = labelled(37, seed=1), labelled(11, seed=2)


def run_of(directory, init_from, *, model=MODEL, mesh=None, data=None, **train):
    """Five updates of 8 rows, with a checkpoint every 2."""
    train = {"steps": 5, "checkpoint_every": 2, "log_every": 1, "label_smoothing": 0.0, "init_partial": True} | train
    labels = {"format": "tsv", "features": ("words",), "label": "label"} if data is None else data
    return Run(
        run_dir=str(directory),
        model=model,
        data=Data(**{"max_length": 13, "tokens_per_batch": 104, "num_buckets": 1} | labels),
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=3),
        train=Train(init_from=str(init_from), **train),
        decode=Decode(max_new_tokens=7),
        mesh=mesh or Mesh(),
    )


def fit(run, *, train=TRAIN, validation=VALIDATION):
    return loop.fit(run, train=train, validation=validation)


def begun(run, **texts):
    """(the parameters before the first update, what the run noted)."""
    seen, noted = [], []

    def act(state, take):
        seen.append(state.params)
        raise Stopped

    with from_update(1, act), pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop.ProgressBar, "note", lambda self, text: noted.append(text))
        fit(run, **texts)
    return seen[0], "\n".join(noted)


def by_name(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {".".join(key.key for key in path): x for path, x in leaves}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return bert_directory(tmp_path_factory.mktemp("theirs") / "bert")


def run_directory(directory, config, tokenizer):
    """A run that has ended, with random parameters."""
    model = build(config)
    data = Data(max_length=config.max_length)
    run = Run(config, Train(steps=1), str(directory), data, decode=Decode(max_new_tokens=1))
    save_params(open_run(run, tokenizer) / PARAMETERS, random_params(model))
    return directory


@pytest.fixture(scope="module")
def masked(theirs, tmp_path_factory):
    """A run of ours with a masked language model."""
    config = replace(MODEL, head="masked", labels=())
    return run_directory(tmp_path_factory.mktemp("masked") / "run", config, Tokenizer.load(theirs))


@pytest.fixture(scope="module")
def fitted(theirs, tmp_path_factory):
    """The run that nothing interrupts."""
    return fit(run_of(tmp_path_factory.mktemp("fitted") / "run", theirs))


# --- what a run begins with ---


@pytest.mark.parametrize("source", ["theirs", "masked"])
def test_a_new_head_is_random_and_the_rest_is_that_of_the_directory(request, tmp_path, source):
    """B60: bit for bit before the first update; what is new and what is left out is named."""
    directory = request.getfixturevalue(source)
    fresh = CLASSIFIER + (POOLER if source == "masked" else ())
    run = run_of(tmp_path / "run", directory)
    params, noted = begun(run)
    found, expected = by_name(params), by_name(load(directory)[1])
    assert found.keys() - expected == set(fresh)
    for name in found.keys() & expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    born = init_state(jax.random.key(0), model=build(MODEL), optimizer=run.optimizer, mesh=make_mesh(run.mesh))
    for name in fresh:
        np.testing.assert_array_equal(found[name], by_name(born.params)[name], err_msg=name)
    assert np.std(found["classifier.dense"]) > 0.01
    gone = sorted(expected.keys() - found)
    assert all(name.startswith("masked.") for name in gone) and bool(gone) == (source == "masked")
    pretrained = read_pretrained(build(MODEL), run.train)
    assert (pretrained.fresh, pretrained.left_out) == (fresh, tuple(gone))
    count = len(found) - len(fresh)
    assert f"{directory}: {count} arrays of parameters were read; new and random: {', '.join(fresh)}" in noted
    assert (f"; left out: {', '.join(gone)}" in noted) == bool(gone)


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_all_of_a_model(tmp_path, kind):
    """A run of ours and what is written of it for others give the same beginning, and nothing of it is random."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=53)
    model = small("decoder", tokenizer.vocab_size)
    source = run_directory(tmp_path / "run", model.config, tokenizer)
    if kind == "hf":
        hf.save(tmp_path / "hf", model, random_params(model), tokenizer)
        source = tmp_path / "hf"
    text = Text((LINES,), ("lines",))
    run = run_of(tmp_path / "new", source, model=model.config, data={}, init_partial=False)
    params, noted = begun(run, train=text, validation=text)
    jax.tree.map(np.testing.assert_array_equal, params, random_params(model))
    assert f"{source}: {len(by_name(params))} arrays of parameters were read\n" in f"{noted}\n"
    again = Tokenizer.load(tmp_path / "new" / "tokenizer.json")
    assert again.encode(LINES) == tokenizer.encode(LINES) and again.template is None


@pytest.mark.parametrize(
    "mesh, axes", [(Mesh(data=2, fsdp=4), {"fsdp"}), (Mesh(data=2, fsdp=2, model=2), {"fsdp", "model"})]
)
def test_parameters_come_to_lie_in_their_shards(tmp_path, mesh, axes):
    """On a mesh every array has the bits of the directory and the sharding of a run that begins at random."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=40)
    model = build(replace(MODEL, vocab_size=40, d_ff=12, head="masked", labels=()))
    hf.save(tmp_path / "hf", model, random_params(model), tokenizer)
    config = replace(model.config, head="sequence", labels=MODEL.labels)
    params, _ = begun(run_of(tmp_path / "run", tmp_path / "hf", model=config, mesh=mesh))
    devices = make_mesh(mesh)
    for name, wanted in by_name(abstract_params(build(config), devices)).items():
        x = by_name(params)[name]
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim), name
        if not name.startswith(("classifier", "pooler")):
            np.testing.assert_array_equal(x, by_name(random_params(model))[name], err_msg=name)
    used = {axis for x in by_name(params).values() for axis in x.sharding.spec if axis and devices.shape[axis] > 1}
    assert used == axes


# --- what is refused ---


def refusal(init_from, config=MODEL, **train):
    with pytest.raises(ValueError) as error:
        read_pretrained(build(config), Train(steps=1, init_from=str(init_from), **train))
    return str(error.value)


def test_what_only_one_of_both_has_is_asked_for(masked, tmp_path):
    """B60: by name, on both sides, before anything is written."""
    with pytest.raises(ValueError) as error:
        fit(run_of(tmp_path / "run", masked, init_partial=False))
    said = str(error.value)
    missing, besides = said.split(" and has ")
    assert all(name in missing for name in CLASSIFIER + POOLER) and "masked." not in missing
    own = [name for name in by_name(build(replace(MODEL, head="masked", labels=())).shapes) if "masked." in name]
    assert len(own) == 5 and all(name in besides for name in own) and "train.init_partial" in besides
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"norm_eps": 1e-12}, "norm_eps: 1e-12, 0.0002"),
        ({"num_heads": 2}, "num_heads: 2, 4"),
        ({"vocab_size": 43}, "vocab_size: 43, 41"),
        ({"norm": "pre", "num_layers": 3}, "norm: 'pre', 'post'; num_layers: 3, 2"),
    ],
)
def test_another_switch_is_refused_by_its_field(theirs, change, said):
    """B58: also those that change no shape, with which the parameters would be another model's without a word."""
    message = refusal(theirs, replace(MODEL, **change), init_partial=True)
    assert f"{theirs} holds another model (field: asked for, there): {said}" in message


def test_another_family_is_refused(theirs):
    assert "family: 'gpt', 'bert'" in refusal(theirs, small("decoder", len(ENTRIES)).config, init_partial=True)


def test_another_shape_is_refused_by_its_name(theirs):
    """A longer model has more learned positions."""
    said = refusal(theirs, replace(MODEL, max_length=29), init_partial=True)
    assert (
        f"arrays in {theirs} have other shapes (asked for, there): position_embedding.table: (29, 8), (24, 8)" in said
    )


def test_the_longest_text_is_free_without_learned_positions(tmp_path):
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=53)
    config = replace(MODEL, vocab_size=tokenizer.vocab_size, positions="rope", d_model=16)
    source = run_directory(tmp_path / "run", config, tokenizer)
    longer = build(replace(config, max_length=31, dropout=Dropout(0.0, 0.0), implementation="reference"))
    found = read_pretrained(longer, Train(steps=1, init_from=str(source)))
    assert not found.fresh and not found.left_out


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ("positive", "negative")},  # the same shape: its numbers would mean the opposite
        {"labels": ("a", "b", "c")},
        {"head": "token"},
    ],
)
def test_a_layer_for_other_labels_is_another_one(fitted, change):
    """B60: only the same head with the same labels is found whole."""
    source, config = fitted.directory, replace(MODEL, **change)
    assert not read_pretrained(build(MODEL), Train(steps=1, init_from=str(source))).fresh
    said = refusal(source, config)
    assert "lacks classifier.dense, classifier.dense_bias and has " in said
    assert f"{config.labels}), ('sequence', {MODEL.labels})" in said
    found = read_pretrained(build(config), Train(steps=1, init_from=str(source), init_partial=True))
    assert found.fresh == CLASSIFIER and set(found.left_out) >= set(CLASSIFIER)


def test_where_nothing_is(tmp_path):
    assert "holds no run, nor a model of Hugging Face" in refusal(tmp_path / "none")


def test_a_vocabulary_cannot_come_from_two_places(theirs):
    with pytest.raises(ValueError, match="init_from brings its own vocabulary, leave the other out"):
        run_of("run", theirs, data={"tokenizer_file": "tokenizer.json"})
    with pytest.raises(ValueError, match="init_partial is True, but there is no init_from"):
        run_of("run", "")


# --- the vocabulary ---


def test_the_vocabulary_is_that_of_the_directory(theirs, fitted):
    """Text that spells a special token stays text, and the run reads it again as it was trained."""
    lines = ["a good film", "bad", "", "Zoo", "a [SEP] b [MASK]"]
    own, file = read_vocabulary(str(theirs)), tokenizers.Tokenizer.from_file(str(theirs / "tokenizer.json"))
    assert own.encode(lines[:-1]) == [file.encode(line, add_special_tokens=False).ids for line in lines[:-1]]
    special = {0, 2, 3, 4}
    assert not special.isdisjoint(load(theirs)[2].encode(lines[-1:])[0])
    assert special.isdisjoint(own.encode(lines[-1:])[0]) and own.template is None
    again = load(fitted.directory)[2]
    for tokenizer in (again, Tokenizer.load(fitted.directory / "tokenizer.json"), fitted.tokenizer):
        assert tokenizer.encode(lines) == own.encode(lines) and tokenizer.template is None
        roles = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.mask_id)
        assert roles == (0, 2, 3, 1, 4) and tokenizer.vocab_size == len(ENTRIES)
    assert read_vocabulary(str(fitted.directory)).encode(lines) == own.encode(lines)


@pytest.mark.parametrize("kind", SPECIALS)
def test_the_start_is_that_of_the_model(tmp_path, kind):
    """Of every family: config.json says what begins a decoder's output, and the run's own files keep it."""
    own = read_vocabulary(str(directory_of(kind, tmp_path / "theirs")))
    own.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path)
    theirs = hf.load(tmp_path / "theirs")[2]
    for tokenizer in (own, again):
        assert [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id] == [theirs.bos_id, theirs.eos_id, theirs.pad_id]
        assert tokenizer.encode(LINES) == theirs.encode(LINES) and tokenizer.template is None
        special = tokenizer.special_ids - {tokenizer.unk_id}
        assert all(special.isdisjoint(ids) for ids in tokenizer.encode(WRITTEN))


# --- stopping and going on ---


@pytest.mark.parametrize("update, left", [(4, None), (1, None), (1, "2.orbax-checkpoint-tmp-7")])
def test_a_run_that_stops_goes_on(theirs, fitted, tmp_path, update, left):
    """B47, B48: from its own checkpoint, without the directory it began with; before there is one, from that once more.

    What a kill during the first save leaves is no checkpoint.
    """
    source = shutil.copytree(theirs, tmp_path / "source")
    run = run_of(tmp_path / "run", source)
    with from_update(update, lambda state, take: (_ for _ in ()).throw(Stopped)), pytest.raises(Stopped):
        fit(run)
    if update > 2:
        shutil.rmtree(source)
    if left:
        (tmp_path / "run" / "checkpoints" / left).mkdir(parents=True)
    again = fit(run)
    assert_bit_equal(again.params, fitted.params)
    assert again.tokenizer.encode(["a bad film"]) == fitted.tokenizer.encode(["a bad film"])
    assert fit(run).summary["steps"] == 5


def test_another_beginning_is_another_run(fitted, theirs):
    """So the directory of a run is not continued with it."""
    run = fitted.run
    check_run(run)
    for change in ({"init_from": "elsewhere"}, {"init_from": "", "init_partial": False}):
        with pytest.raises(ValueError, match="another configuration") as error:
            fit(replace(run, train=replace(run.train, **change)))
        assert f"train.init_from: {change['init_from']!r}, {str(theirs)!r}" in str(error.value)


def test_it_learns(fitted):
    """Every array that was read has moved, and so has the new head."""
    before = by_name(load(Path(fitted.run.train.init_from))[1])
    after = by_name(fitted.params)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == before.keys() and fitted.summary["steps"] == 5

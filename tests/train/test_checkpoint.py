"""Checkpoints: what is restored is what was saved, whatever happened in between (B46, B47, I21)."""

import functools
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from tfm_jax.train.checkpoint import Checkpoints, DamagedCheckpoint, average_params, load_params, save_params

# What orbax leaves behind when it meets damage is reported by Python, and is what these tests are about.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
ROWS = 40  # a multiple of eight devices; the other sizes are primes


@pytest.fixture(scope="module", autouse=True)
def leave_no_warnings_to_other_tests():
    yield
    gc.collect()


@functools.cache
def mesh(devices):
    return jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def place(devices, leaf):
    """The sharding of a leaf: rows over the devices where it has them."""
    rows = leaf.ndim == 2 and leaf.shape[0] == ROWS
    return NamedSharding(mesh(devices), PartitionSpec("x") if rows else PartitionSpec())


def make_state(seed, devices=1):
    """params, opt_state and rest with every kind of leaf, all different for each seed."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": {"table": jnp.asarray(rng.normal(size=(ROWS, 7)), jnp.float32)},
        "head": {"bias": jnp.asarray(rng.normal(size=5), jnp.bfloat16), "minus_zero": jnp.full(3, -0.0)},
    }
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)).init(params)
    opt_state = jax.tree.map(lambda leaf: leaf + jnp.asarray(seed, leaf.dtype), opt_state)
    rest = {
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "tokens": 2**40 + seed,
        "minutes": 0.1 + seed,
        "best": float("nan"),
        "done": True,
        "order": np.arange(11) + seed,
        "mask": jnp.arange(11) % 2 == 0,
    }
    state = {"params": params, "opt_state": opt_state, "rest": rest}
    return jax.tree.map(lambda x: jax.device_put(x, place(devices, x)) if isinstance(x, jax.Array) else x, state)


def abstract(tree, devices=1):
    def describe(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(devices, leaf))

    return jax.tree.map(lambda leaf: describe(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def content(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    return type(leaf).__name__, str(np.asarray(leaf).dtype), np.shape(leaf), np.asarray(leaf).tobytes()


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, one), other in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert content(one) == content(other), jax.tree_util.keystr(path)


def save_steps(directory, steps, *, keep_last=5, metrics=None):
    with Checkpoints(directory, keep_last=keep_last) as checkpoints:
        for step in steps:
            checkpoints.save(step, **make_state(step), metric=1.0 / step if metrics is None else metrics[step])
        return checkpoints


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.mark.parametrize("saved, restored", [(8, 8), (8, 1), (4, 1), (1, 8), (4, 8)])
def test_every_leaf_comes_back_bit_equal_on_any_device_count(tmp_path, saved, restored):
    """B46, I21: values, dtypes, keys, Python types and named tuples; the sharding is the one asked for."""
    state = make_state(3, saved)
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        checkpoints.save(3, **state, metric=1.0)
        step, loaded = checkpoints.restore(abstract(state, restored))
    assert step == 3
    assert_same(loaded, state)
    assert isinstance(loaded["opt_state"][1][0], optax.ScaleByAdamState)
    assert loaded["params"]["embed"]["table"].sharding == place(restored, state["params"]["embed"]["table"])


def test_no_directory_holds_no_step(tmp_path):
    """None only where there is no step at all; looking creates nothing, a killed first save counts as none."""
    checkpoints = Checkpoints(tmp_path / "absent", keep_last=1)
    assert checkpoints.restore(abstract(make_state(1))) is None
    assert checkpoints.steps == [] and checkpoints.best_step is None
    assert not (tmp_path / "absent").exists()
    (tmp_path / "1.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    assert Checkpoints(tmp_path, keep_last=1).restore(abstract(make_state(1))) is None


def test_trees_without_leaves(tmp_path):
    """Plain SGD has no state and a run need have nothing besides."""
    params = {"w": jnp.ones(3)}
    state = {"params": params, "opt_state": optax.sgd(0.1).init(params), "rest": {}}
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(0, **state, metric=0.0)
        step, loaded = checkpoints.restore(abstract(state))
    assert step == 0
    assert_same(loaded, state)


@pytest.mark.parametrize("devices", [1, 8])
def test_arrays_may_be_donated_and_overwritten_once_save_returns(tmp_path, devices):
    train_step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    sharding = NamedSharding(mesh(devices), PartitionSpec("x"))
    big = jax.device_put(np.random.default_rng(0).normal(size=(ROWS, 50_021)).astype(np.float32), sharding)
    want, params, order = np.array(big), {"w": big}, np.arange(1_000_003)
    train_step({"w": jax.device_put(want * 2, sharding)})  # compiled beforehand, so that it races with the writing
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, params=params, opt_state=(), rest={"order": order}, metric=0.0)
        order[:] = -7
        for _ in range(3):
            params = jax.block_until_ready(train_step(params))
        target = {"params": abstract(params, devices), "opt_state": (), "rest": {"order": order}}
        _, loaded = checkpoints.restore(target)
    np.testing.assert_array_equal(loaded["params"]["w"], want)
    np.testing.assert_array_equal(loaded["rest"]["order"], np.arange(1_000_003))


def test_kept_are_the_newest_and_the_best(tmp_path):
    """NaN is worse than anything, the earliest of equals is the best, as for patience."""
    metrics = {1: float("nan"), 2: 0.5, 3: 0.25, 4: 0.25, 5: float("nan"), 6: 9.0}
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    seen = []
    for step, metric in metrics.items():
        checkpoints.save(step, **make_state(step), metric=metric)
        seen.append((checkpoints.steps, checkpoints.best_step))
    assert seen == [([1], 1), ([1, 2], 2), ([2, 3], 3), ([3, 4], 3), ([3, 4, 5], 3), ([3, 5, 6], 3)]
    assert names(tmp_path) == ["3", "5", "6"]
    best = checkpoints.restore_params(3, abstract(make_state(3))["params"])
    assert_same(best, make_state(3)["params"])
    with pytest.raises(ValueError, match=r"holds no complete step 4; it holds \[3, 5, 6\]"):
        checkpoints.restore_params(4, abstract(make_state(3))["params"])


def test_a_step_that_is_not_newer_is_refused(tmp_path):
    checkpoints = save_steps(tmp_path, [5])
    for step in (5, 4, -1):
        with pytest.raises(ValueError, match=f"step {step} cannot be saved.*already holds step 5"):
            checkpoints.save(step, **make_state(1), metric=0.0)
    assert checkpoints.steps == [5]
    with pytest.raises(ValueError, match="keep_last is 0"):
        Checkpoints(tmp_path, keep_last=0)


def remove_everything(step):
    shutil.rmtree(step)
    step.mkdir()


def truncate_parameters(step):
    for path in step.glob("params/**/d/*"):
        os.truncate(path, path.stat().st_size // 2)


def remove_optimizer(step):
    shutil.rmtree(step / "opt_state")


def remove_manifest(step):
    (step / "_CHECKPOINT_METADATA").unlink()


def flip_metric(step):
    path = step / "_CHECKPOINT_METADATA"
    path.write_bytes(re.sub(rb'(\\"metric\\": )0', rb"\g<1>7", path.read_bytes()))


@pytest.mark.parametrize(
    "damage", [remove_everything, truncate_parameters, remove_optimizer, remove_manifest, flip_metric]
)
def test_restore_falls_back_to_the_last_sound_step(tmp_path, damage):
    """B47: the damaged step is set aside by name, and can be saved again."""
    checkpoints = save_steps(tmp_path, [1, 2, 3])
    damage(tmp_path / "3")
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    with pytest.warns(UserWarning, match=r"3 is (incomplete or )?damaged[\s\S]*3\.damaged; step 2 is used instead"):
        step, loaded = checkpoints.restore(abstract(make_state(2)))
    assert step == 2
    assert_same(loaded, make_state(2))
    checkpoints.save(3, **make_state(33), metric=0.0)
    step, loaded = checkpoints.restore(abstract(make_state(33)))
    assert step == 3
    assert_same(loaded, make_state(33))
    assert names(tmp_path) == ["1", "2", "3", "3.damaged"]


def test_two_damaged_steps_and_a_second_time(tmp_path):
    """B47: several in a row, and a number that was set aside before."""
    checkpoints = save_steps(tmp_path, [1, 2, 3])
    for step in ("2", "3", "3"):
        remove_everything(tmp_path / step) if (tmp_path / step).exists() else (tmp_path / step).mkdir()
        if step == "3":
            with pytest.warns(UserWarning, match="step 1 is used instead"):
                assert checkpoints.restore(abstract(make_state(1)))[0] == 1
    assert names(tmp_path) == ["1", "2.damaged", "3.damaged", "3.damaged-2"]


@pytest.mark.parametrize("files", ["params/ocdbt.process_0/d/*", pytest.param("**/*", marks=pytest.mark.slow)])
def test_a_flipped_byte_never_gives_another_state(tmp_path, files):
    """Three bytes of every file of a step: either they do not matter, or the step before is used."""
    save_steps(tmp_path / "run", [1, 2])
    target, outcomes = abstract(make_state(1)), []
    for path in [path for path in sorted((tmp_path / "run" / "2").glob(files)) if path.is_file()]:
        size, file = path.stat().st_size, path.relative_to(tmp_path / "run")
        for offset in sorted({size // 4, size // 2, size - 1} if size else ()):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(tmp_path / "run", tmp_path / "copy")
            flip(tmp_path / "copy" / file, offset)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                step, loaded = Checkpoints(tmp_path / "copy", keep_last=5).restore(target)
            assert_same(loaded, make_state(step))
            assert (step == 1) == any("2.damaged" in str(w.message) for w in caught), (file, offset)
            outcomes.append(step)
    assert 1 in outcomes


def test_digests_see_what_orbax_does_not(tmp_path, monkeypatch):
    """A value changed after reading stands for any fault below us; every damaged leaf is named."""
    save_steps(tmp_path, [1])
    loaded = make_state(1)
    loaded["params"]["head"]["bias"] = loaded["params"]["head"]["bias"].at[2].set(0)
    loaded["rest"]["tokens"] += 1
    monkeypatch.setattr("orbax.checkpoint.v1.load_checkpointables", lambda *_: loaded)
    with pytest.raises(DamagedCheckpoint, match=r"in params\['head'\]\['bias'\], rest\['tokens'\]"):
        Checkpoints(tmp_path, keep_last=1).restore(abstract(make_state(1)))


def test_no_usable_step_is_an_error_and_changes_nothing(tmp_path):
    """B47: never afresh in silence, and a fault of the disk must not rename a whole run."""
    checkpoints = save_steps(tmp_path, [1, 2])
    truncate_parameters(tmp_path / "2")
    remove_everything(tmp_path / "1")
    with pytest.raises(DamagedCheckpoint, match=r"holds no usable step:[\s\S]*2 is damaged[\s\S]*1 is incomplete"):
        checkpoints.restore(abstract(make_state(1)))
    assert names(tmp_path) == ["1", "2"]
    assert checkpoints.steps == [2]


def test_an_incomplete_step_does_not_count_towards_the_newest(tmp_path):
    """B47: retention with keep_last=1 beside an empty directory that has a step's name."""
    (tmp_path / "2").mkdir()
    (tmp_path / "1.deleting").mkdir()
    checkpoints = save_steps(tmp_path, [3], keep_last=1)
    remove_manifest(tmp_path / "3")
    checkpoints.save(4, **make_state(4), metric=1.0)
    assert checkpoints.steps == [4]
    assert names(tmp_path) == ["2", "3", "4"]


def test_another_model_is_one_error_that_names_every_difference(tmp_path):
    state = make_state(1)
    checkpoints = save_steps(tmp_path, [1])
    target = abstract(state)
    target["params"]["embed"]["rows"] = target["params"]["embed"].pop("table")
    target["params"]["head"]["bias"] = abstract(jnp.zeros(5))
    target["rest"] |= {"order": np.arange(13), "tokens": 1.0, "key": abstract(jax.random.key(1, impl="rbg"))}
    with pytest.raises(ValueError) as caught:
        checkpoints.restore(target)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "missing from the checkpoint: params['embed']['rows']",
        "only in the checkpoint: params['embed']['table']",
        "params['head']['bias']: bfloat16 (5,) in the checkpoint, float32 (5,) expected",
        "rest['key']: key<fry> () in the checkpoint, key<rbg> () expected",
        "rest['order']: numpy int64 (11,) in the checkpoint, numpy int64 (13,) expected",
        "rest['tokens']: int () in the checkpoint, float () expected",
    ]
    assert names(tmp_path) == ["1"]
    with pytest.raises(ValueError, match=r"params\['w'\] has no sharding"):
        checkpoints.restore_params(1, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    with pytest.raises(TypeError, match=r"rest\['note'\] is a str"):
        checkpoints.save(2, params={}, opt_state=(), rest={"note": "text"}, metric=0.0)


def test_a_failed_save_is_reported_and_the_step_can_be_saved_again(tmp_path):
    """B47: no space left, by a real limit on file sizes; the step before stays usable."""
    params = {"w": jax.device_put(np.random.default_rng(0).normal(size=(ROWS, 1009)), place(1, np.zeros((ROWS, 7))))}
    state = {"params": params, "opt_state": (), "rest": {}}
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    checkpoints.save(1, **state, metric=0.0)
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        checkpoints.save(2, **state, metric=0.0)
        with pytest.raises(RuntimeError, match=r"saving step 2 to .* failed: .*\n.*on disk: \[1\]; step 2 may be"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.restore(abstract(state))[0] == 1
    checkpoints.save(2, **state, metric=0.0)
    assert checkpoints.restore(abstract(state))[0] == 2
    assert names(tmp_path) == ["1", "2"]


def test_a_directory_that_cannot_be_made_is_reported_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError), Checkpoints(tmp_path / "file", keep_last=1) as checkpoints:
        checkpoints.save(1, **make_state(1), metric=0.0)


def run_and_kill(directory, delay):
    """The last step another process saw on disk, killed `delay` seconds after it began to write a later one."""
    command = [sys.executable, "-c", CHILD.format(tests=str(Path(__file__).parent), directory=str(directory))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as child:
        lines = [child.stdout.readline() for _ in range(3)]
        while not any(directory.glob("*.orbax-checkpoint-tmp")) and child.poll() is None:
            pass
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    return int([line for line in lines if line.endswith("\n")][-1])


CHILD = """
import itertools, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, {tests!r})
import test_checkpoint as t
checkpoints = t.Checkpoints({directory!r}, keep_last=2)
found = checkpoints.restore(t.abstract(t.make_state(0)))
state = None
for step in itertools.count(1 if found is None else found[0] + 1):
    checkpoints.save(step, **t.make_state(step, 8), metric=-float(step % 5))
    print(step - 1, flush=True)  # save() has waited for it
"""


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_last_complete_step_is_usable(tmp_path, kills):
    """B47: SIGKILL during asynchronous saves, again and again in one directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing was damaged, so nothing may be set aside
        for kill in range(kills):
            reported = run_and_kill(tmp_path, 0.03 * kill / kills)
            checkpoints = Checkpoints(tmp_path, keep_last=2)
            step, loaded = checkpoints.restore(abstract(make_state(0)))
            assert step in (reported, reported + 1)
            assert_same(loaded, make_state(step))
            assert reported in checkpoints.steps


@pytest.mark.parametrize("renames", [0, 1])
def test_killed_between_renames_the_old_parameters_are_there(tmp_path, monkeypatch, renames):
    """B47: the moment in which the old tree has moved and the new one not yet included."""
    path, old, new = tmp_path / "params", make_state(1)["params"], make_state(2)["params"]
    save_params(path, old)
    rename, calls = Path.rename, []

    def rename_or_die(self, target):
        if self.parent == tmp_path and self.name in ("params", "params.new"):
            calls.append(self.name)
            if len(calls) > renames:
                raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename_or_die)
        save_params(path, new)
    assert_same(load_params(path, abstract(old)), old)
    save_params(path, new)
    assert_same(load_params(path, abstract(old)), new)
    assert names(tmp_path) == ["params"]


def test_final_parameters_are_replaced_whole(tmp_path):
    """What an earlier kill left behind is used if nothing else is there, and cleaned by the next save."""
    path, old, new = tmp_path / "params", make_state(1)["params"], make_state(2)["params"]
    with pytest.raises(FileNotFoundError, match="save_params"):
        load_params(path, abstract(old))
    for tree in (old, new, old):
        save_params(path, tree)
        assert_same(load_params(path, abstract(old)), tree)
        assert names(tmp_path) == ["params"]
    path.rename(tmp_path / "params.old")
    (tmp_path / "params.new").mkdir()
    assert_same(load_params(path, abstract(old)), old)
    save_params(path, new)
    assert_same(load_params(path, abstract(old)), new)
    assert names(tmp_path) == ["params"]
    truncate_parameters(path)
    with pytest.raises(DamagedCheckpoint, match="params is damaged"):
        load_params(path, abstract(old))


def test_average_is_numpys_mean_in_float32():
    trees = [make_state(seed, 8)["params"] for seed in range(5)]
    mean = average_params(iter(trees))
    for path, leaf in jax.tree.leaves_with_path(mean):
        parts = [functools.reduce(lambda node, key: node[key.key], path, tree) for tree in trees]
        want = np.mean([np.asarray(part, np.float32) for part in parts], axis=0, dtype=np.float64)
        assert leaf.dtype == parts[0].dtype and leaf.sharding.is_equivalent_to(parts[0].sharding, leaf.ndim)
        rounding = 2.0**-8 if leaf.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.asarray(leaf, np.float64), want, rtol=rounding, atol=1e-6)
    assert_same(average_params(trees[:1]), trees[0])
    with pytest.raises(ValueError, match="no tree"):
        average_params([])
    with pytest.raises(ValueError):
        average_params([{"a": jnp.ones(2)}, {"b": jnp.ones(2)}])


def test_averaging_reads_one_checkpoint_at_a_time(tmp_path):
    checkpoints = save_steps(tmp_path, [1, 2])
    target = abstract(make_state(1))["params"]
    mean = average_params(checkpoints.restore_params(step, target) for step in checkpoints.steps)
    want = [np.asarray(make_state(step)["params"]["embed"]["table"]) for step in (1, 2)]
    np.testing.assert_array_equal(mean["embed"]["table"], (want[0] + want[1]) / np.float32(2))


def test_one_device_sharding(tmp_path):
    """A plain SingleDeviceSharding, as for decoding, loads what eight devices wrote."""
    params = make_state(1, 8)["params"]
    save_params(tmp_path / "params", params)
    sharding = SingleDeviceSharding(jax.devices()[3])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    loaded = load_params(tmp_path / "params", target)
    assert_same(loaded, params)
    assert loaded["head"]["bias"].sharding == sharding

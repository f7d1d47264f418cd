"""Parameters and training states on disk; the only file that imports orbax.

Orbax writes a directory beside its final name and renames it, so a killed save leaves no step behind. What it does not
notice (a flipped byte, another dtype, another model) is caught by a manifest saved with each checkpoint: shape, dtype
and crc32 of every leaf. A leaf is a jax array (sharded, a typed key, any dtype), a NumPy array or a Python int, float
or bool. In an abstract tree a jax array is a `jax.ShapeDtypeStruct` with the sharding it is wanted in, whatever number
of devices wrote it; any NumPy array of the right shape and dtype, and any number of the right type, stand for another.

Several processes with devices of one mesh call everything here together; they share the file system, each writes the
parts of arrays that its devices hold, and the digests are those of the whole arrays. What is no jax array must be the
same in all of them.
"""

import itertools
import json
import math
import operator
import shutil
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from tfm_jax.sharding import is_first_process, on_host

Tree = Any
PIECE_BYTES = 1 << 26


class DamagedCheckpoint(RuntimeError):
    """What is on disk is not what was saved, or not all of it."""


class Checkpoints:
    """The training states of a run, one directory a step, as a context manager that waits for pending saves.

    Kept are the `keep_last` newest steps and the best one: smallest metric, NaN the worst, the earliest among equals.
    A step is removed only once a newer one is completely on disk. One process at a time may save to a directory.
    """

    def __init__(self, directory: str | Path, *, keep_last: int):
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: at least 1 checkpoint must be kept")
        self.directory, self.keep_last = Path(directory).absolute(), keep_last
        self._pending = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """As `wait`."""
        self.wait()

    @property
    def steps(self) -> list[int]:
        """Complete steps, ascending. Waits for a pending save, as everything that looks at the directory does."""
        self.wait()
        return list(self._metrics())

    @property
    def best_step(self) -> int | None:
        """The step of the smallest metric, None without any step."""
        self.wait()
        return _best(self._metrics())

    def save(self, step: int, *, params: Tree, opt_state: Tree, rest: dict, metric: float) -> None:
        """Begin to write a step and return once everything is copied: the arrays may be donated at once.

        `metric` decides which step is the best. Raises `RuntimeError` when the save before this one failed, and
        `ValueError` unless `step` is newer than every step on disk.
        """
        self.wait()
        newest = max(self._paths(), default=-1)
        if operator.index(step) <= newest:
            raise ValueError(
                f"step {step} cannot be saved: {self.directory} already holds step {newest} and steps only grow; "
                "restore() first, or save to another directory"
            )
        items = {"params": params, "opt_state": opt_state, "rest": rest}
        self._pending = step, _write(self.directory / str(step), items, metric=float(metric))

    def wait(self) -> None:
        """Block until what was given to `save` is on disk. Raises `RuntimeError` if that failed, once."""
        if self._pending is None:
            return
        step, response = self._pending
        try:
            response.result()
        except Exception as error:
            self._pending = None
            raise RuntimeError(
                f"saving step {step} to {self.directory} failed: {error}\n"
                f"Complete steps on disk: {list(self._metrics())}; step {step} may be saved again."
            ) from error
        self._pending = None
        if is_first_process():
            self._prune()

    def restore(self, abstract: dict[str, Tree]) -> tuple[int, dict[str, Tree]] | None:
        """The newest step whose every byte is as it was saved: (step, trees). None if the directory holds no step.

        abstract: params, opt_state and rest (or some of them) as abstract trees. Newer steps that are incomplete or
        damaged are renamed `<step>.damaged` with a warning, and their numbers are free again. Raises
        `DamagedCheckpoint` if there are steps but none is usable (nothing is renamed then), and `ValueError` if a
        checkpoint is sound but holds another model.
        """
        self.wait()
        damaged = {}
        for step, path in sorted(self._paths().items(), reverse=True):
            try:
                trees = _read(path, abstract)
            except DamagedCheckpoint as error:
                damaged[path] = error
                continue
            for bad, reason in damaged.items() if is_first_process() else ():
                aside = _set_aside(bad)
                warnings.warn(f"{reason}\nIt is now {aside}; step {step} is used instead.", stacklevel=2)
            multihost_utils.sync_global_devices(f"{self.directory} read")
            return step, trees
        if damaged:
            raise DamagedCheckpoint(
                "\n".join([f"{self.directory} holds no usable step:", *map(str, damaged.values())])
                + "\nNothing was changed; to start afresh move the directory away."
            )
        return None

    def restore_params(self, step: int, abstract_params: Tree) -> Tree:
        """The parameters of one complete step, verified. Raises as `restore`, and `ValueError` if there is no such."""
        if step not in self.steps:
            raise ValueError(f"{self.directory} holds no complete step {step}; it holds {self.steps}")
        return _read(self.directory / str(step), {"params": abstract_params})["params"]

    def _paths(self) -> dict[int, Path]:
        """Every directory named like a step, complete or not."""
        return {int(path.name): path for path in self.directory.glob("*") if path.name.isdecimal() and path.is_dir()}

    def _metrics(self) -> dict[int, float]:
        """The metric of each complete step, ascending by step."""
        metrics = {}
        for step, path in sorted(self._paths().items()):
            try:
                metrics[step] = _manifest(path)["metric"]
            except DamagedCheckpoint:
                continue
        return metrics

    def _prune(self) -> None:
        metrics = self._metrics()
        keep = {*list(metrics)[-self.keep_last :], _best(metrics)}
        for step in metrics.keys() - keep:
            # Renamed first: a deletion killed half-way must not leave half a step.
            (self.directory / str(step)).rename(self.directory / f"{step}.deleting")
        for pattern in ("*.deleting", "*.orbax-checkpoint-tmp*"):
            for leftover in self.directory.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)


def save_params(directory: str | Path, params: Tree) -> None:
    """Write a tree of parameters and return when it is on disk; one that is there already is replaced.

    Killed at any moment, `load_params` finds the whole old or the whole new tree.
    """
    final = Path(directory).absolute()
    new, old = final.with_name(final.name + ".new"), final.with_name(final.name + ".old")
    primary = is_first_process()
    if primary:
        shutil.rmtree(new, ignore_errors=True)
    multihost_utils.sync_global_devices(f"{new} cleared")
    _write(new, {"params": params}).result()
    if primary:
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    multihost_utils.sync_global_devices(f"{final} written")


def load_params(directory: str | Path, abstract_params: Tree) -> Tree:
    """What `save_params` wrote, verified, in the shardings of `abstract_params`.

    Raises `FileNotFoundError`, `DamagedCheckpoint` (bytes changed or missing) or `ValueError` (another model).
    """
    path = Path(directory).absolute()
    old = path.with_name(path.name + ".old")
    if not path.exists() and not old.exists():
        raise FileNotFoundError(f"{path} does not exist: parameters written by save_params are expected there")
    return _read(path if path.exists() else old, {"params": abstract_params})["params"]


def average_params(trees: Iterable[Tree]) -> Tree:
    """The mean of parameter trees, leaf by leaf, summed in float32 and given back in each leaf's dtype and sharding.

    Takes one tree at a time, so an iterator needs memory for two. Averaging the last checkpoints: Vaswani et al. 2017,
    section 6.1. Raises `ValueError` for no tree and for trees that differ in structure.
    """
    total, dtypes, count = None, None, 0
    for tree in trees:
        count += 1
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, tree) if dtypes is None else dtypes
        tree = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
        total = tree if total is None else jax.tree.map(jnp.add, total, tree)
    if total is None:
        raise ValueError("average_params got no tree: at least one is needed")
    return jax.tree.map(lambda leaf, dtype: (leaf / float(count)).astype(dtype), total, dtypes)


def _best(metrics: dict[int, float]) -> int | None:
    return min(metrics, key=lambda step: (math.isnan(metrics[step]), metrics[step], step), default=None)


def _set_aside(path: Path) -> Path:
    names = itertools.chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{n}" for n in itertools.count(2)))
    return path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))


def _write(path: Path, items: dict[str, Tree], **facts):
    """Begin an atomic save of named trees with their manifest; `.result()` of what is returned waits for it."""
    leaves = {item: _leaves(item, tree) for item, tree in items.items()}
    records = {
        item: {name: _describe(name, leaf) | {"crc32": _crc32(leaf)} for name, leaf in named.items()}
        for item, named in leaves.items()
    }
    manifest = json.dumps({"leaves": records, **facts})
    # With directories made in the background, one that cannot be made leaves threads that hold up the exit 20 minutes.
    context = ocp.Context()
    context.asynchronous.create_directories_asynchronously = False
    with context:
        return ocp.save_checkpointables_async(
            path,
            {item: tree for item, tree in items.items() if leaves[item]},  # orbax refuses trees without leaves
            custom_metadata={"manifest": manifest, "crc32": zlib.crc32(manifest.encode())},
        )


def _read(path: Path, abstract: dict[str, Tree]) -> dict[str, Tree]:
    """The named trees of a checkpoint, compared before and verified after loading."""
    recorded = _manifest(path)["leaves"]
    _compare(path, recorded, abstract)
    wanted = {item: tree for item, tree in abstract.items() if jax.tree.leaves(tree)}
    trees, trouble = abstract, None
    try:
        trees = abstract | (ocp.load_checkpointables(path, wanted) if wanted else {})
    except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
        raise  # the trouble of this machine, not of the checkpoint
    except Exception as error:  # orbax has no error of its own for missing or unreadable files
        trouble = error
    # what one process cannot read is damaged for all: the digests are made together
    if multihost_utils.process_allgather(np.uint32(trouble is not None)).any():
        said = str(trouble or "another process cannot read it").partition(" [tensorstore_spec")[0]
        raise DamagedCheckpoint(f"{path} is damaged: {said}") from trouble
    changed = [
        name
        for item, tree in trees.items()
        for name, leaf in _leaves(item, tree).items()
        if _crc32(leaf) != recorded[item][name]["crc32"]
    ]
    if changed:
        raise DamagedCheckpoint(f"{path} is damaged: other bytes than were saved in {', '.join(changed)}")
    return trees


def _manifest(path: Path) -> dict:
    try:
        metadata = json.loads((path / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"]
        text, digest = metadata["manifest"], metadata["crc32"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is incomplete or damaged: no readable manifest ({error!r})") from error
    if zlib.crc32(text.encode()) != digest:
        raise DamagedCheckpoint(f"{path} is damaged: other bytes than were saved in the manifest")
    return json.loads(text)


def _compare(path: Path, recorded: dict[str, dict], abstract: dict[str, Tree]) -> None:
    """Raise one ValueError that names every leaf in which a checkpoint and the abstract trees differ."""
    ours, theirs = {}, {}
    for item, tree in abstract.items():
        theirs |= recorded.get(item, {})
        for name, leaf in _leaves(item, tree).items():
            ours[name] = _describe(name, leaf)
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
                raise ValueError(f"{name} has no sharding: give its jax.ShapeDtypeStruct the one to load it in")
    lines = [f"missing from the checkpoint: {name}" for name in ours if name not in theirs]
    lines += [f"only in the checkpoint: {name}" for name in theirs if name not in ours]
    lines += [
        f"{name}: {_say(theirs[name])} in the checkpoint, {_say(ours[name])} expected"
        for name in ours
        if name in theirs and _say(ours[name]) != _say(theirs[name])
    ]
    if lines:
        raise ValueError("\n  ".join([f"{path} does not fit the model:", *lines]))


def _leaves(item: str, tree: Tree) -> dict[str, Any]:
    return {f"{item}{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _describe(name: str, leaf: Any) -> dict:
    if type(leaf) in (bool, int, float):
        return {"dtype": type(leaf).__name__, "shape": []}
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        raise TypeError(f"{name} is a {type(leaf).__name__}: a jax or NumPy array, int, float or bool is expected")
    kind = "numpy " if isinstance(leaf, np.ndarray) else ""
    return {"dtype": f"{kind}{leaf.dtype}", "shape": list(leaf.shape)}


def _say(record: dict) -> str:
    return f"{record['dtype']} {tuple(record['shape'])}"


def _crc32(leaf: Any) -> int:
    """Of the whole array, however it is sharded."""
    if isinstance(leaf, jax.Array):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            # some rows at a time: each device gets a copy of what is gathered
            rows, digest = max(1, PIECE_BYTES * len(leaf) // max(1, leaf.nbytes)), 0
            for start in range(0, len(leaf), rows):
                digest = zlib.crc32(_bytes(on_host(leaf[start : start + rows])), digest)
            return digest
    return zlib.crc32(_bytes(leaf))


def _bytes(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

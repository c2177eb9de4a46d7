"""What a process does beside training: checks its own shards and writes down its share.

Arguments: a folder of models and the folder of a finished run, which also takes what is written.
"""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from purelora.checkpoint import retention, store
from purelora.commands import entry
from purelora.core import train_state, trees
from purelora.data import batches, examples
from purelora.formats import source as sources
from purelora.models import causal_lm
from purelora.multihost import runtime
from purelora.sharding import host_arrays, specs
from purelora.training import feed
from purelora.weights import hf_folder
from purelora.weights import load as weights_load
from tests.support import expert_files, tiny

SHARE: dict[str, Any] = {}  # What this process has read and written, by action.


def counted(name: str, action: Callable[[], Any]) -> Any:
    """The result of `action`, whose bytes read and written go into SHARE."""
    before = bytes_moved()
    result = action()
    SHARE[name] = {key: value - before[key] for key, value in bytes_moved().items()}
    return result


def bytes_moved() -> dict[str, int]:
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return {"read": int(counts["rchar"]), "written": int(counts["wchar"])}


def same(array: jax.Array, wanted: np.ndarray) -> bool:
    shards = array.addressable_shards
    return all(np.asarray(s.data).tobytes() == wanted[s.index].tobytes() for s in shards)


def check_weights(folder: pathlib.Path, mesh: Mesh) -> None:
    """Only float ones, so that nothing is read but what is kept."""
    source = hf_folder.open_folder(str(folder))
    model = causal_lm.from_hf(source.config, "folder", dtype="float32")
    placed = specs.shardings(specs.spec_tree(model.infos, mesh), mesh)
    loaded = counted("load", lambda: weights_load.load(source, model, model.infos, placed))
    SHARE["fingerprint"] = loaded.fingerprint
    for path, leaf in trees.flatten(loaded.tree).items():
        declared = model.flat_infos[path]
        layers = [source.read(name).array for name in model.hf_names[path]]
        layers = [layer.T if declared.is_transposed else layer for layer in layers]
        assert same(leaf, np.stack(layers) if declared.is_stacked else layers[0]), path


def check_experts(folder: pathlib.Path, layout: str, mesh: Mesh) -> None:
    """Experts over the devices."""
    stacks = dict(np.load(folder / "experts.npz"))
    source = hf_folder.open_folder(str(folder / layout))
    model = causal_lm.from_hf(source.config, "folder", dtype="float32")
    placed = expert_files.shardings(model, model.infos, mesh, "fsdp")
    loaded = counted(layout, lambda: weights_load.load(source, model, model.infos, placed))
    assert loaded.fingerprint == sources.identify(source, source.shapes())
    for path, leaf in trees.flatten(loaded.tree).items():
        assert same(leaf, stacks[path]), path


class Taken(list):
    """Notes which of its entries are taken."""

    def __init__(self, *entries: Any):
        super().__init__(*entries)
        self.numbers: set[int] = set()

    def __getitem__(self, number):
        self.numbers.add(number)
        return super().__getitem__(number)


def check_rows(mesh: Mesh) -> None:
    rows = Taken(examples.Example(np.full(5, i, np.int32), np.ones(5, bool)) for i in range(32))
    some = batches.Batches(rows, [[i] for i in range(32)], 32, 2, 6, seed=0, shuffle=True)
    wanted = some.batch(0)
    rows.numbers.clear()
    sharding = NamedSharding(mesh, specs.BATCH_SPEC)
    some.batch(0, host_arrays.own_indices(sharding, some.shape, dim=1))
    SHARE["rows"] = sorted(rows.numbers)
    for array, all_rows in zip(feed.first(some, mesh), wanted, strict=True):
        assert array.shape == all_rows.shape and same(array, all_rows)


def check_checkpoint(folder: pathlib.Path, mesh: Mesh) -> None:
    """Sharded arrays, saved in the background while they are donated, restored cut elsewhere."""
    value = np.random.default_rng(0).standard_normal((64, 64, 512)).astype(np.float32)
    cut, everywhere = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P())
    tree = host_arrays.place({"w": value, "v": -value}, {"w": cut, "v": cut})
    counters = (np.int32(7), np.int32(6), np.zeros(2, np.uint32))
    state = train_state.TrainState(
        tree, {}, *(host_arrays.place(array, everywhere) for array in counters)
    )
    keep = retention.Policy(last=2, every=None, best=False)
    saves = store.Checkpoints(folder, keep, in_background=True)
    jax.block_until_ready(state)

    def save() -> None:
        saves.save(7, state, {"config": {}})
        jax.jit(lambda t: jax.tree.map(lambda a: a * 0, t), donate_argnums=0)(state.trainable)
        saves.wait()

    counted("save", save)
    # The main process checks that a step is whole; the others take its word.
    saves.restore(
        7, jax.tree.map(lambda a: a, state)
    ) if runtime.is_main() else saves.mark_verified(7)
    for axis in (1, 0):
        restored = counted(f"restore {axis}", lambda: saves.restore(7, cut_along(axis, state)))  # noqa: B023
        assert same(restored.trainable["w"], value) and same(restored.trainable["v"], -value)
        assert int(restored.step) == 7
    saves.close()


def cut_along(axis: int, state: train_state.TrainState) -> train_state.TrainState:
    """What the state is like with its matrices cut along an axis."""
    mesh = state.step.sharding.mesh
    cut, everywhere = NamedSharding(mesh, P(*[None] * axis, "fsdp")), NamedSharding(mesh, P())
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=cut if a.ndim == 3 else everywhere
        ),
        state,
    )


def check_foreign_checkpoint(run: pathlib.Path, mesh: Mesh) -> None:
    """The checkpoint of a run of another number of processes, on this mesh."""
    checkpoints, step = store.find(run)
    leaves = checkpoints.leaves(step, "base")

    def sharded(array: np.ndarray) -> NamedSharding:
        axis = next((i for i, n in enumerate(array.shape) if n % 8 == 0), None)
        return NamedSharding(mesh, P() if axis is None else P(*[None] * axis, "fsdp"))

    like = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharded(array))
        for name, array in leaves.items()
    }
    restored = checkpoints.restore_extra(step, "base", trees.unflatten(like))
    for name, leaf in trees.flatten(restored).items():
        assert same(leaf, leaves[name]), name


def main() -> None:
    runtime.initialise(entry.processes([])[0])
    folder, run = map(pathlib.Path, sys.argv[1:])
    mesh = tiny.mesh(fsdp=8)
    check_weights(folder, mesh)
    for layout in ("own", "fused"):
        check_experts(folder, layout, mesh)
    check_rows(mesh)
    check_checkpoint(run / "own", mesh)
    check_foreign_checkpoint(run, mesh)
    (run / f"share.{jax.process_index()}").write_text(json.dumps(SHARE))
    runtime.finish()


main()

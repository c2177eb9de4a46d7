"""Checkpoints: bit-exact on every mesh, strict, atomic, and explained when they cannot be used."""

import gc
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from purelora import checkpoint, errors, state

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
META = {"config": {"lora.r": 8, "quant.skip": ("lm_head", "embed"), "steps": None}, "position": 3}

# Of several reads that fail, orbax awaits only the first.
unawaited = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def collected() -> Iterator[None]:
    """Collects reads that were never awaited while their warning is still ignored."""
    yield
    gc.collect()


def _mesh(devices: int) -> Mesh:
    shape = {8: (2, 4), 4: (1, 4), 1: (1, 1)}[devices]
    return jax.make_mesh(
        shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:devices]
    )


def _trainable(*, r: int = 8, layers: int = 2) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "layers": {
            "q_proj": {
                "lora_a": jax.random.normal(keys[0], (layers, 8, r)),
                "lora_b": jax.random.normal(keys[1], (layers, r, 4)),
            }
        }
    }


def _trained(trainable: dict[str, Any], *, impl: str = "threefry2x32") -> state.TrainState:
    """A state with moments and counts that are not zero."""
    fresh = state.create(trainable, TX, key=jax.random.key(7, impl=impl))
    opt_state = jax.tree.map(
        lambda leaf: leaf + 3 if leaf.dtype == jnp.int32 else jnp.cos(leaf) / 3, fresh.opt_state
    )
    # The first whole number that float32 cannot hold.
    return fresh._replace(opt_state=opt_state, step=jnp.int32(16777217))


def _shardings(tree: Any, mesh: Mesh) -> Any:
    """Adapters split over fsdp, all else replicated."""
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, P(None, "fsdp") if leaf.ndim == 3 else P()), tree
    )


def _like(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        _shardings(tree, mesh),
    )


def _bits(tree: Any) -> Any:
    """Every leaf as the bytes of its values, with its dtype and shape."""

    def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
        data = (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        return str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()

    return jax.tree.map(bits, tree)


@pytest.fixture
def trained() -> state.TrainState:
    return _trained(_trainable())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[checkpoint.Checkpoints]:
    opened = checkpoint.Checkpoints(tmp_path / "checkpoints", keep_last=3)
    yield opened
    opened.close()


def _refused(action: Callable[[], Any]) -> errors.CheckpointError:
    with pytest.raises(errors.CheckpointError) as caught:
        action()
    return caught.value


@pytest.mark.parametrize("to_devices", [8, 4, 1])
@pytest.mark.parametrize("from_devices", [8, 1])
def test_restores_bit_for_bit_on_any_mesh(
    checkpoints: checkpoint.Checkpoints,
    trained: state.TrainState,
    from_devices: int,
    to_devices: int,
) -> None:
    placed = jax.device_put(trained, _shardings(trained, _mesh(from_devices)))
    checkpoints.save(5, placed, META)
    like = _like(trained, _mesh(to_devices))
    restored = checkpoints.restore(5, like)

    assert jax.tree.structure(restored) == jax.tree.structure(trained)
    assert _bits(restored) == _bits(trained)
    jax.tree.map(lambda got, want: chex.assert_equal(got.sharding, want.sharding), restored, like)
    assert restored.step.dtype == jnp.int32 and int(restored.step) == 16777217


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_keeps_its_implementation_and_draws(
    checkpoints: checkpoint.Checkpoints, impl: str
) -> None:
    trained = _trained(_trainable(), impl=impl)
    checkpoints.save(1, trained, META)
    restored = checkpoints.restore(1, _like(trained, _mesh(8)))
    assert jax.random.key_impl(restored.key) == impl
    draw = jax.random.bits(jax.random.fold_in(trained.key, 3), (4,))
    chex.assert_trees_all_equal(jax.random.bits(jax.random.fold_in(restored.key, 3), (4,)), draw)


def test_reopened_folder_restores(tmp_path: Path, trained: state.TrainState) -> None:
    for step in (1, 2):
        opened = checkpoint.Checkpoints(tmp_path, keep_last=3)
        opened.save(step, trained._replace(step=jnp.int32(step)), META)
        opened.close()
    reader = checkpoint.Checkpoints(tmp_path, keep_last=3)
    assert reader.steps() == [1, 2]
    assert [int(reader.restore(step, _like(trained, _mesh(1))).step) for step in (1, 2)] == [1, 2]


def _with(tree: state.TrainState, path: Sequence[str], leaf: Any) -> state.TrainState:
    """`tree` with one trainable leaf replaced, added, or taken out if `leaf` is None."""
    trainable = jax.tree.map(lambda same: same, tree.trainable)
    node = trainable
    for name in path[:-1]:
        node = node.setdefault(name, {})
    if leaf is None:
        del node[path[-1]]
    else:
        node[path[-1]] = leaf
    return tree._replace(trainable=trainable)


Q = ("layers", "q_proj", "lora_a")
EXTRA = jax.ShapeDtypeStruct((3,), jnp.float32)

MISMATCHES = {
    "r": (
        lambda saved: _trained(_trainable(r=4)),
        [
            "trainable.layers.q_proj.lora_a: saved float32[2, 8, 8], wanted float32[2, 8, 4]",
            "trainable.layers.q_proj.lora_b: saved float32[2, 8, 4], wanted float32[2, 4, 4]",
            "opt_state.1.mu.layers.q_proj.lora_a: saved float32[2, 8, 8], wanted float32[2, 8, 4]",
            "opt_state.1.mu.layers.q_proj.lora_b: saved float32[2, 8, 4], wanted float32[2, 4, 4]",
            "opt_state.1.nu.layers.q_proj.lora_a: saved float32[2, 8, 8], wanted float32[2, 8, 4]",
            "opt_state.1.nu.layers.q_proj.lora_b: saved float32[2, 8, 4], wanted float32[2, 4, 4]",
        ],
    ),
    "layers": (
        lambda saved: _trained(_trainable(layers=3)),
        [
            f"{tree}.layers.q_proj.{leaf}: saved float32[2, 8, {n}], wanted float32[3, 8, {n}]"
            for tree in ("trainable", "opt_state.1.mu", "opt_state.1.nu")
            for leaf, n in (("lora_a", 8), ("lora_b", 4))
        ],
    ),
    "surplus": (
        lambda saved: _with(saved, Q, None),
        ["trainable.layers.q_proj.lora_a: saved float32[2, 8, 8], wanted absent"],
    ),
    "missing": (
        lambda saved: _with(saved, ("norm", "weight"), EXTRA),
        ["trainable.norm.weight: saved absent, wanted float32[3]"],
    ),
    "dtype": (
        lambda saved: _with(saved, Q, jax.ShapeDtypeStruct((2, 8, 8), jnp.bfloat16)),
        ["trainable.layers.q_proj.lora_a: saved float32[2, 8, 8], wanted bfloat16[2, 8, 8]"],
    ),
    "step": (
        lambda saved: saved._replace(step=jax.ShapeDtypeStruct((), jnp.float32)),
        ["step: saved int32[], wanted float32[]"],
    ),
    "key": (
        lambda saved: _trained(_trainable(), impl="rbg"),
        ["key: saved key<fry>[], wanted key<rbg>[]"],
    ),
    "untyped key": (
        lambda saved: saved._replace(key=jax.ShapeDtypeStruct((2,), jnp.uint32)),
        ["key: saved key<fry>[], wanted uint32[2]"],
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_every_mismatch_is_named_before_anything_is_read(
    checkpoints: checkpoint.Checkpoints,
    trained: state.TrainState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    change, expected = MISMATCHES[case]
    checkpoints.save(5, trained, META)
    like = _like(change(trained), _mesh(8))
    monkeypatch.setattr(
        ocp.Checkpointer, "restore", lambda *_, **__: pytest.fail("arrays were read")
    )
    error = _refused(lambda: checkpoints.restore(5, like))
    head, *leaves = map(str, error.problems)
    assert sorted(leaves) == sorted(expected)
    assert str(tmp_path / "checkpoints" / "5") in head and f"{len(expected)} leaves" in head


def test_steps_ascend_and_the_newest_are_kept(
    checkpoints: checkpoint.Checkpoints, trained: state.TrainState, tmp_path: Path
) -> None:
    assert checkpoints.steps() == [] and not (tmp_path / "checkpoints").exists()
    for step in (2, 9, 10, 100):
        checkpoints.save(step, trained, META)
    assert checkpoints.steps() == [9, 10, 100]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "100", "9"]


def test_the_step_just_saved_is_kept(tmp_path: Path, trained: state.TrainState) -> None:
    checkpoints = checkpoint.Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(8, trained, META)
    checkpoints.save(6, trained, META)
    assert checkpoints.steps() == [6]


def test_incomplete_steps_do_not_count_and_can_be_saved_again(
    checkpoints: checkpoint.Checkpoints, trained: state.TrainState, tmp_path: Path
) -> None:
    checkpoints.save(5, trained, META)
    folder = tmp_path / "checkpoints"
    for step, part in enumerate(["commit_success.txt", "_CHECKPOINT_METADATA", "state", "meta"], 6):
        shutil.copytree(folder / "5", folder / str(step))
        gone = folder / str(step) / part
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    shutil.copytree(folder / "5", folder / f"10{ocp.utils.TMP_DIR_SUFFIX}")
    shutil.copytree(folder / "5", folder / "best")
    (folder / "11").mkdir()
    (folder / "12").write_text("a file")
    assert checkpoints.steps() == [5]
    for step in (6, 10, 11, 12):
        error = _refused(lambda step=step: checkpoints.meta(step))
        assert str(folder / str(step)) in str(error) and "complete steps in this folder: 5" in str(
            error
        )

    checkpoints.save(6, trained, META)
    assert checkpoints.steps() == [5, 6]
    assert _bits(checkpoints.restore(6, _like(trained, _mesh(1)))) == _bits(trained)
    assert not list(folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}"))
    assert (folder / "best").exists() and (folder / "7").exists()


def test_a_complete_step_is_never_replaced(
    checkpoints: checkpoint.Checkpoints, trained: state.TrainState, tmp_path: Path
) -> None:
    checkpoints.save(5, trained, META)
    other = trained._replace(updates=jnp.int32(99))
    error = _refused(lambda: checkpoints.save(5, other, {"config": {}}))
    assert str(tmp_path / "checkpoints" / "5") in str(error) and "already" in str(error)
    assert _bits(checkpoints.restore(5, _like(trained, _mesh(1)))) == _bits(trained)
    assert checkpoints.meta(5)["position"] == 3


def _damages() -> dict[str, Callable[[Path], None]]:
    return {
        "gone": Path.unlink,
        "empty": lambda file: file.write_bytes(b"") and None,
        "cut": lambda file: (
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) and None
        ),
    }


@unawaited
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("damage", _damages())
def test_damage_to_any_file_is_an_error_or_harmless(
    checkpoints: checkpoint.Checkpoints, trained: state.TrainState, tmp_path: Path, damage: str
) -> None:
    """Harmless: the file is not read (orbax's record of the old mesh), so all comes back exact."""
    checkpoints.save(5, trained, META)
    step = tmp_path / "checkpoints" / "5"
    whole = shutil.copytree(step, tmp_path / "whole")
    files = [file.relative_to(whole) for file in whole.rglob("*") if file.is_file()]
    refused = set()
    for file in files:
        shutil.rmtree(step)
        shutil.copytree(whole, step)
        _damages()[damage](step / file)
        try:
            restored, meta = checkpoints.restore(5, _like(trained, _mesh(4))), checkpoints.meta(5)
        except errors.CheckpointError as error:
            assert str(step) in str(error)
            refused.add(file.name)
        else:
            assert _bits(restored) == _bits(trained) and meta == json.loads(json.dumps(META))
    assert {"_METADATA", "metadata", "manifest.ocdbt"} <= refused


@unawaited
@pytest.mark.usefixtures("collected")
def test_a_truncated_array_file_names_the_step(
    checkpoints: checkpoint.Checkpoints, tmp_path: Path
) -> None:
    big = _trained({"w": jax.random.normal(jax.random.key(0), (64, 256))})
    checkpoints.save(5, big, META)
    step = tmp_path / "checkpoints" / "5"
    largest = max(step.rglob("d/*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    error = _refused(lambda: checkpoints.restore(5, _like(big, _mesh(1))))
    assert f"{step}: is damaged" in str(error) and "earlier step" in str(error)


def test_what_cannot_be_written_is_explained(tmp_path: Path, trained: state.TrainState) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoints = checkpoint.Checkpoints(tmp_path / "file", keep_last=1)
    error = _refused(lambda: checkpoints.save(5, trained, META))
    assert str(tmp_path / "file" / "5") in str(error) and "cannot be written" in str(error)


def test_faults_of_the_program_are_not_called_damage(
    checkpoints: checkpoint.Checkpoints, trained: state.TrainState
) -> None:
    with pytest.raises(TypeError):
        checkpoints.save(5, trained, {"position": object()})
    assert checkpoints.steps() == []


def test_meta_comes_back_as_json(
    checkpoints: checkpoint.Checkpoints, trained: state.TrainState
) -> None:
    checkpoints.save(5, trained, META)
    config = {"lora.r": 8, "quant.skip": ["lm_head", "embed"], "steps": None}
    assert checkpoints.meta(5) == {"config": config, "position": 3}


def test_orbax_is_quiet_and_others_are_not(
    checkpoints: checkpoint.Checkpoints,
    trained: state.TrainState,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root_level = logging.root.level
    with caplog.at_level(logging.DEBUG, logger="absl"):
        checkpoints.save(5, trained, META)
        checkpoints.restore(5, _like(trained, _mesh(8)))
        logging.getLogger("absl").info("from the user's own program")
    assert [record.getMessage() for record in caplog.records if record.name == "absl"] == [
        "from the user's own program"
    ]
    assert logging.root.level == root_level


def _run(**changes: Any) -> dict[str, Any]:
    config = {
        "steps": 5,
        "workdir": "a",
        "lora.r": 8,
        "optim.learning_rate": 1e-4,
        "quant.skip": ("lm_head", "embed_tokens"),
    }
    meta = {"config": config, "base_fingerprint": "b1", "data_fingerprint": "d1"}
    for key, value in changes.items():
        place = meta if key in meta else config
        place[key.replace("__", ".")] = value
    return meta


def _saved(meta: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps({**meta, "versions": {"jax": "0"}}))
    return loaded


RESUMABLE = ("workdir", "steps")


def test_resumable_settings_may_differ() -> None:
    checkpoint.check_resumable(_saved(_run()), _run(), RESUMABLE)
    checkpoint.check_resumable(_saved(_run()), _run(steps=10, workdir="b"), RESUMABLE)


def test_all_other_differences_are_in_one_error() -> None:
    now = _run(lora__r=4, quant__skip=("lm_head",), data_fingerprint="d2", steps=10, new=True)
    saved = _saved(_run(gone=None))
    error = _refused(lambda: checkpoint.check_resumable(saved, now, RESUMABLE))
    texts = {problem.where: str(problem) for problem in error.problems}
    assert texts.keys() == {"lora.r", "quant.skip", "data_fingerprint", "new", "gone"}
    assert "lora.r = 4: was 8 when" in texts["lora.r"]
    assert "['lm_head', 'embed_tokens']" in texts["quant.skip"]
    assert "'d1'" in texts["data_fingerprint"] and "'d2'" in texts["data_fingerprint"]
    assert "not in the checkpoint" in texts["new"] and "no key of this version" in texts["gone"]
    assert all("workdir" in text for text in texts.values())


@pytest.mark.parametrize("name", ["base_fingerprint", "data_fingerprint"])
def test_each_fingerprint_must_agree(name: str) -> None:
    error = _refused(
        lambda: checkpoint.check_resumable(_saved(_run()), _run(**{name: "x"}), RESUMABLE)
    )
    assert [problem.where for problem in error.problems] == [name]

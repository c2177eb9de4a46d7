"""Checkpoints: bit-exact on every mesh, strict, atomic, and explained when they cannot be used."""

import json
import logging
import shutil
import threading
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

from configs import tiny as tiny_config
from purelora.checkpoint import compatibility, document, manifest, retention, store
from purelora.config import from_dict
from purelora.core import errors, train_state

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
META = {"config": {"lora.r": 8, "quant.skip": ("lm_head", "embed"), "steps": None}, "position": 3}


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


def _trained(trainable: dict[str, Any], *, impl: str = "threefry2x32") -> train_state.TrainState:
    """A state with moments and counts that are not zero."""
    fresh = train_state.create(trainable, TX, key=jax.random.key(7, impl=impl))
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
def trained() -> train_state.TrainState:
    return _trained(_trainable())


def _opened(
    folder: Path,
    *,
    last: int,
    every: int | None = None,
    best: bool = False,
    in_background: bool = False,
) -> store.Checkpoints:
    policy = retention.Policy(last=last, every=every, best=best)
    return store.Checkpoints(folder, policy, in_background=in_background)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[store.Checkpoints]:
    opened = _opened(tmp_path / "checkpoints", last=3)
    yield opened
    opened.close()


def _refused(action: Callable[[], Any]) -> errors.CheckpointError:
    with pytest.raises(errors.CheckpointError) as caught:
        action()
    return caught.value


@pytest.mark.parametrize("to_devices", [8, 4, 1])
@pytest.mark.parametrize("from_devices", [8, 1])
def test_restores_bit_for_bit_on_any_mesh(
    checkpoints: store.Checkpoints,
    trained: train_state.TrainState,
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
def test_key_keeps_its_implementation_and_draws(checkpoints: store.Checkpoints, impl: str) -> None:
    trained = _trained(_trainable(), impl=impl)
    checkpoints.save(1, trained, META)
    restored = checkpoints.restore(1, _like(trained, _mesh(8)))
    assert jax.random.key_impl(restored.key) == impl
    draw = jax.random.bits(jax.random.fold_in(trained.key, 3), (4,))
    chex.assert_trees_all_equal(jax.random.bits(jax.random.fold_in(restored.key, 3), (4,)), draw)


def test_reopened_folder_restores(tmp_path: Path, trained: train_state.TrainState) -> None:
    for step in (1, 2):
        opened = _opened(tmp_path, last=3)
        opened.save(step, trained._replace(step=jnp.int32(step)), META)
        opened.close()
    reader = _opened(tmp_path, last=3)
    assert reader.steps() == [1, 2]
    assert [int(reader.restore(step, _like(trained, _mesh(1))).step) for step in (1, 2)] == [1, 2]


def _with(tree: train_state.TrainState, path: Sequence[str], leaf: Any) -> train_state.TrainState:
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
    checkpoints: store.Checkpoints,
    trained: train_state.TrainState,
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
    checkpoints: store.Checkpoints, trained: train_state.TrainState, tmp_path: Path
) -> None:
    assert checkpoints.steps() == [] and not (tmp_path / "checkpoints").exists()
    for step in (2, 9, 10, 100):
        checkpoints.save(step, trained, META)
    assert checkpoints.steps() == [9, 10, 100]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "100", "9"]


def test_the_step_just_saved_is_kept(tmp_path: Path, trained: train_state.TrainState) -> None:
    checkpoints = _opened(tmp_path, last=1)
    checkpoints.save(8, trained, META)
    checkpoints.save(6, trained, META)
    assert checkpoints.steps() == [6]


def test_incomplete_steps_do_not_count_and_can_be_saved_again(
    checkpoints: store.Checkpoints, trained: train_state.TrainState, tmp_path: Path
) -> None:
    checkpoints.save(5, trained, META)
    folder = tmp_path / "checkpoints"
    for step in (6, 7):
        shutil.copytree(folder / "5", folder / str(step))
        (folder / str(step) / manifest.NAME).unlink()
    left = folder / f"10{ocp.utils.TMP_DIR_SUFFIX}"
    shutil.copytree(folder / "5", left)
    shutil.copytree(folder / "5", folder / "best")
    (folder / "11").mkdir()
    (folder / "12").write_text("a file")
    assert checkpoints.steps() == [5]
    for step in (6, 7, 10, 11, 12):
        error = _refused(lambda step=step: checkpoints.meta(step))
        assert str(folder / str(step)) in str(error) and "complete steps in this folder: 5" in str(
            error
        )
    newest = checkpoints.newest_whole()
    named = [passed.problem.where for passed in newest.passed_over]
    assert newest.step == 5
    assert named == [str(left), *(str(folder / str(step)) for step in (12, 11, 7, 6))]
    assert not any(passed.is_damage for passed in newest.passed_over)
    removed = [p.problem.where for p in newest.passed_over if "removes it" in p.problem.remedy]
    assert removed == [str(left), *(str(folder / str(step)) for step in (11, 7, 6))]

    checkpoints.save(6, trained, META)
    assert checkpoints.steps() == [5, 6]
    assert _bits(checkpoints.restore(6, _like(trained, _mesh(1)))) == _bits(trained)
    # What was promised, and no more.
    assert sorted(path.name for path in folder.iterdir()) == ["12", "5", "6", "best"]


def _unfinish(path: Path, meta: str | None) -> None:
    """Takes a step's manifest away, and gives it another meta, or none."""
    (path / manifest.NAME).unlink()
    if meta is None:
        shutil.rmtree(path / "meta")
    else:
        (path / "meta" / "metadata").write_text(meta)


@pytest.mark.parametrize(
    ("meta", "is_foreign"),
    [
        (f'{{"format": {document.FORMAT}, "config": {{}}}}', False),
        ("", False),  # What a failure of the machine can leave.
        ("\0" * 40, False),
        ('{"config": {}}', True),
        ('{"format": 1, "config": {}}', True),
        ("[1]", True),
        (None, True),
    ],
    ids=["ours", "empty", "zeros", "no format", "another format", "no table", "no meta"],
)
def test_what_another_version_left_is_told_from_a_killed_save(
    checkpoints: store.Checkpoints,
    trained: train_state.TrainState,
    tmp_path: Path,
    meta: str | None,
    is_foreign: bool,
) -> None:
    checkpoints.save(5, trained, META)
    checkpoints.save(7, trained, META)
    path = tmp_path / "checkpoints" / "7"
    _unfinish(path, meta)
    (passed,) = checkpoints.newest_whole().passed_over
    assert (passed.is_damage, passed.is_foreign) == (False, is_foreign)
    checkpoints.save(6, trained, META)
    assert path.exists() == is_foreign
    if is_foreign:
        error = _refused(lambda: checkpoints.save(7, trained, META))
        assert f"{path}: is no checkpoint that this version" in str(error)
        assert "another workdir, or delete" in str(error) and (path / "state").exists()
    else:
        checkpoints.save(7, trained, META)
        assert checkpoints.steps() == [5, 6, 7]


def test_find_names_what_another_version_left(
    checkpoints: store.Checkpoints, trained: train_state.TrainState, tmp_path: Path
) -> None:
    checkpoints.save(5, trained, META)
    _unfinish(tmp_path / "checkpoints" / "5", "{}")
    error = _refused(lambda: store.find(tmp_path))
    assert f"{tmp_path / 'checkpoints' / '5'}: is no checkpoint that this version" in str(error)


@pytest.mark.parametrize(
    ("found", "message"), [(None, "has no format number, this"), (9, "is of format 9, this")]
)
def test_a_step_of_another_format_is_not_read(
    checkpoints: store.Checkpoints,
    trained: train_state.TrainState,
    tmp_path: Path,
    found: int | None,
    message: str,
) -> None:
    checkpoints.save(5, trained, META)
    path = tmp_path / "checkpoints" / "5"
    file = path / "meta" / "metadata"
    meta = json.loads(file.read_text())
    assert meta.pop("format") == document.FORMAT
    file.write_text(json.dumps(meta if found is None else {**meta, "format": found}))
    (path / manifest.NAME).unlink()
    manifest.write(path)
    for read in (
        lambda: checkpoints.meta(5),
        lambda: checkpoints.check_fits(5, _like(trained, _mesh(1)), META, ()),
        lambda: store.find(path),
    ):
        error = _refused(read)
        assert f"{path}: was written by another version of purelora: it {message}" in str(error)
        assert f"reads {document.FORMAT}" in str(error)


def test_a_name_with_zeros_before_it_is_no_step(
    checkpoints: store.Checkpoints, trained: train_state.TrainState, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "007").mkdir(parents=True)
    checkpoints.save(5, trained, META)
    assert checkpoints.newest_whole() == (5, ())
    assert (tmp_path / "checkpoints" / "007").exists()


def test_a_folder_that_is_only_read_costs_no_thread_and_one_filter(
    trained: train_state.TrainState, tmp_path: Path
) -> None:
    _opened(tmp_path, last=3).save(5, trained, META)
    before = list(logging.getLogger("absl").filters)
    for _ in range(3):
        found, step = store.find(tmp_path)
        assert found.meta(step)["position"] == 3 and found._thread is None
        found.close()
    assert logging.getLogger("absl").filters == before


def test_a_complete_step_is_never_replaced(
    checkpoints: store.Checkpoints, trained: train_state.TrainState, tmp_path: Path
) -> None:
    checkpoints.save(5, trained, META)
    other = trained._replace(updates=jnp.int32(99))
    error = _refused(lambda: checkpoints.save(5, other, {"config": {}}))
    assert str(tmp_path / "checkpoints" / "5") in str(error) and "already" in str(error)
    assert _bits(checkpoints.restore(5, _like(trained, _mesh(1)))) == _bits(trained)
    assert checkpoints.meta(5)["position"] == 3


def test_what_cannot_be_written_is_explained(
    tmp_path: Path, trained: train_state.TrainState
) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoints = _opened(tmp_path / "file", last=1)
    error = _refused(lambda: checkpoints.save(5, trained, META))
    assert str(tmp_path / "file" / "5") in str(error) and "cannot be written" in str(error)


def test_faults_of_the_program_are_not_called_damage(
    checkpoints: store.Checkpoints, trained: train_state.TrainState
) -> None:
    with pytest.raises(TypeError):
        checkpoints.save(5, trained, {"position": object()})
    assert checkpoints.steps() == []


def test_meta_comes_back_as_json(
    checkpoints: store.Checkpoints, trained: train_state.TrainState
) -> None:
    checkpoints.save(5, trained, META)
    config = {"lora.r": 8, "quant.skip": ["lm_head", "embed"], "steps": None}
    assert checkpoints.meta(5) == {"config": config, "position": 3}


def test_orbax_is_quiet_and_others_are_not(
    checkpoints: store.Checkpoints,
    trained: train_state.TrainState,
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


def _problems(saved: dict[str, Any], now: dict[str, Any]) -> list[errors.Problem]:
    return compatibility.setting_problems(saved, now, RESUMABLE)


def test_resumable_settings_may_differ() -> None:
    assert not _problems(_saved(_run()), _run())
    assert not _problems(_saved(_run()), _run(steps=10, workdir="b"))


def test_all_other_differences_are_named() -> None:
    now = _run(lora__r=4, quant__skip=("lm_head",), data_fingerprint="d2", steps=10, new=True)
    found = _problems(_saved(_run(gone=None)), now)
    texts = {problem.where: str(problem) for problem in found}
    assert texts.keys() == {"lora.r", "quant.skip", "data_fingerprint", "new", "gone"}
    assert "lora.r = 4: was 8 when" in texts["lora.r"]
    assert "['lm_head', 'embed_tokens']" in texts["quant.skip"]
    assert "'d1'" in texts["data_fingerprint"] and "'d2'" in texts["data_fingerprint"]
    assert "not in the checkpoint" in texts["new"] and "no key of this version" in texts["gone"]
    assert all("workdir" in text for text in texts.values())


@pytest.mark.parametrize("name", ["base_fingerprint", "data_fingerprint"])
def test_each_fingerprint_must_agree(name: str) -> None:
    found = _problems(_saved(_run()), _run(**{name: "x"}))
    assert [problem.where for problem in found] == [name]


def test_settings_fingerprints_and_leaves_are_in_one_error(
    checkpoints: store.Checkpoints, trained: train_state.TrainState, tmp_path: Path
) -> None:
    checkpoints.save(5, trained, _run())
    fits = _like(trained, _mesh(8))
    checkpoints.check_fits(5, fits, _run(steps=9), RESUMABLE)
    other = _like(_with(trained, Q, EXTRA), _mesh(8))
    now = _run(lora__r=4, base_fingerprint="b2")
    error = _refused(lambda: checkpoints.check_fits(5, other, now, RESUMABLE))
    assert [problem.where for problem in error.problems] == [
        "lora.r",
        "base_fingerprint",
        str(tmp_path / "checkpoints" / "5"),
        "trainable.layers.q_proj.lora_a",
    ]


def _base() -> dict[str, Any]:
    """A frozen base with every dtype that one can have."""
    codes = jnp.arange(-7, 8).reshape(3, 5)
    return {
        "layers": {
            "w": {"qvalue": codes.astype(jnp.int8), "scale": jnp.ones((1, 5), jnp.float32)},
            "u8": (codes + 8).astype(jnp.uint8),
            "f8": codes.astype(jnp.float8_e4m3fn),
        },
        "embed": codes.astype(jnp.bfloat16),
    }


def test_extras_come_back_bit_for_bit(
    checkpoints: store.Checkpoints, trained: train_state.TrainState
) -> None:
    base, initial = _base(), {"q_proj": {"lora_a": jnp.ones((2, 3))}}
    checkpoints.save(5, trained, META, {"base": base, "initial": initial})
    mesh = _mesh(8)
    assert _bits(checkpoints.restore_extra(5, "base", _like(base, mesh))) == _bits(base)
    assert _bits(checkpoints.restore_extra(5, "initial", _like(initial, mesh))) == _bits(initial)
    assert _bits(checkpoints.restore(5, _like(trained, mesh))) == _bits(trained)


def test_extras_are_as_strict_as_the_state(
    checkpoints: store.Checkpoints, trained: train_state.TrainState
) -> None:
    base = _base()
    checkpoints.save(5, trained, META, {"base": base})
    other = {**base, "layers": {**base["layers"], "u8": base["layers"]["f8"]}, "new": base["embed"]}
    error = _refused(lambda: checkpoints.restore_extra(5, "base", _like(other, _mesh(1))))
    head, *leaves = map(str, error.problems)
    assert "2 leaves of the base" in head
    assert leaves == [
        "layers.u8: saved uint8[3, 5], wanted float8_e4m3fn[3, 5]",
        "new: saved absent, wanted bfloat16[3, 5]",
    ]
    error = _refused(lambda: checkpoints.restore_extra(5, "initial", {}))
    assert "holds no 'initial'" in str(error)


def test_leaves_are_read_without_knowing_them(
    checkpoints: store.Checkpoints, trained: train_state.TrainState
) -> None:
    base = _base()
    checkpoints.save(5, trained, META, {"base": base})
    read = checkpoints.leaves(5, "base")
    assert read.keys() == {
        "layers.w.qvalue", "layers.w.scale", "layers.u8", "layers.f8", "embed",
    }  # fmt: skip
    assert read["layers.u8"].dtype == np.uint8
    np.testing.assert_array_equal(read["layers.u8"], base["layers"]["u8"])
    adapters = checkpoints.leaves(5, "state", "trainable.")
    assert adapters.keys() == {f"trainable.layers.q_proj.lora_{n}" for n in "ab"}
    lora_a = trained.trainable["layers"]["q_proj"]["lora_a"]
    np.testing.assert_array_equal(adapters["trainable.layers.q_proj.lora_a"], lora_a)
    assert set(checkpoints.leaves(5, "state")) > {"step", "key", *adapters}


def test_a_checkpoint_without_base_is_the_adapters_and_two_moments(
    checkpoints: store.Checkpoints, tmp_path: Path
) -> None:
    noise = jax.random.normal(jax.random.key(0), (64, 128, 256))
    checkpoints.save(5, _trained({"w": noise}), META)
    sizes = [p.stat().st_size for p in (tmp_path / "checkpoints" / "5").rglob("*") if p.is_file()]
    assert 0 <= sum(sizes) - 3 * noise.nbytes < 1_000_000


def test_find_takes_a_run_its_checkpoints_or_a_step(
    trained: train_state.TrainState, tmp_path: Path
) -> None:
    folder = tmp_path / "7" / "checkpoints"  # A run's folder may be a number too.
    writer = _opened(folder, last=3)
    for step in (2, 10):
        writer.save(step, trained, META)
    for path, step in ((folder.parent, 10), (folder, 10), (folder / "2", 2)):
        found, number = store.find(path)
        assert number == step and found.meta(step)["position"] == 3
    (folder / "10" / "meta" / "metadata").write_text("{}")
    error = _refused(lambda: store.find(folder.parent))
    assert f"{folder / '10'}: is damaged" in str(error) and "name the folder" in str(error)
    assert store.find(folder / "2")[1] == 2
    for path in (tmp_path, tmp_path / "none", folder / "3"):
        assert str(path) in str(_refused(lambda path=path: store.find(path)))


LOSSES = {1: None, 5: 3.0, 10: 1.0, 15: float("nan"), 20: 2.0}


@pytest.mark.parametrize(
    ("policy", "keeps"),
    [
        (retention.Policy(last=1, every=None, best=False), {20}),
        (retention.Policy(last=3, every=None, best=False), {10, 15, 20}),
        (retention.Policy(last=9, every=None, best=False), {1, 5, 10, 15, 20}),
        (retention.Policy(last=1, every=5, best=False), {5, 10, 15, 20}),
        (retention.Policy(last=1, every=None, best=True), {10, 20}),
        (retention.Policy(last=2, every=None, best=True), {10, 15, 20}),
    ],
)
def test_what_is_kept(policy: retention.Policy, keeps: set[int]) -> None:
    assert retention.kept(policy, LOSSES, 20) == keeps


def test_the_best_and_every_so_many_steps_stay_on_disk(
    trained: train_state.TrainState, tmp_path: Path
) -> None:
    checkpoints = _opened(tmp_path, last=1, every=4, best=True, in_background=True)
    losses = {1: None, 2: 1.5, 3: 0.5, 4: 0.9, 5: 0.7, 6: 0.6}
    for step, loss in losses.items():
        checkpoints.save(step, trained, {**META, "eval_loss": loss})
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4, 6]


def test_a_background_save_holds_the_state_that_it_was_given(
    trained: train_state.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is donated to a step, which overwrites it, while the save has not begun."""
    checkpoints = _opened(tmp_path, last=3, in_background=True)
    wanted, like, go = _bits(trained), _like(trained, _mesh(1)), threading.Event()
    write = store.Checkpoints._write

    def late(self: store.Checkpoints, *arguments: Any) -> None:
        assert go.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(store.Checkpoints, "_write", late)

    def step(tree: train_state.TrainState) -> train_state.TrainState:
        return tree._replace(
            trainable=jax.tree.map(lambda leaf: leaf * 0 - 1, tree.trainable),
            opt_state=jax.tree.map(lambda leaf: leaf * 0, tree.opt_state),
            step=tree.step + 1,
        )

    overwrite = jax.jit(step, donate_argnums=0)
    checkpoints.save(5, trained, META)
    after = overwrite(trained)
    jax.block_until_ready(after.trainable)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trained.trainable)), "not donated"
    assert checkpoints.steps() == []
    go.set()
    checkpoints.wait()
    assert _bits(checkpoints.restore(5, like)) == wanted


def test_a_background_save_that_fails_is_an_error_of_the_next_call(
    trained: train_state.TrainState, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoints = _opened(tmp_path / "file", last=1, in_background=True)
    for then in (checkpoints.wait, lambda: checkpoints.save(6, trained, META)):
        checkpoints.save(5, trained, META)
        error = _refused(then)
        assert str(tmp_path / "file" / "5") in str(error) and "cannot be written" in str(error)
    checkpoints.wait()


def test_one_save_at_a_time_and_close_waits_for_it(
    trained: train_state.TrainState, tmp_path: Path
) -> None:
    checkpoints = _opened(tmp_path, last=9, in_background=True)
    for step in range(1, 6):
        checkpoints.save(step, trained._replace(step=jnp.int32(step)), META)
        assert checkpoints.steps()[: step - 1] == list(range(1, step))
    checkpoints.close()
    assert _opened(tmp_path, last=9).newest_whole() == (5, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_secs": 0.0}, "checkpoint.save_secs = 0.0: must be above 0"),
        ({"save_secs": float("nan")}, "checkpoint.save_secs = nan: must be above 0"),
        ({"keep_every": 0}, "checkpoint.keep_every = 0: must be from 1"),
        ({"keep_every": 5, "save_steps": None}, "no effect without checkpoint.save_steps"),
        ({"keep_best": True, "save_steps": None}, "no effect without checkpoint.save_steps"),
        ({"keep_best": True}, "checkpoint.keep_best = True: has no effect without evals"),
        ({"keep_best": True, "eval_steps": 15}, "eval_steps = 15: .*save_steps = 10 does not save"),
        ({"save_base": True, "lora.enabled": False}, "save_base = True: has no effect"),
        ({"async_save": "yes"}, "checkpoint.async_save = 'yes': must be True or False"),
        ({"save_first": 1}, "checkpoint.save_first = 1: must be True or False"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    raw = tiny_config.get_config().to_dict()
    for key, value in changes.items():
        section = raw if key == "eval_steps" else raw["checkpoint"]
        if key == "lora.enabled":
            raw["lora"]["enabled"], raw["quant"]["qtype"] = value, "none"
        else:
            section[key] = value
    with pytest.raises(errors.ConfigError, match=message):
        from_dict.parse(raw)


def test_settings_that_fit_together() -> None:
    raw = tiny_config.get_config().to_dict()
    raw["eval_steps"] = 20
    raw["checkpoint"].update(keep_best=True, keep_every=30, save_secs=1.5, save_base=True)
    assert from_dict.parse(raw).checkpoint.keep_every == 30

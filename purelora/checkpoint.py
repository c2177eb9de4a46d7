"""Checkpoints of a run: the whole train state and what it belongs to, one folder a step.

    <workdir>/checkpoints/<step>/state    arrays, one leaf per dotted path of the state (orbax)
                         /meta            JSON: config, fingerprints, versions, data position

Orbax writes a step under a temporary name and renames it when all of it is on disk, so a killed
save never looks complete. Restoring is strict: every leaf must have the shape and dtype that is
wanted. Nothing is cast, cut, padded, zero-filled or skipped.

This is the only module that imports orbax.
"""

import dataclasses
import functools
import json
import logging
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from purelora import errors, state

# Files and folders that a complete step has. Orbax itself accepts any folder with a number for a
# name, also one that was half copied.
_PARTS = ("commit_success.txt", "_CHECKPOINT_METADATA", "state", "meta")

_FINGERPRINTS = {
    "base_fingerprint": "the base is not the one that this run was started with",
    "data_fingerprint": "the training data is not that which this run was started with",
}


class Checkpoints:
    """The checkpoints in one folder, which one run at a time writes to.

    Nothing is created before the first `save`, so a folder can be opened just to read it.
    """

    def __init__(self, folder: Path, *, keep_last: int):
        """Opens `folder`; a save leaves the `keep_last` newest steps (at least 1)."""
        logging.getLogger("absl").addFilter(_without_orbax_chatter)
        self._folder = folder.absolute()
        self._keep_last = keep_last
        self._orbax = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.StandardCheckpointHandler(), meta=ocp.JsonCheckpointHandler()
            )
        )

    def steps(self) -> list[int]:
        """The complete steps, ascending."""
        if not self._folder.is_dir():
            return []
        numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        return sorted(step for step in set(numbers) if self._is_complete(step))

    def incomplete(self) -> list[str]:
        """Names of the step folders that hold no complete checkpoint."""
        if not self._folder.is_dir():
            return []
        names = [path.name for path in self._folder.iterdir() if path.name.isdecimal()]
        return sorted((n for n in names if not self._is_complete(int(n))), key=int)

    def save(self, step: int, state: state.TrainState, meta: Mapping[str, Any]) -> None:
        """Writes a step, waits until it is complete, then deletes the steps beyond `keep_last`.

        Args:
          step: the state's step.
          state: arrays, on any mesh.
          meta: what JSON can hold. Tuples come back as lists.

        Raises:
          CheckpointError: there is a complete checkpoint of this step, or it cannot be written.
        """
        path = self._path(step)
        if self._is_complete(step):
            remedy = "choose another workdir, or delete the folder"
            raise errors.CheckpointError(str(path), None, "already holds this step", remedy)
        flat = _flat(state)
        impls = {
            name: str(jax.random.key_impl(leaf)) for name, leaf in flat.items() if _is_key(leaf)
        }
        arrays = {
            name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
            for name, leaf in flat.items()
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays, custom_metadata={"key_impls": impls}),
            meta=ocp.args.JsonSave(dict(meta)),
        )
        with _Explained(path, "cannot be written", "free some space, or check the permissions"):
            # `force` lets orbax replace a folder of this step that is not complete.
            self._orbax.save(path, args=items, force=True)
        if jax.process_index() == 0:
            self._delete_old(step)

    def restore(self, step: int, like: state.TrainState) -> state.TrainState:
        """The state of a step, bit for bit.

        Args:
          step: one of `steps()`.
          like: the state as ShapeDtypeStructs with NamedShardings, on any mesh; the key is a
            typed key.

        Raises:
          CheckpointError: there is no such step, it is damaged, or leaves of it differ from `like`
            in path, shape or dtype. All those leaves are named, and no array has been read yet.
        """
        path = self._complete_path(step)
        saved, impls = self._saved(path)
        wanted = _flat(like)
        problems = list(_differences(saved, wanted))
        if problems:
            what = f"does not fit this run: {len(problems)} leaves of the state differ"
            remedy = "set the config back to that of the checkpoint, or choose another workdir"
            head = errors.Problem(str(path), None, what, remedy)
            raise errors.CheckpointError.of([head, *problems])

        arrays = {name: _key_data(leaf) if _is_key(leaf) else leaf for name, leaf in wanted.items()}
        with _damaged(path):
            read = self._orbax.restore(
                path, args=ocp.args.Composite(state=ocp.args.StandardRestore(arrays))
            )["state"]
        for name, impl in impls.items():
            read[name] = jax.random.wrap_key_data(read[name], impl=impl)
        leaves = [read[name] for name in wanted]
        restored: state.TrainState = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return restored

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given beside the state.

        Raises:
          CheckpointError: there is no such step, or it is damaged.
        """
        path = self._complete_path(step)
        with _damaged(path):
            items = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta: dict[str, Any] = self._orbax.restore(path, args=items)["meta"]
        if not isinstance(meta.get("config"), dict):
            what = "is damaged: its meta holds no config"
            raise errors.CheckpointError(str(path), None, what, "delete the folder")
        return meta

    def close(self) -> None:
        """Frees what orbax holds. Every save is complete when it returns, so none is lost."""
        self._orbax.close()

    def _saved(self, path: Path) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, str]]:
        """Shape and dtype of every saved leaf, and the implementations of those that are keys."""
        with _damaged(path):
            metadata = self._orbax.metadata(path).item_metadata["state"]
            if metadata is None:
                raise FileNotFoundError("the metadata of the state is missing")
            impls: dict[str, str] = metadata.custom_metadata["key_impls"]
            leaves = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                for name, leaf in metadata.tree.items()
            }
            for name, impl in impls.items():
                leaves[name] = _key_of(leaves[name], impl)
        return leaves, impls

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _is_complete(self, step: int) -> bool:
        return all((self._path(step) / part).exists() for part in _PARTS)

    def _complete_path(self, step: int) -> Path:
        path = self._path(step)
        if not self._is_complete(step):
            steps = ", ".join(map(str, self.steps())) or "none"
            remedy = f"complete steps in this folder: {steps}"
            raise errors.CheckpointError(str(path), None, "is not a complete checkpoint", remedy)
        return path

    def _delete_old(self, saved: int) -> None:
        """Deletes what killed saves left, and all but the newest steps and `saved`."""
        suffix = ocp.utils.TMP_DIR_SUFFIX
        for path in self._folder.glob(f"*{suffix}"):
            shutil.rmtree(path)
        others = [step for step in self.steps() if step != saved]
        for step in others[: max(0, len(others) - (self._keep_last - 1))]:
            # Renamed first: a folder that is half deleted must not look complete.
            shutil.rmtree(self._path(step).rename(self._folder / f"{step}{suffix}"))


def check_resumable(
    saved: Mapping[str, Any], now: Mapping[str, Any], resumable: Sequence[str]
) -> None:
    """Checks that a run can continue what a checkpoint holds.

    Args:
      saved: the checkpoint's meta: `config` (flat, by dotted key), and `base_fingerprint` and
        `data_fingerprint`. Other entries are not compared.
      now: the same of the present run.
      resumable: the config keys that may differ.

    Raises:
      CheckpointError: other keys or a fingerprint differ. All of them are named, with both values.
    """
    before, after = _settings(saved), _settings(now)
    problems = [
        _changed(key, before, after)
        for key in dict.fromkeys([*after, *before])
        if key not in resumable
        and (key not in before or key not in after or before[key] != after[key])
    ]
    if problems:
        raise errors.CheckpointError.of(problems)


def _settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """All that is compared, in the form that JSON gives it back."""
    prints = {name: meta[name] for name in _FINGERPRINTS if name in meta}
    settings: dict[str, Any] = json.loads(json.dumps({**meta["config"], **prints}))
    return settings


def _changed(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> errors.Problem:
    if key not in before:
        what = "is not in the checkpoint, which another version of purelora wrote"
        remedy = "continue with that version, or choose another workdir"
        return errors.Problem(key, after[key], what, remedy)
    if key not in after:
        what = "is in the checkpoint, but is no key of this version of purelora"
        remedy = "continue with the version that wrote it, or choose another workdir"
        return errors.Problem(key, before[key], what, remedy)
    if key in _FINGERPRINTS:
        remedy = f"bring back that of fingerprint {before[key]!r}, or choose another workdir"
        return errors.Problem(key, after[key], _FINGERPRINTS[key], remedy)
    what = f"was {before[key]!r} when this run was started"
    return errors.Problem(key, after[key], what, "set it back, or choose another workdir")


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path (`opt_state.0.mu.layers.q_proj.lora_a`)."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> jax.ShapeDtypeStruct:
    """The abstract data of an abstract key; its sharding fits them too, as data have a dim more."""
    data = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)


def _key_of(data: jax.ShapeDtypeStruct, impl: str) -> jax.ShapeDtypeStruct:
    """The abstract key of abstract data: the inverse of `_key_data`."""
    key: jax.ShapeDtypeStruct = jax.eval_shape(
        functools.partial(jax.random.wrap_key_data, impl=impl), data
    )
    return key


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[errors.Problem]:
    for name in dict.fromkeys([*wanted, *saved]):
        has = _describe(saved[name]) if name in saved else "absent"
        wants = _describe(wanted[name]) if name in wanted else "absent"
        if has != wants:
            yield errors.Problem(name, None, f"saved {has}, wanted {wants}", "")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


@dataclasses.dataclass(frozen=True)
class _Explained:
    """Turns what orbax raises about files into a CheckpointError that names the step folder.

    That is OSError, ValueError or KeyError, and for an array file that is cut short a bare
    `Exception`. No `except` can name that one alone, hence a context manager.
    """

    path: Path
    what: str
    remedy: str

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if kind is Exception or isinstance(error, (OSError, ValueError, KeyError)):
            # The bare one has the reason in its cause.
            cause = error.__cause__ if error is not None and kind is Exception else None
            what = f"{self.what} ({str(cause or error)[:300]})"
            raise errors.CheckpointError(str(self.path), None, what, self.remedy) from error


def _damaged(path: Path) -> _Explained:
    return _Explained(path, "is damaged", "delete the folder to continue from an earlier step")


def _without_orbax_chatter(record: logging.LogRecord) -> bool:
    """Keeps of orbax's records, which go to absl's logger, the warnings and errors."""
    return record.levelno >= logging.WARNING or "orbax" not in record.pathname

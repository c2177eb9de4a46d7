"""Exports the adapter of a checkpoint as a PEFT folder, and checks what was written.

The folder is read back, put on the base anew and must give the checkpoint's own logits; otherwise
it is removed again. An adapter whose initial value came out of the weights (pissa, olora, loftq) is
written for the original base, with twice the rank; there the update that the folder makes to each
weight is compared with what training added to it.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purelora.checkpoint import store
from purelora.config import from_dict, schema
from purelora.core import errors, trees
from purelora.core.batch import Inputs
from purelora.formats import atomic_output, source
from purelora.interop import builtin, open_model
from purelora.interop.peft import adapter_sources, algebra, artefact, attach
from purelora.interop.peft import files as peft_files
from purelora.lora import targets
from purelora.models import causal_lm
from purelora.training import beginning, run_folder, setup

_CHECKED_TOKENS = 32
# Largest difference of a logit, over the largest logit: rounding of float32 in another order.
_TOLERANCE = 1e-4


class Exported(NamedTuple):
    """An export that passed its check.

    Attributes:
      step: the step of the run.
      difference: what was compared, and the largest difference, for people.
    """

    step: int
    difference: str


class Base(NamedTuple):
    """A base in place of the one that the run names: `model.path` and `model.hf_folder`."""

    path: str
    hf_folder: str | None = None


def export(run: str, output: str, *, base: Base | None = None) -> Exported:
    """Writes the adapter of a run as a PEFT folder and checks it.

    Args:
      run: a run (its newest whole step), or the folder of one step.
      output: a new folder.
      base: where the base is now, if no longer where the run found it.

    Raises:
      ModelError, CheckpointError: the run has no adapter, `base` is another base, the output is
        taken, or the folder does not compute what the run does.
    """
    atomic_output.check_free(output)
    checkpoints, step = store.find(pathlib.Path(run))
    adapter = adapter_sources.of_checkpoint(checkpoints, step, where=f"{run} (step {step})")
    if base is not None:
        _check_base(base, adapter)
        changed = dataclasses.replace(adapter.config, base_model_name_or_path=base.path)
        adapter = dataclasses.replace(adapter, config=changed)
    run_folder.write_adapter(output, adapter, checkpoints.meta(step))
    try:
        return Exported(step, check(run, checkpoints, step, output, base=base))
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise


def _check_base(base: Base, adapter: artefact.Adapter) -> None:
    """Raises ModelError unless `base` is the one that the adapter was trained on."""
    opened = open_model.open_model(base.path, hf_folder=base.hf_folder)
    model = causal_lm.from_hf(opened.source.config, opened.source.path, dtype="float32")
    layout = model.layout_of(opened.source.shapes())
    attach.check_base(adapter, source.identify(opened.source, layout.shapes))


def check(
    run: str, checkpoints: store.Checkpoints, step: int, folder: str, *, base: Base | None = None
) -> str:
    """Compares what a PEFT folder computes with what a checkpoint does.

    Args:
      run: the run, or the folder of a step.
      checkpoints: its checkpoints.
      step: the step that was exported.
      folder: the PEFT folder.
      base: as for `export`.

    Returns:
      What was compared, and the largest difference.

    Raises:
      ModelError: it is too large, or the folder cannot be read back.
    """
    meta = checkpoints.meta(step)
    if meta["config"]["lora.init_lora_weights"] in schema.FACTORED_INITS:
        name, difference = "an update", _update_difference(checkpoints, step, folder)
    else:
        name, difference = "a logit", _logit_difference(run, checkpoints, step, folder, base)
    if not difference <= _TOLERANCE:
        what = f"does not compute what the run does: {name} differs by {difference:.1e}"
        raise errors.ModelError(folder, None, what, "this is a fault of purelora: report it")
    return f"largest difference of {name} {difference:.1e} of the largest"


def _logit_difference(
    run: str, checkpoints: store.Checkpoints, step: int, folder: str, base: Base | None
) -> float:
    """Largest difference of a logit over the largest logit, on the run's own base."""
    settings = from_dict.from_flat(checkpoints.meta(step)["config"])
    if base is None:
        base = Base(settings.model.path, settings.model.hf_folder)
        if "base" in checkpoints.extras(step) and not settings.lora.modules_to_save:
            base = Base(run)  # It needs nothing else.
    settings = _on_one_device(settings, base)
    model, plan = setup.open_and_plan(settings, _quiet, devices=jax.devices()[:1])
    again = beginning.base_again(checkpoints, step, model, plan, _quiet)
    frozen, tokens = again.base, _tokens(model)
    wanted = _logits(plan.model, trees.unflatten(checkpoints.trained(step)), frozen, tokens)
    attached = attach.attach(
        peft_files.read(folder), plan.model, base_fingerprint=again.fingerprint
    )
    logits = _logits(attached.model, attached.trainable, frozen, tokens)
    return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


def _update_difference(checkpoints: store.Checkpoints, step: int, folder: str) -> float:
    """Largest difference of a weight's update over the largest, for weight-derived inits."""
    trained, initial = checkpoints.trained(step), checkpoints.leaves(step, "initial")
    adapter, worst = peft_files.read(folder), 0.0
    for path, target in checkpoints.meta(step)["adaptation"]["targets"].items():
        for i, name in enumerate(target["names"]):
            wanted = sum(
                sign * (_layer(leaves[f"{path}.lora_a"], target, i)
                        @ _layer(leaves[f"{path}.lora_b"], target, i))
                for sign, leaves in ((1, trained), (-1, initial))
            )  # fmt: skip
            wanted = target["scalings"][i] * np.asarray(wanted).T
            update = algebra.updated(adapter, name, "weight", np.zeros_like(wanted))
            # Both halves are as large as the weight; their difference may be small.
            scale = np.abs(_layer(initial[f"{path}.lora_a"], target, i)).max()
            scale *= np.abs(_layer(initial[f"{path}.lora_b"], target, i)).max()
            worst = max(worst, float(np.abs(update - wanted).max() / max(scale, 1e-30)))
    return worst


def _layer(leaf: np.ndarray, target: Mapping[str, Any], position: int) -> np.ndarray:
    return leaf[position] if target["layers"] else leaf


def _on_one_device(settings: schema.Config, base: Base) -> schema.Config:
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=base.path, hf_folder=base.hf_folder),
        mesh=dataclasses.replace(settings.mesh, data=1, fsdp=1, expert=1, tensor=1),
    )


def _quiet(text: str) -> None:
    del text


def _tokens(model: builtin.Model) -> jax.Array:
    """Some ids of the vocabulary, the same every time."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, model.tokenizer.vocab_size, (1, _CHECKED_TOKENS)), jnp.int32)


def _logits(
    model: causal_lm.CausalLM, trainable: trees.Tree, base: trees.Tree, tokens: jax.Array
) -> np.ndarray:
    frozen = targets.split_trained(trees.flatten(base), model.adaptation).frozen
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    inputs = Inputs(tokens, positions, jnp.ones_like(tokens))
    logits = jax.jit(lambda t, b: model.logits(t, b, inputs))
    return np.asarray(logits(trainable, trees.unflatten(frozen)))

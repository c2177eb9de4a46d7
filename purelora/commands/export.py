"""Writes the adapter of a run as a PEFT folder, and checks what was written.

    python -m purelora.export --run=runs/qlora --output=adapters/qlora

--run=PATH        a run (its newest whole step), or the folder of one step
--output=PATH     a new folder; PEFT, and whatever reads PEFT's adapters, loads it
--model=PATH      the base, if it is no longer where the run found it
--hf-folder=PATH  for such a base that is a MaxText checkpoint: where its config.json is

The folder is read back, put on the base anew and must give the run's own logits; otherwise it is
removed again. An adapter that began out of the weights (pissa, olora, loftq) is written for the
original base, with twice the rank; there the run's base is another one, so the update that the
folder makes to each weight is compared with what training added to it.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purelora.checkpoint import store
from purelora.config import command_line, from_dict, schema
from purelora.core import errors, trees
from purelora.core.batch import Inputs
from purelora.formats import atomic_output as output
from purelora.formats import source
from purelora.interop import builtin, open_model
from purelora.interop.peft import adapter_sources, algebra, artefact, attach
from purelora.interop.peft import files as peft_files
from purelora.lora import targets
from purelora.models import causal_lm
from purelora.training import beginning, run_folder, setup

_CHECKED_TOKENS = 32
# Largest difference of a logit, over the largest logit: rounding of float32 in another order.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    run: str
    output: str
    model: str | None = None
    hf_folder: str | None = None


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = command_line.options(Options, argv)
    if options.hf_folder is not None and options.model is None:
        what = "has no effect without --model"
        raise errors.ConfigError("--hf-folder", options.hf_folder, what, "leave it out")
    output.check_free(options.output)
    checkpoints, step = store.find(pathlib.Path(options.run))
    meta = checkpoints.meta(step)
    adapter = adapter_sources.of_checkpoint(checkpoints, step, where=f"{options.run} (step {step})")
    if options.model is not None:
        _check_model(options.model, options.hf_folder, adapter)
        changed = dataclasses.replace(adapter.config, base_model_name_or_path=options.model)
        adapter = dataclasses.replace(adapter, config=changed)
    run_folder.write_adapter(options.output, adapter, meta)
    try:
        compared = check(options, checkpoints, step, options.output)
    except BaseException:
        shutil.rmtree(options.output, ignore_errors=True)
        raise
    print(f"{options.output}: adapter of step {step}, read back: {compared}")
    return 0


def _check_model(path: str, hf_folder: str | None, adapter: artefact.Adapter) -> None:
    """Raises ModelError unless the base at `path` is the one that the adapter was trained on."""
    opened = open_model.open_model(path, hf_folder=hf_folder)
    model = causal_lm.from_hf(opened.source.config, opened.source.path, dtype="float32")
    layout = model.layout_of(opened.source.shapes())
    attach.check_base(adapter, source.identify(opened.source, layout.shapes))


def check(options: Options, checkpoints: store.Checkpoints, step: int, folder: str) -> str:
    """Compares what the folder, read anew, computes with the checkpoint's own leaves.

    Returns:
      What was compared, and the largest difference.

    Raises:
      ModelError: it is too large, or the folder cannot be read back.
    """
    meta = checkpoints.meta(step)
    if meta["config"]["lora.init_lora_weights"] in schema.FACTORED_INITS:
        name, difference = "an update", _update_difference(checkpoints, step, folder)
    else:
        name, difference = "a logit", _logit_difference(options, checkpoints, step, folder)
    if not difference <= _TOLERANCE:
        what = f"does not compute what the run does: {name} differs by {difference:.1e}"
        raise errors.ModelError(folder, None, what, "this is a fault of purelora: report it")
    return f"largest difference of {name} {difference:.1e} of the largest"


def _logit_difference(
    options: Options, checkpoints: store.Checkpoints, step: int, folder: str
) -> float:
    """Largest difference of a logit over the largest logit, on the run's own base."""
    settings = from_dict.from_flat(checkpoints.meta(step)["config"])
    path, hf_folder = settings.model.path, settings.model.hf_folder
    if options.model is not None:
        path, hf_folder = options.model, options.hf_folder
    elif "base" in checkpoints.extras(step) and not settings.lora.modules_to_save:
        path, hf_folder = options.run, None  # It needs nothing else.
    settings = _on_one_device(settings, path, hf_folder)
    model, plan = setup.open_and_plan(settings, _quiet, devices=jax.devices()[:1])
    again, tokens = beginning.base_again(checkpoints, step, model, plan, _quiet), _tokens(model)
    wanted = _logits(plan.model, trees.unflatten(checkpoints.trained(step)), again.base, tokens)
    attached = attach.attach(
        peft_files.read(folder), plan.model, base_fingerprint=again.fingerprint
    )
    found = _logits(attached.model, attached.trainable, again.base, tokens)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def _update_difference(checkpoints: store.Checkpoints, step: int, folder: str) -> float:
    """Largest difference of a weight's update over the largest, for adapters out of weights."""
    own, initial = checkpoints.trained(step), checkpoints.leaves(step, "initial")
    read, worst = peft_files.read(folder), 0.0
    for path, target in checkpoints.meta(step)["adaptation"]["targets"].items():
        for i, name in enumerate(target["names"]):
            wanted = sum(
                sign * (_layer(leaves[f"{path}.lora_a"], target, i)
                        @ _layer(leaves[f"{path}.lora_b"], target, i))
                for sign, leaves in ((1, own), (-1, initial))
            )  # fmt: skip
            wanted = target["scalings"][i] * np.asarray(wanted).T
            found = algebra.updated(read, name, "weight", np.zeros_like(wanted))
            # Both halves are as large as the weight; their difference may be small.
            scale = np.abs(_layer(initial[f"{path}.lora_a"], target, i)).max()
            scale *= np.abs(_layer(initial[f"{path}.lora_b"], target, i)).max()
            worst = max(worst, float(np.abs(found - wanted).max() / max(scale, 1e-30)))
    return worst


def _layer(leaf: np.ndarray, target: Mapping[str, Any], position: int) -> np.ndarray:
    return leaf[position] if target["layers"] else leaf


def _on_one_device(settings: schema.Config, path: str, hf_folder: str | None) -> schema.Config:
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=path, hf_folder=hf_folder),
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
    run = jax.jit(lambda t, b: model.logits(t, b, inputs))
    return np.asarray(run(trainable, trees.unflatten(frozen)))

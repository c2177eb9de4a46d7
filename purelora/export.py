"""Writes the adapter of a run as a PEFT folder, and checks what was written.

    python -m purelora.export --run=runs/qlora --output=adapters/qlora

--run=PATH      a run (its newest whole step), or the folder of one step
--output=PATH   a new folder; PEFT, and whatever reads PEFT's adapters, loads it
--model=PATH    the base, if it is no longer where the run found it

The folder is read back, put on the base anew and must give the run's own logits; otherwise it is
removed again. An adapter that began out of the weights (pissa, olora, loftq) is written for the
original base, with twice the rank.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purelora import artefact, assembly, checkpoint, cli, config, errors, factoring, story
from purelora import plan as plans
from purelora import tree as trees
from purelora.io import builtin, output, peft
from purelora.models import layers

_CHECKED_TOKENS = 32
# Largest difference of a logit, over the largest logit: rounding of float32 in another order.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    run: str
    output: str
    model: str | None = None


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = cli.options(Options, argv)
    output.check_free(options.output)
    checkpoints, step = checkpoint.find(pathlib.Path(options.run))
    meta = checkpoints.meta(step)
    adapter = artefact.of_checkpoint(checkpoints, step, where=f"{options.run} (step {step})")
    if options.model is not None:
        changed = dataclasses.replace(adapter.config, base_model_name_or_path=options.model)
        adapter = dataclasses.replace(adapter, config=changed)
    story.write_adapter(options.output, adapter, meta)
    try:
        difference = check(options, checkpoints, step, options.output)
    except BaseException:
        shutil.rmtree(options.output, ignore_errors=True)
        raise
    print(
        f"{options.output}: adapter of step {step}, read back: largest difference of a logit "
        f"{difference:.1e} of the largest"
    )
    return 0


def check(options: Options, checkpoints: checkpoint.Checkpoints, step: int, folder: str) -> float:
    """Compares the logits of the checkpoint's own leaves with those of the folder, read anew.

    Returns:
      The largest difference over the largest logit.

    Raises:
      ModelError: it is too large, or the folder cannot be read back.
    """
    settings = _settings(checkpoints.meta(step), options)
    model, plan = assembly.open_and_plan(settings, _quiet, devices=jax.devices()[:1])
    beginning = assembly.begin_again(checkpoints, step, model, plan, _quiet)
    own = {
        path.removeprefix("trainable."): leaf
        for path, leaf in checkpoints.leaves(step, "state", prefix="trainable.").items()
    }
    tokens = _tokens(model)
    wanted = _logits(plan, trees.unflatten(own), beginning.start.base, tokens)

    attached = artefact.attach(
        peft.read(folder), plan.model, base_fingerprint=beginning.fingerprint
    )
    base = beginning.start.base
    if settings.lora.init_lora_weights in factoring.INITS:
        base = assembly.load_weights(model, plan, _quiet).tree
    read_back = dataclasses.replace(plan, model=attached.model)
    found = _logits(read_back, attached.trainable, base, tokens)
    difference = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not difference <= _TOLERANCE:
        what = f"gives other logits than the run: {difference:.1e} of the largest"
        raise errors.ModelError(folder, None, what, "this is a fault of purelora: report it")
    return difference


def _settings(meta: Mapping[str, Any], options: Options) -> config.Config:
    """The run's settings, on one device, and on a float base if the written adapter is for that."""
    settings = config.from_flat(meta["config"])
    path = options.model or settings.model.path
    quantisation = settings.quant
    if settings.lora.init_lora_weights in factoring.INITS:
        quantisation = config.QuantConfig("none", None, quantisation.skip)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=path),
        mesh=config.MeshConfig(data=1, fsdp=1, shard_adapters=False),
        quant=quantisation,
    )


def _quiet(text: str) -> None:
    del text


def _tokens(model: builtin.Model) -> jax.Array:
    """Some ids of the vocabulary, the same every time."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, model.tokenizer.vocab_size, (1, _CHECKED_TOKENS)), jnp.int32)


def _logits(
    plan: plans.Plan, trainable: trees.Tree, base: trees.Tree, tokens: jax.Array
) -> np.ndarray:
    full = plan.model.adaptation.full
    kept = {path: leaf for path, leaf in trees.flatten(base).items() if path not in full}
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    inputs = layers.Inputs(tokens, positions, jnp.ones_like(tokens))
    run = jax.jit(lambda t, b: plan.model.logits(t, b, inputs))
    return np.asarray(run(trainable, trees.unflatten(kept)))


if __name__ == "__main__":
    cli.run_command(main, __doc__)

"""A run's parts one by one, for a notebook or another program: `import purelora` gives them.

    config  = configure("tiny", {"lora.r": 8})          settings, as of the command line
    model   = open_model(config.model.path)             weights on disk and a tokenizer
    plan    = plan_run(config, model)                   declarations, specs and mesh; no array
    begun   = load_weights(plan, model)                 base and adapters, quantised and placed
    state   = init_state(plan, begun.trainable, tx)     adapters and the optimiser's state
    step    = make_step(plan, tx)                       (state, base, batch) -> (state, metrics)

Each is a thin door to what the command does itself.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from purelora.checkpoint import retention, store
from purelora.config import config_file, from_dict, schema
from purelora.core import errors, train_state, trees
from purelora.core.batch import Batch
from purelora.data import load as data_load
from purelora.data.batches import Batches
from purelora.interop.builtin import Model
from purelora.lora import targets
from purelora.models import decode, layers, moe
from purelora.models.loss import Losses
from purelora.training import (
    beginning,
    evaluation,
    feed,
    planning,
    programs,
    run_folder,
    setup,
)
from purelora.training.plan import Plan
from purelora.training.step import Forward, Program, make_eval_step, make_train_step

# (logits [B, T, V] float32, batch of [B, T] arrays) -> weighted sum over the tokens
Loss = Callable[[jax.Array, Batch], jax.Array]


def configure(name: str = "base", overrides: Mapping[str, Any] | None = None) -> schema.Config:
    """The settings of a ready config or a config file, with `overrides` by dotted key.

    Raises:
      ConfigError: an unknown name or key, or values that do not fit; all in one error.
    """
    raw = config_file.load(pathlib.Path(name))
    for key, value in (overrides or {}).items():
        *sections, leaf = key.split(".")
        keys = raw
        for section in sections:
            keys = keys.setdefault(section, {})
        keys[leaf] = value
    return from_dict.parse(raw)


def plan_run(
    config: schema.Config, model: Model, devices: Sequence[jax.Device] | None = None
) -> Plan:
    """What is trained and how it lies on `devices` (by default all), without any array.

    Raises:
      ConfigError, ModelError: settings that do not fit the model or the devices.
    """
    used = jax.devices() if devices is None else devices
    return planning.make_plan(config, model.source.config, model.source.path, used)


def load_weights(plan: Plan, model: Model) -> beginning.Beginning:
    """Reads the weights: the base, quantised and placed, and fresh adapters for it.

    With `init_adapter` the adapters are those of that run or PEFT folder.
    """
    return beginning.begin_fresh(model, plan, say=lambda text: None)


def init_state(
    plan: Plan, trainable: trees.Tree, tx: optax.GradientTransformation
) -> train_state.TrainState:
    """The state before the first step; `trainable` is donated to it."""
    return programs.fresh_state(plan, programs.layout_of(plan, tx), tx, trainable)


def make_step(plan: Plan, tx: optax.GradientTransformation, loss: Loss | None = None) -> Program:
    """The compiled step `(state, base, batch) -> (state, metrics)`; the old state is donated.

    Args:
      plan: the run.
      tx: any optax optimiser, its learning rate included.
      loss: the sum of the tokens' losses, each times its weight; by default cross-entropy, whose
        logits never exist whole. Routers' losses are added as the settings say.

    Raises:
      ConfigError: `loss` is given and the vocabulary is split over devices.
    """
    layout = programs.layout_of(plan, tx)
    return make_train_step(_forward(plan, loss), _descent(tx), _unit_rate, layout)


def make_eval(plan: Plan, loss: Loss | None = None) -> Program:
    """The compiled `(trainable, base, batch) -> (loss_sum, weight_sum)`; nothing is donated."""
    layout = programs.layout_of(plan, optax.identity())
    return make_eval_step(_forward(plan, loss), layout)


def make_batches(plan: Plan, model: Model, records: Iterable[Mapping[str, Any]]) -> Batches:
    """Batches of records in memory, of the shapes that `data.train` takes.

    Raises:
      DataError: a record that cannot be used; nothing to train on.
    """
    return data_load.batches_of(records, plan.config, model.tokenizer)


def evaluate(
    plan: Plan, eval_step: Program, trainable: trees.Tree, base: trees.Tree, batches: Batches
) -> float:
    """The mean loss of the tokens of all batches of an epoch."""
    numbers = range(1, batches.steps_per_epoch + 1)
    placed = (item.batch for item in feed.feed(batches, plan.mesh, numbers))
    loss_sum, weight_sum = evaluation.loss_sums(eval_step, trainable, base, placed)
    return float(loss_sum / weight_sum)


def complete(
    plan: Plan,
    model: Model,
    trainable: trees.Tree,
    base: trees.Tree,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 48,
) -> list[str]:
    """Greedy answers to prompts, each a user's turn where the model has a chat template."""
    tokenizer = model.tokenizer
    template = data_load.compile_template(plan.config, tokenizer)
    answers = decode.complete(
        plan.model,
        trainable,
        base,
        [evaluation.prompt_ids(plan.config, tokenizer, template, prompt) for prompt in prompts],
        end_ids=tokenizer.eos_ids,
        max_new_tokens=max_new_tokens,
        dtype=jnp.dtype(plan.config.dtype),
    )
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]


def save_run(
    folder: str,
    plan: Plan,
    model: Model,
    begun: beginning.Beginning,
    state: train_state.TrainState,
) -> None:
    """Saves a state as a step of the run in `folder`, which every command then takes as a run.

    Raises:
      CheckpointError: it cannot be written.
    """
    workdir = pathlib.Path(folder)
    keep = retention.Policy(last=1, every=None, best=False)
    checkpoints = store.Checkpoints(workdir / "checkpoints", keep, in_background=False)
    number = int(state.step)
    meta = setup.meta_of(model, plan, "of a program", number, begun.fingerprint)
    extras = setup.extras_of(plan.config, begun.base, begun.initial)
    checkpoints.save(number, state, meta | {"step": number, "eval_loss": None}, extras)
    checkpoints.close()
    run_folder.keep_tokenizer(model.tokenizer, workdir)


def _descent(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` as the step takes it: it subtracts updates, where optax's own are added."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformation(tx.init, update)


def _unit_rate(step: jax.Array) -> jax.Array:
    """The rate of an optimiser that has its own."""
    del step
    return jnp.float32(1)


def _forward(plan: Plan, loss: Loss | None) -> Forward:
    if loss is None:
        return programs.forward_of(plan)
    head = targets.EMBEDDING if plan.model.is_tied else targets.HEAD
    if head in plan.shards.parallels:
        what = f"splits {head}, and a loss of one's own takes the logits of the whole vocabulary"
        raise errors.ConfigError("mesh.rules", None, what, "leave vocab:tensor out")
    return _with_loss(plan, loss)


def _with_loss(plan: Plan, loss: Loss) -> Forward:
    model, execution, router = plan.model, plan.execution, plan.router_weights
    rate = plan.config.lora.lora_dropout

    def forward(
        trainable: trees.Tree,
        base: trees.Tree,
        batch: Batch,
        *,
        key: jax.Array | None,
        rows_B: jax.Array,
        row_weight: jax.Array,
    ) -> tuple[jax.Array, Losses]:
        dropout = None if key is None or not rate else layers.Dropout(key, rows_B, rate)
        bound = model.bind(base, trainable, plan.shards)
        x_BTD, sums = model.hidden(
            bound,
            batch.inputs,
            dtype=execution.dtype,
            scan_layers=execution.scan_layers,
            remat=execution.remat,
            dropout=dropout,
        )
        total = loss(model.head_logits(x_BTD, bound, jnp.float32), batch)
        if sums is None:
            return total, Losses(total, None)
        losses = moe.losses(sums, batch.segment_ids > 0, is_pooled=router.is_pooled)
        return total + row_weight * moe.objective(losses, router), Losses(total, losses)

    return forward

"""Tiny models, batches and compiled steps that the tests share."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from purelora.config import schema
from purelora.core import param_info, train_state, trees
from purelora.core.batch import Batch, Inputs
from purelora.models import causal_lm, moe, objective
from purelora.ops import quant
from purelora.sharding import collectives, rules, specs
from purelora.training import optimisers, step
from tests.support import families

VOCAB, LAYERS = families.VOCAB, families.LAYERS
LENGTH, ROWS = 12, 32
LEARNING_RATE = 64.0  # A power of two, so that gradients are read off an SGD step without rounding.


def with_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test, those of `slow` in the slow lane."""
    return [pytest.param(c, marks=pytest.mark.slow) if c in slow else c for c in cases]


def hf_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """The config.json of one of `families`, with `changes`; a change to None removes the key."""
    kept = families.CONFIGS[family] | changes
    return {k: v for k, v in kept.items() if not (v is None and k in changes)}


def model(family: str = "llama", **changes: Any) -> causal_lm.CausalLM:
    """A model without adapters."""
    return causal_lm.from_hf(hf_config(family, **changes), "config.json", dtype="float32")


def lora_config(**changes: Any) -> schema.LoraConfig:
    """Settings of adapters of rank 4 and scaling 2 on all linear modules, with `changes`."""
    settings = schema.LoraConfig(
        enabled=True,
        peft_type="lora",
        r=4,
        lora_alpha=8.0,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=(),
        target_parameters=(),
        layers_to_transform=None,
        rank_pattern={},
        alpha_pattern={},
        use_rslora=False,
        use_dora=False,
        init_lora_weights="default",
        modules_to_save=(),
        trainable_token_indices=(),
        bias="none",
    )
    return dataclasses.replace(settings, **changes)


def with_lora(
    plain: causal_lm.CausalLM,
    targets: Any = "all-linear",
    exclude: Any = (),
    r: int = 4,
    **changes: Any,
) -> causal_lm.CausalLM:
    """`plain` with adapters of rank `r` and scaling 2, or as `changes` to the settings say."""
    names = {"target_modules": targets, "exclude_modules": exclude}
    settings = lora_config(**({"r": r, "lora_alpha": 2.0 * r} | names | changes))
    return plain.adapted(settings)


def noisy(tree: trees.Tree, scale: float = 0.1, seed: int = 9) -> trees.Tree:
    """`tree` with normal noise on every leaf, so that norms, biases and `lora_b` matter too."""
    rng = np.random.default_rng(seed)
    return trees.map_leaves(
        lambda a: a + scale * jnp.asarray(rng.standard_normal(a.shape), a.dtype), tree
    )


def weights(m: causal_lm.CausalLM) -> trees.Tree:
    """Random weights of all parameters of `m`."""
    return noisy(_initial(m.infos, seed=1))


def _initial(infos: trees.Tree, seed: int) -> trees.Tree:
    return jax.jit(lambda key: param_info.initial_tree(infos, key=key))(jax.random.key(seed))


def adapters(m: causal_lm.CausalLM, *, fresh: bool = False) -> trees.Tree:
    """The adapters of `m`, as at step 0 (`fresh`) or as if trained."""
    start = _initial(m.adapter_infos(), seed=2)
    return start if fresh else noisy(start)


def quantised(
    m: causal_lm.CausalLM, floats: trees.Tree, qtype: str, tile: int | None = None, skip: Any = ()
) -> tuple[trees.Tree, trees.Tree]:
    """The frozen base of `floats` and its infos."""
    infos = quant.quantised_infos(m.frozen_infos(), qtype=qtype, tile_size=tile, skip=skip)
    floats = trees.unflatten({p: trees.flatten(floats)[p] for p in trees.flatten(infos)})

    @jax.jit
    def quantise(tree: trees.Tree) -> trees.Tree:
        return trees.map_leaves(
            lambda w, i: w if isinstance(i, param_info.ParamInfo) else quant.quantise(w, i),
            tree,
            infos,
        )

    return quantise(floats), infos


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    devices = jax.devices()[: data * fsdp * expert * tensor]
    return specs.make_mesh(data, fsdp, devices, expert=expert, tensor=tensor)


def inputs(tokens_BT: Any) -> Inputs:
    """Whole rows of one document each."""
    tokens = jnp.asarray(tokens_BT, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Inputs(tokens, positions, jnp.ones_like(tokens))


def tokens(rows: int, length: int = LENGTH, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)


def flat_batch() -> Batch:
    """`[ROWS, LENGTH]`: documents of all lengths, uneven weights, rows and devices without any.

    Rows 4 to 7 (one device's rows of 8 devices) have no supervised token and row 5 no token at all.
    """
    rng = np.random.default_rng(7)
    ids = tokens(ROWS, LENGTH + 1, seed=8)
    lengths = rng.integers(2, LENGTH + 1, ROWS)
    lengths[5], lengths[9] = 0, LENGTH
    place = np.arange(LENGTH, dtype=np.int32)[None]
    real = place < lengths[:, None]
    supervised = real & (place >= rng.integers(0, LENGTH, ROWS)[:, None])
    supervised[4:8], supervised[9] = False, real[9]
    scale = rng.choice(np.float32([0.5, 1.0, 2.0]), (ROWS, 1))
    return Batch(
        tokens=np.where(real, ids[:, :-1], 0),
        targets=np.where(real, ids[:, 1:], 0),
        weights=supervised * scale,
        segment_ids=real.astype(np.int32),
        positions=np.where(real, place, 0),
    )


def micro_batches(flat: Batch, accum: int) -> Batch:
    """`[R, T]` arrays as `[accum, R / accum, T]`."""
    return Batch(*(a.reshape(accum, -1, a.shape[-1]) for a in flat))


def optim_config(name: str) -> schema.OptimConfig:
    """Plain SGD at a constant rate, or AdamW with all that it offers."""
    sgd = schema.OptimConfig(
        name="sgd",
        learning_rate=LEARNING_RATE,
        schedule="constant",
        schedule_steps=None,
        warmup_steps=0,
        min_lr_ratio=0.0,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        momentum=0.0,
        loraplus_lr_ratio=1.0,
        weight_decay=0.0,
        clip_norm=None,
    )
    if name == "sgd":
        return sgd
    changes = {"learning_rate": 0.01, "weight_decay": 0.1, "clip_norm": 1.0, "warmup_steps": 2}
    return dataclasses.replace(sgd, name="adamw", schedule="linear", **changes)


@dataclasses.dataclass(frozen=True)
class Case:
    """How a step is put together."""

    qtype: str = "none"
    tile: int | None = None
    lora: bool = True
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    accum: int = 1
    sharded: bool = False
    scan: bool = True
    remat: bool = False
    optimiser: str = "sgd"
    dropout: float = 0.0
    layers: int = LAYERS
    dtype: str = "float32"
    head: bool = False  # Adapters on the (tied) head too.
    keep_gathered: bool = False
    kv_heads: int = 2
    family: str = "llama"
    changes: tuple[tuple[str, Any], ...] = ()  # Of the adapters' settings.
    model: tuple[tuple[str, Any], ...] = ()  # Of the config.json.
    rules: tuple[str, ...] = ()  # In place of the usual ones.
    router: moe.RouterLossWeights = moe.RouterLossWeights(0.0, 0.0, is_pooled=False)

    @property
    def heads(self) -> dict[str, int]:
        """The numbers of heads, as in config.json: two query heads a kv head."""
        return {"num_attention_heads": 2 * self.kv_heads, "num_key_value_heads": self.kv_heads}

    def __str__(self) -> str:
        base = "full" if not self.lora else f"{self.qtype}{self.tile or ''}"
        names = ("sharded", "scan", "remat", "head", "keep_gathered")
        flags = [n for n in names if getattr(self, n)] + [
            name for name, _ in self.changes + self.model
        ]
        flags += ["rules"] if self.rules else []
        flags += [self.family] if self.family != "llama" else []
        flags += [f"expert{self.expert}"] if self.expert > 1 else []
        return "-".join([base, f"{self.data}x{self.fsdp}x{self.tensor}", f"M{self.accum}", *flags])


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """A compiled step with what it needs. The trees are placed; `new_state` makes one to donate.

    `traces` grows whenever the model is traced, that is, when a step is compiled.
    """

    model: causal_lm.CausalLM
    trainable: trees.Tree
    base: trees.Tree
    layout: step.Layout
    tx: Any
    schedule: optimisers.Schedule
    step: Callable[..., Any]
    eval: Callable[..., Any]
    traces: list[str]

    def new_state(
        self, trainable: trees.Tree | None = None, start: int = 0
    ) -> train_state.TrainState:
        """The state before step `start`, in buffers of its own."""
        leaves = jax.device_get(self.trainable if trainable is None else trainable)
        fresh = train_state.create(leaves, self.tx, key=jax.random.key(0))
        fresh = fresh._replace(step=jnp.int32(start))
        placed = specs.shardings(self.layout.state, self.layout.mesh)
        return jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=placed)(fresh)


def _model_of(case: Case) -> causal_lm.CausalLM:
    plain = model(case.family, num_hidden_layers=case.layers, **case.heads, **dict(case.model))
    if not case.lora:
        return plain
    changes = dict(case.changes)
    usual = ".*(proj|lm_head)" if case.head else "all-linear"
    return with_lora(plain, **({"targets": changes.pop("target_modules", None) or usual} | changes))


@functools.cache
def trainer(case: Case) -> Trainer:
    """The step of a case; compiled at its first call and shared by all tests of the process."""
    m = _model_of(case)
    base, base_infos = quantised(m, weights(m), case.qtype, case.tile)
    on = mesh(case.data, case.fsdp, case.tensor, case.expert)
    chosen = rules.parse_rules(case.rules, {}) if case.rules else rules.RULES
    base_specs = specs.spec_tree(base_infos, on, chosen, m.axis_counts)
    trainable, infos, train_specs = base, m.infos, base_specs
    if case.lora:
        trainable, infos = adapters(m), m.adapter_infos()
        own = chosen.of_adapters(case.sharded)
        train_specs = specs.spec_tree(infos, on, own, m.axis_counts)
    else:
        base, base_specs = {}, {}

    cfg = optim_config(case.optimiser)
    tx = optimisers.transformation(cfg, infos)
    schedule = optimisers.schedule(cfg, 10)
    abstract = trees.map_leaves(lambda i: i.abstract, infos)
    state_specs = train_state.state_specs(train_specs, tx, abstract, specs.P())
    layout = step.Layout(on, train_specs, base_specs, state_specs)
    together = trees.combine(base_specs, train_specs)
    shards = collectives.shards(together, m.flat_infos, keep_gathered=case.keep_gathered)
    execution = objective.Execution(jnp.dtype(case.dtype), case.scan, case.remat, 40)
    traces: list[str] = []
    made = objective.make_forward(m, execution, shards, case.dropout, case.router)

    def forward(*args: Any, **kwargs: Any) -> Any:
        traces.append(str(case))
        return made(*args, **kwargs)

    return Trainer(
        model=m,
        trainable=jax.device_put(trainable, specs.shardings(train_specs, on)),
        base=jax.device_put(base, specs.shardings(base_specs, on)),
        layout=layout,
        tx=tx,
        schedule=schedule,
        step=step.make_train_step(forward, tx, schedule, layout),
        eval=step.make_eval_step(forward, layout),
        traces=traces,
    )


def quantised_leaf(weight: jax.Array, contracting: int, qtype: str) -> Any:
    """One weight, quantised as a base's are."""
    axes = (None,) * weight.ndim
    like = param_info.ParamInfo(weight.shape, "float32", axes, contracting=contracting)
    infos = quant.quantised_infos({"w": {"weight": like}}, qtype=qtype, tile_size=None, skip=())
    leaf = infos["w"]["weight"]
    return weight if leaf is like else quant.quantise(weight, leaf)

"""What a run is made of, before any weight is read: declarations, specs and mesh.

`--plan` prints it and stops.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from purelora import config, errors, flops, info, lora, quant, specs, targets
from purelora import tree as trees
from purelora.models import causal_lm


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A resolved run without arrays.

    Attributes:
      config: the settings.
      model: family, sizes and adapters.
      mesh: the devices.
      base_infos: declarations of the frozen leaves; QArrays of infos where quantised. Empty when
        all weights are trained.
      trainable_infos: declarations of the trained leaves.
    """

    config: config.Config
    model: causal_lm.CausalLM
    mesh: Mesh
    base_infos: trees.Tree
    trainable_infos: trees.Tree

    @functools.cached_property
    def base_specs(self) -> trees.Tree:
        return specs.spec_tree(self.base_infos, self.mesh)

    @functools.cached_property
    def trainable_specs(self) -> trees.Tree:
        sharded = self.config.mesh.shard_adapters or not self.config.lora.enabled
        rules = specs.adapter_rules(specs.RULES, sharded)
        return specs.spec_tree(self.trainable_infos, self.mesh, rules)

    @property
    def loaded(self) -> tuple[trees.Tree, trees.Tree]:
        """Declarations and specs of everything that is read: the base and what is trained whole."""
        full = self.model.adaptation.full
        if not self.config.lora.enabled:
            return self.trainable_infos, self.trainable_specs

        def with_full(base: trees.Tree, trained: trees.Tree) -> trees.Tree:
            flat = trees.flatten(trained)
            return trees.combine(base, trees.unflatten({path: flat[path] for path in full}))

        infos = with_full(self.base_infos, self.trainable_infos)
        return infos, with_full(self.base_specs, self.trainable_specs)

    @functools.cached_property
    def gathers(self) -> dict[str, specs.Gather]:
        """How the model makes its sharded weights whole; adapters are gathered by the step."""
        weights = {**specs.gathers(self.base_specs), **specs.gathers(self.trainable_specs)}
        return {path: g for path, g in weights.items() if not lora.is_adapter(path)}

    @property
    def execution(self) -> causal_lm.Execution:
        c = self.config
        return causal_lm.Execution(
            dtype=jnp.dtype(c.dtype),
            scan_layers=c.scan_layers,
            remat=c.remat == "full",
            chunk_tokens=c.loss_chunk_tokens,
        )

    @property
    def device_kinds(self) -> list[str]:
        """Kind of each device of the mesh."""
        return [device.device_kind for device in self.mesh.devices.flat]

    @property
    def flops_per_token(self) -> float:
        """Operations per token of a training step."""
        weights = self.model.flat_infos
        trained = {p: i for p, i in trees.flatten(self.trainable_infos).items() if i.is_matrix}
        return flops.per_token(
            weights,
            {path: leaf for path, leaf in trained.items() if path not in weights},
            trained_weights={path for path in trained if path in weights},
            attention_width=flops.attention_width(self.model.modules),
            length=self.config.max_length,
        )

    def describe_targets(self) -> str:
        """Which modules are trained, and the trained share of all parameters."""
        adaptation = self.model.adaptation
        trained = lora.count(self.trainable_infos, adaptation.targets)
        adapters = {p: i for p, i in trees.flatten(self.trainable_infos).items()
                    if self.config.lora.enabled and p not in adaptation.full}  # fmt: skip
        added = lora.count(trees.unflatten(adapters), adaptation.targets)
        total = trees.count(_plain(self.model.infos)) + added
        share = f"{trained:,} of {total:,} parameters trained ({trained / total:.3%})"
        if not self.config.lora.enabled:
            return f"full fine-tuning: {share}"
        parts = [_describe_adapters(adaptation)]
        if adaptation.full:
            tied = f" ({targets.HEAD} is tied to it)" if self._trains_tied_table else ""
            parts.append(f"in full {', '.join(adaptation.full)}{tied}")
        if adaptation.token_ids:
            parts.append(f"{len(adaptation.token_ids)} rows of {targets.EMBEDDING}")
        return f"{', '.join(parts)}: {share}"

    @property
    def _trains_tied_table(self) -> bool:
        return self.model.is_tied and f"{targets.EMBEDDING}.weight" in self.model.adaptation.full


def _describe_adapters(adaptation: targets.Adaptation) -> str:
    """`adapters (r=16) on q_proj in 30 layers, ...`, with the ranks of a target that differs."""
    ranks = {r for target in adaptation.targets.values() for r in target.ranks}
    modules = []
    for path, target in adaptation.targets.items():
        count = len(target.names)
        own = f" (r={_span(target.ranks)})" if len(ranks) > 1 else ""
        name = f"{path.rpartition('.')[2]}{own}"
        modules.append(f"{name} in {count} layer{'s' if count != 1 else ''}")
    shared = f" (r={min(ranks)})" if len(ranks) == 1 else ""
    return f"adapters{shared} on {', '.join(modules)}"


def _span(ranks: Sequence[int]) -> str:
    low, high = min(ranks), max(ranks)
    return str(low) if low == high else f"{low} to {high}"


def make(
    settings: config.Config,
    hf_config: Mapping[str, Any],
    where: str,
    devices: Sequence[jax.Device],
) -> Plan:
    """Resolves settings and a model's config.json into a Plan.

    Raises:
      ConfigError, ModelError: targets that match nothing, tiles or meshes that do not divide, an
        unknown architecture.
    """
    model = causal_lm.from_hf(hf_config, where, dtype=settings.model.weights_dtype)
    problems: list[errors.Problem] = []
    with errors.collected(problems):
        mesh = specs.make_mesh(settings.mesh.data, settings.mesh.fsdp, devices)
        _check_rows(settings, mesh)
    with errors.collected(problems):
        if settings.lora.enabled:
            model = model.adapted(settings.lora)
            _check_factors(settings, model)
    with errors.collected(problems):
        _check_quantised(settings.quant, model)
    if problems:
        raise errors.ConfigError.of(problems)
    if not settings.lora.enabled:
        return _checked(Plan(settings, model, mesh, {}, model.infos))
    q = settings.quant
    base = quant.quantised_infos(
        model.frozen_infos(), qtype=q.qtype, tile_size=q.tile_size, skip=q.skip
    )
    trainable = model.adapter_infos(settings.lora.init_lora_weights)
    return _checked(Plan(settings, model, mesh, base, trainable))


def _check_factors(settings: config.Config, model: causal_lm.CausalLM) -> None:
    """Raises ConfigError where a weight cannot be split into an adapter and a rest."""
    init, problems = settings.lora.init_lora_weights, []
    if init not in config.FACTORED_INITS:
        return
    for path, target in model.adaptation.targets.items():
        weight = model.modules[path]
        most = min(weight.weight.shape[-2:])
        if weight.kind != "linear":
            what = f"would change {path}, which may be tied; it is for linear modules"
            problems.append(errors.Problem("lora.init_lora_weights", init, what, f"exclude {path}"))
        elif target.r > most:
            what = f"is more than the {most} singular values of {path}"
            problems.append(errors.Problem("lora.r", target.r, what, f"use at most {most}"))
        elif init == "loftq" and quant.is_skipped(f"{path}.weight", settings.quant.skip):
            what = f"makes up for the quantisation of {path}, which quant.skip leaves out"
            remedy = "take it out of quant.skip, or exclude the module"
            problems.append(errors.Problem("lora.init_lora_weights", init, what, remedy))
    if problems:
        raise errors.ConfigError.of(problems)


def _check_quantised(q: config.QuantConfig, model: causal_lm.CausalLM) -> None:
    if q.qtype == "none":
        return
    quant.check_skip([p for p, leaf in model.flat_infos.items() if leaf.is_matrix], q.skip)
    if q.tile_size is not None:
        specs.check_tiles(model.infos, q.tile_size, q.skip)


def _checked(plan: Plan) -> Plan:
    """Builds the spec trees, so that what does not divide is found before anything is allocated."""
    _ = plan.base_specs, plan.trainable_specs
    return plan


def _check_rows(settings: config.Config, mesh: Mesh) -> None:
    ways, rows = specs.row_ways(mesh), settings.micro_batch_size
    if rows % ways:
        step = ways * settings.accum_steps
        near = -(-settings.batch_size // step) * step
        raise errors.ConfigError(
            "batch_size",
            settings.batch_size,
            f"gives {rows} rows a micro-batch, which do not split over {ways} devices",
            f"use {near} (accum_steps = {settings.accum_steps})",
        )


def table(plan: Plan) -> str:
    """The mesh; every array with path, shape, dtype, spec and bytes on one device; the totals."""
    rows = [("path", "shape", "dtype", "spec", "bytes/device", "trained")]
    infos = {**trees.flatten(plan.base_infos), **trees.flatten(plan.trainable_infos)}
    placed = {**trees.flatten(plan.base_specs), **trees.flatten(plan.trainable_specs)}
    trained = trees.flatten(plan.trainable_infos)
    for path, leaf in infos.items():
        for suffix, one, spec in _arrays(leaf, placed[path]):
            size = device_bytes(one, spec, plan.mesh)
            flag = "yes" if path in trained else ""
            shape = "×".join(map(str, one.shape))
            rows.append((path + suffix, shape, one.dtype, _spec_text(spec), f"{size:,}", flag))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    axes = " × ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    totals = [
        f"{name}: {bytes_by_dtype(tree)} bytes in all"
        for name, tree in (("base", plan.base_infos), ("trained", plan.trainable_infos))
        if tree
    ]
    return "\n".join([f"mesh: {axes}", *lines, *totals])


def bytes_by_dtype(infos: trees.Tree) -> str:
    """Bytes of a tree of infos by dtype, for people."""
    parts = [f"{name} {size:,}" for name, size in trees.bytes_by_dtype(_plain(infos)).items()]
    return ", ".join(parts)


def _arrays(leaf: Any, spec: Any) -> list[tuple[str, info.ParamInfo, P]]:
    if isinstance(leaf, qwix.QArray):
        return [(".qvalue", leaf.qvalue, spec.qvalue), (".scale", leaf.scale, spec.scale)]
    return [("", leaf, spec)]


def _spec_text(spec: P) -> str:
    return "(" + ", ".join(str(axis) if axis else "-" for axis in spec) + ")"


def device_bytes(leaf: info.ParamInfo, spec: P, mesh: Mesh) -> int:
    """Bytes of one array on one device."""
    shape = [
        n // (mesh.shape[axis] if axis else 1) for n, axis in zip(leaf.shape, spec, strict=True)
    ]
    return trees.leaf_bytes(jax.ShapeDtypeStruct(tuple(shape), np.dtype(jnp.dtype(leaf.dtype))))


def _plain(infos: trees.Tree) -> Any:
    """A tree of infos as abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.abstract, infos)

"""What must hold of a plan; what does not fit is found before any weight is read."""

from jax.sharding import Mesh

from purelora.config import schema
from purelora.core import errors
from purelora.core.paths import Path
from purelora.models import causal_lm
from purelora.ops import quant
from purelora.sharding import rules, specs
from purelora.training import plan_report
from purelora.training.plan import Plan

# A weight is large from this share of all weights' bytes and this size on.
_LARGE_SHARE, _LARGE_BYTES = 0.005, 1_000_000


def check_weight_init(settings: schema.Config, model: causal_lm.CausalLM) -> None:
    """Raises ConfigError where a weight cannot be split into an adapter and a rest."""
    init, problems = settings.lora.init_lora_weights, []
    if init not in schema.FACTORED_INITS:
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


def check_quantised(q: schema.QuantConfig, model: causal_lm.CausalLM) -> None:
    """Raises ConfigError if skip patterns or tiles do not fit the weights."""
    if q.qtype == "none":
        return
    quant.check_skip([p for p, leaf in model.flat_infos.items() if leaf.is_matrix], q.skip)
    if q.tile_size is not None:
        specs.check_tiles(model.infos, q.tile_size, q.skip)


def check_specs(plan: Plan) -> None:
    """Builds the spec trees, so that what does not divide is found before anything is allocated."""
    axes: dict[str, set[str | None]] = {}
    for path, leaf in plan.model.flat_infos.items():
        axes.setdefault(Path(path).parent, set()).update(leaf.axes)
    plan.rules.check_overrides(axes)
    _ = plan.base_specs, plan.trainable_specs, plan.shards
    _check_idle_axes(plan)
    _check_router_losses(plan)
    _check_replicated(plan)


def _check_idle_axes(plan: Plan) -> None:
    """Raises ConfigError if devices along `tensor` or `expert` would all do the same."""
    offers = {
        rules.TENSOR: (
            plan.shards.parallels,
            "add heads:tensor, kv_heads:tensor, mlp:tensor or vocab:tensor, or set it to 1",
        ),
        rules.EXPERT: (
            plan.shards.exchanges,
            "set it to 1; for a mixture of experts, add experts:expert",
        ),
    }
    for axis, (used, remedy) in offers.items():
        ways = plan.mesh.shape[axis]
        if ways > 1 and not used:
            what = "splits nothing: by mesh.rules no axis of this model goes to it"
            raise errors.ConfigError(f"mesh.{axis}", ways, what, remedy)


def _check_router_losses(plan: Plan) -> None:
    """Raises ConfigError if a router's loss has a coefficient and the model has no experts."""
    coefs = ("router_aux_loss_coef", "router_z_loss_coef")
    problems = [
        errors.Problem(name, getattr(plan.config, name), "this model has no experts", "set it to 0")
        for name in coefs
        if getattr(plan.config, name) and plan.model.config.experts is None
    ]
    if problems:
        raise errors.ConfigError.of(problems)


def _check_replicated(plan: Plan) -> None:
    """Raises ConfigError for large weights that are whole on every device without a rule's word."""
    ways = plan.mesh.size // plan.mesh.shape[rules.DATA]
    rows = [row for row in plan_report.array_rows(plan) if not row.is_adapter]
    large = _LARGE_SHARE * sum(row.total_bytes for row in rows)
    problems = []
    for row in rows:
        if ways > 1 and row.is_replicated and row.total_bytes > max(large, _LARGE_BYTES):
            asked = {axis for axis, to in plan.rules.of(row.leaf) if to is None}
            if not asked & set(row.info.axes):
                axes = [axis for axis in row.info.axes if axis not in (None, "layers")]
                size = f"{row.total_bytes:,} bytes"
                what = f"leave {row.path} whole on each of {ways} devices: {size}"
                remedy = f"add a rule for {' or '.join(map(str, axes))} (to none if it is meant so)"
                problems.append(errors.Problem("mesh.rules", plan.config.mesh.rules, what, remedy))
    if problems:
        raise errors.ConfigError.of(problems)


def check_rows(settings: schema.Config, mesh: Mesh) -> None:
    """Raises ConfigError if a micro-batch does not split over the devices."""
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

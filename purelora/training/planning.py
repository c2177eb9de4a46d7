"""From settings and a model's config.json to a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from purelora.config import schema
from purelora.core import errors, trees
from purelora.models import causal_lm
from purelora.ops import quant
from purelora.sharding import rules, specs
from purelora.training import plan_checks
from purelora.training.plan import Plan


def make_plan(
    settings: schema.Config,
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
        sizes = settings.mesh
        mesh = specs.make_mesh(
            sizes.data, sizes.fsdp, devices, expert=sizes.expert, tensor=sizes.tensor
        )
        plan_checks.check_rows(settings, mesh)
    with errors.collected(problems):
        if settings.lora.enabled:
            model = model.adapted(settings.lora)
            plan_checks.check_weight_init(settings, model)
    with errors.collected(problems):
        plan_checks.check_quantised(settings.quant, model)
    with errors.collected(problems):
        rules.parse_rules(settings.mesh.rules, settings.mesh.overrides)
    if problems:
        raise errors.ConfigError.of(problems)
    if not settings.lora.enabled:
        return _checked(Plan(settings, model, mesh, {}, model.infos))
    q = settings.quant
    frozen = model.frozen_infos()
    base = quant.quantised_infos(frozen, qtype=q.qtype, tile_size=q.tile_size, skip=q.skip)
    quant.check_coverage(trees.flatten(frozen), trees.flatten(base), qtype=q.qtype, skip=q.skip)
    trainable = model.adapter_infos(settings.lora.init_lora_weights)
    return _checked(Plan(settings, model, mesh, base, trainable))


def _checked(plan: Plan) -> Plan:
    plan_checks.check_specs(plan)
    return plan

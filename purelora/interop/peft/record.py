"""What a checkpoint keeps of an adaptation, as JSON: with it leaves can be named without the model.

`Record` is that entry with types; an `Adaptation`, what PEFT calls it, and how the base's leaves
that are trained whole lie in their stacks.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from purelora.config import schema
from purelora.core.paths import Path
from purelora.interop.peft.adapter_config import AdapterConfig
from purelora.lora import kinds, targets
from purelora.models import causal_lm


@dataclasses.dataclass(frozen=True)
class WholeLeaf:
    """A leaf of the base that is trained whole.

    Attributes:
      modules: Hugging Face name of the module of each of its layers.
      stacked: whether it leads with a layer axis.
      transposed: whether files hold it the other way round.
      tied: the modules that share it, if there are any.
    """

    modules: tuple[str, ...]
    stacked: bool
    transposed: bool
    tied: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint must know to give its adapter away.

    Attributes:
      adaptation: what was trained.
      whole: its leaves that are trained whole, by path.
      embedding: Hugging Face name of the embedding.
      config: the same as PEFT's config.
      interleaved: see `adapter.Adapter`.
    """

    adaptation: targets.Adaptation
    whole: Mapping[str, WholeLeaf]
    embedding: str
    config: AdapterConfig
    interleaved: bool

    def to_json(self) -> dict[str, Any]:
        """The entry `adaptation` of a checkpoint's metadata."""
        whole = {path: dataclasses.asdict(leaf) for path, leaf in self.whole.items()}
        for leaf in whole.values():
            if not leaf["tied"]:
                del leaf["tied"]
        return {
            "targets": {p: _target_to_json(t) for p, t in self.adaptation.targets.items()},
            "full": whole,
            "tokens": {self.embedding: list(self.adaptation.token_ids)},
            "peft": _config_to_json(self.config),
            "interleaved": self.interleaved,
        }


def from_json(stored: Mapping[str, Any]) -> Record:
    """The inverse of `Record.to_json`, of an entry of any version."""
    whole = {path: WholeLeaf(**_with_tuples(leaf)) for path, leaf in stored["full"].items()}
    embedding, token_ids = next(iter(stored["tokens"].items()))
    return Record(
        targets.Adaptation(
            {path: _target_from_json(target) for path, target in stored["targets"].items()},
            tuple(whole),
            tuple(token_ids),
        ),
        whole,
        embedding,
        _config_from_json(stored["peft"]),
        # Runs of before there was such a model do not say it.
        stored.get("interleaved", False),
    )


def of_model(model: causal_lm.CausalLM, settings: schema.LoraConfig, path: str) -> Record:
    """The record of what `model` trains; `path` is that of the base."""
    table = f"{targets.EMBEDDING}.weight"
    whole = {}
    for leaf in model.adaptation.full:
        names = tuple(Path(name).parent for name in model.hf_names[leaf])
        is_shared = leaf == table and model.is_tied
        tied = model.modules[targets.HEAD].names if is_shared else ()
        info = model.flat_infos[leaf]
        whole[leaf] = WholeLeaf(names, info.is_stacked, info.is_transposed, tied)
    return Record(
        model.adaptation,
        whole,
        model.modules[targets.EMBEDDING].names[0],
        adapter_config(model, settings, path),
        model.is_interleaved,
    )


# ---- JSON --------------------------------------------------------------------------------------


def _kind_to_json(kind: kinds.Kind) -> dict[str, Any]:
    """A kind by the flags that choose among those of LoRA; the others by name too."""
    flags = {flagged.flag: flagged is kind for flagged in kinds.FLAGGED}
    return flags if kind.peft_type == kinds.PEFT_TYPES[0] else {**flags, "kind": kind.name}


def _kind_from_json(stored: Mapping[str, Any]) -> str:
    flagged = [kind.name for kind in kinds.FLAGGED if stored.get(kind.flag)]
    return str(stored.get("kind", flagged[0] if flagged else "lora"))


def _target_to_json(target: targets.Target) -> dict[str, Any]:
    fields = dataclasses.asdict(target)
    variant = fields.pop("variant")
    del fields["kind"]
    fields |= _kind_to_json(kinds.of_target(target))
    return fields | ({"variant": variant} if variant else {})


def _target_from_json(stored: Mapping[str, Any]) -> targets.Target:
    names = {field.name for field in dataclasses.fields(targets.Target)}
    values = {key: value for key, value in _with_tuples(stored).items() if key in names}
    return targets.Target(**values | {"kind": _kind_from_json(stored)})


def _config_to_json(config: AdapterConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in dataclasses.asdict(config).items():
        if key == "kind":
            fields |= _kind_to_json(config.adapter_kind)
        elif key != "patterns" or value:
            fields[key] = value
    return fields


def _config_from_json(stored: Mapping[str, Any]) -> AdapterConfig:
    values = _with_tuples(stored)
    for key in ("trainable_token_indices", "patterns"):
        if key in stored:
            values[key] = _with_tuples(stored[key])
    for kind in kinds.FLAGGED:
        values.pop(kind.flag, None)
    return AdapterConfig(**values | {"kind": _kind_from_json(stored)})


def _with_tuples(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}


# ---- the settings as PEFT's --------------------------------------------------------------------


def adapter_config(
    model: causal_lm.CausalLM, settings: schema.LoraConfig, path: str
) -> AdapterConfig:
    """The settings as PEFT's, with targets that PEFT resolves to the same modules."""
    adaptation = model.adaptation
    names = {
        name
        for path, target in adaptation.targets.items()
        if model.modules[path].is_parameter
        for name in target.names
    }
    kind = kinds.of_settings(settings)
    # Only LoRA's config, and those like it, say in which layers the listed names count.
    has_layers = kind.peft_keys is None or "layers_to_transform" in kind.peft_keys
    is_list = not (isinstance(settings.target_modules, str) or names) and has_layers
    saved = {
        Path(name).parent
        for leaf in adaptation.full
        if Path(leaf).name == "weight"
        for name in model.hf_names[leaf]
    }
    tied = f"{targets.EMBEDDING}.weight" in adaptation.full and model.is_tied
    variants = {name: t.variant for t in adaptation.targets.values() for name in t.names}
    tokens = {targets.EMBEDDING: adaptation.token_ids} if adaptation.token_ids else {}
    return AdapterConfig(
        r=settings.r if kind.is_ranked else 1,
        lora_alpha=settings.lora_alpha if kind.is_ranked else 1.0,
        target_modules=settings.target_modules if is_list else _as_list(model),
        target_parameters=_parameters(model, names),
        exclude_modules=settings.exclude_modules if is_list else (),
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern=dict(settings.alpha_pattern),
        layers_to_transform=settings.layers_to_transform if is_list else None,
        use_rslora=settings.use_rslora,
        kind=kind.name,
        lora_dropout=settings.lora_dropout,
        bias=settings.bias,
        init_lora_weights=settings.init_lora_weights,
        modules_to_save=tuple(sorted(saved)),
        trainable_token_indices=tokens,
        ensure_weight_tying=tied,
        base_model_name_or_path=path,
        patterns=kind.patterns_of(variants, _as_list(model)),
    )


def _as_list(model: causal_lm.CausalLM) -> tuple[str, ...]:
    """PEFT's `target_modules` as a list of names.

    A name is cut to its last part if all modules that end so are adapted. Experts and routers are
    left out: for PEFT they are parameters, see `_parameters`.
    """
    modules = {path: m for path, m in model.modules.items() if not m.is_parameter}
    adapted = {
        n for path, t in model.adaptation.targets.items() if path in modules for n in t.names
    }
    others = {n for module in modules.values() for n in module.names} - adapted
    ends = {Path(name).name for name in adapted} - {Path(name).name for name in others}
    return tuple(sorted({end if (end := Path(n).name) in ends else n for n in adapted}))


def _parameters(model: causal_lm.CausalLM, adapted: Collection[str]) -> tuple[str, ...]:
    """PEFT's `target_parameters` for the adapted modules called `adapted`.

    Of a module that is adapted in all layers the name is cut to the part behind the layer's number.
    """
    chosen = set()
    for module in model.modules.values():
        names = [targets.parameter_name(name) for name in module.names if name in adapted]
        short = names[0].partition(".layers.")[2].partition(".")[2] if names else ""
        chosen |= {short} if names and len(names) == len(module.names) else set(names)
    return tuple(sorted(chosen))

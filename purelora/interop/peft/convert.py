"""Adapters as artefacts: the same one in a run, in a step's checkpoint and in a PEFT folder.

    run, step folder  ─ unrolled ─▶              ◀─ peft.read ─  PEFT folder
                                     peft.Adapter
    trainable tree   ◀─  attach  ──              ── peft.write ─▶  PEFT folder

`peft.Adapter` holds plain arrays under Hugging Face module names, in PEFT's shapes, with the config
that says their ranks and scalings. Going there and back changes no bit. Nothing is left out on the
way: every tensor must be used and every module that the config names must be filled.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from purelora.checkpoint import store
from purelora.config import schema as config
from purelora.core import errors, trees
from purelora.interop.maxtext import adapter as maxtext_adapter
from purelora.interop.maxtext import folder as maxtext_folder
from purelora.interop.peft import adapter_config as peft_config
from purelora.interop.peft import checks as peft_checks
from purelora.interop.peft import experts as peft_experts
from purelora.interop.peft import files as peft_files
from purelora.lora import adapters, targets
from purelora.models import causal_lm
from purelora.sharding import host_arrays

_FLOAT32 = np.finfo(np.float32)


# ---- what a checkpoint must know to give its adapter away --------------------------------------


def record(model: causal_lm.CausalLM, settings: config.LoraConfig, path: str) -> dict[str, Any]:
    """What a checkpoint keeps of an adaptation, as JSON: names, ranks and scalings of its leaves.

    With it the trained leaves can be named without the model. `path` is that of the base.
    """
    adaptation = model.adaptation
    full = {}
    for leaf in adaptation.full:
        names = [name.rpartition(".")[0] for name in model.hf_names[leaf]]
        info = model.flat_infos[leaf]
        layout = {"stacked": info.is_stacked, "transposed": info.is_transposed}
        full[leaf] = {"modules": names, **layout}
    if f"{targets.EMBEDDING}.weight" in full and model.is_tied:
        full[f"{targets.EMBEDDING}.weight"]["tied"] = list(model.modules[targets.HEAD].names)
    return {
        "targets": {p: dataclasses.asdict(target) for p, target in adaptation.targets.items()},
        "full": full,
        "tokens": {model.modules[targets.EMBEDDING].names[0]: list(adaptation.token_ids)},
        "peft": dataclasses.asdict(adapter_config(model, settings, path)),
        "interleaved": model.is_interleaved,
    }


def adapter_config(
    model: causal_lm.CausalLM, settings: config.LoraConfig, path: str
) -> peft_config.AdapterConfig:
    """The settings as PEFT's, with targets that PEFT resolves to the same modules."""
    adaptation = model.adaptation
    names = {
        name
        for path, target in adaptation.targets.items()
        if model.modules[path].is_parameter
        for name in target.names
    }
    is_list = not (isinstance(settings.target_modules, str) or names)
    saved = {
        name.rpartition(".")[0]
        for leaf in adaptation.full
        if leaf.endswith(".weight")
        for name in model.hf_names[leaf]
    }
    tied = f"{targets.EMBEDDING}.weight" in adaptation.full and model.is_tied
    tokens = {targets.EMBEDDING: adaptation.token_ids} if adaptation.token_ids else {}
    return peft_config.AdapterConfig(
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        target_modules=settings.target_modules if is_list else _as_list(model),
        target_parameters=_parameters(model, names),
        exclude_modules=settings.exclude_modules if is_list else (),
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern=dict(settings.alpha_pattern),
        layers_to_transform=settings.layers_to_transform if is_list else None,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        lora_dropout=settings.lora_dropout,
        bias=settings.bias,
        init_lora_weights=settings.init_lora_weights,
        modules_to_save=tuple(sorted(saved)),
        trainable_token_indices=tokens,
        ensure_weight_tying=tied,
        base_model_name_or_path=path,
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
    ends = {name.rpartition(".")[2] for name in adapted} - {n.rpartition(".")[2] for n in others}
    return tuple(sorted({end if (end := n.rpartition(".")[2]) in ends else n for n in adapted}))


def _parameters(model: causal_lm.CausalLM, adapted: Collection[str]) -> tuple[str, ...]:
    """PEFT's `target_parameters` for the adapted modules called `adapted`.

    Of a module that is adapted in all layers the name is cut to the part behind the layer's number.
    """
    chosen = set()
    for module in model.modules.values():
        own = [targets.parameter_name(name) for name in module.names if name in adapted]
        short = own[0].partition(".layers.")[2].partition(".")[2] if own else ""
        chosen |= {short} if own and len(own) == len(module.names) else set(own)
    return tuple(sorted(chosen))


# ---- out of a tree -----------------------------------------------------------------------------


def unrolled(
    leaves: Mapping[str, np.ndarray],
    known: Mapping[str, Any],
    *,
    path: str,
    base_fingerprint: str | None,
    initial: Mapping[str, np.ndarray] | None = None,
) -> peft_files.Adapter:
    """The adapter of trained leaves.

    Args:
      leaves: the trained leaves by path, float32.
      known: what `record` gave.
      path: where they come from, for messages.
      base_fingerprint: identity of the original base.
      initial: the adapter that was taken out of the weights (`lora_a`, `lora_b` by path), if one
        was. The result is then for the original base: what was trained less what was taken out,
        with twice the rank.
    """
    modules: dict[str, dict[str, np.ndarray]] = {}
    for module, target in known["targets"].items():
        for position, name in enumerate(target["names"]):
            index = position if target["layers"] else None
            kinds = _module_tensors(module, target, index, leaves)
            if initial:
                kinds = _difference(kinds, _module_tensors(module, target, index, initial))
            modules.setdefault(name, {}).update(kinds)
    for leaf, where in known["full"].items():
        for name, kinds in _full_tensors(leaf, leaves[leaf], where):
            modules.setdefault(name, {}).update(kinds)
    for name, ids in known["tokens"].items():
        if ids:
            modules.setdefault(name, {})["trainable_tokens"] = leaves[targets.TOKEN_ROWS]
    settings = _config_of(known["peft"])
    if initial:
        settings = _doubled(settings)
    # Runs of before there was such a model do not say it.
    interleaved = known.get("interleaved", False)
    return peft_files.Adapter(path, settings, modules, base_fingerprint, interleaved=interleaved)


def _module_tensors(
    module: str, target: Mapping[str, Any], position: int | None, leaves: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """One module's adapter in PEFT's shapes, without the padding of ranks."""

    def leaf(name: str) -> np.ndarray:
        array = leaves[f"{module}.{name}"]
        return array if position is None else array[position]

    r = target["ranks"][position or 0]
    a, b = (np.swapaxes(factor, -1, -2) for factor in (leaf("lora_a")[..., :r],
                                                       leaf("lora_b")[..., :r, :]))  # fmt: skip
    if target["is_embedding"]:
        return {"lora_embedding_A": a, "lora_embedding_B": b}
    kinds = {"lora_A": a, "lora_B": b}
    if f"{module}.lora_magnitude" in leaves:
        kinds["lora_magnitude_vector"] = leaf("lora_magnitude")
    return kinds


def _difference(
    trained: Mapping[str, np.ndarray], initial: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    return {
        "lora_A": np.concatenate([trained["lora_A"], initial["lora_A"]], axis=0),
        "lora_B": np.concatenate([trained["lora_B"], -initial["lora_B"]], axis=1),
    }


def _full_tensors(
    leaf: str, array: np.ndarray, where: Mapping[str, Any]
) -> Iterable[tuple[str, dict[str, np.ndarray]]]:
    kind = leaf.rpartition(".")[2]
    layers = array if where["stacked"] else array[None]
    for name, layer in zip(where["modules"], layers, strict=True):
        yield name, {kind: layer.T if where["transposed"] else layer}


def _config_of(stored: Mapping[str, Any]) -> peft_config.AdapterConfig:
    """The config as JSON gave it back, with tuples for lists."""
    tokens = {name: tuple(ids) for name, ids in stored["trainable_token_indices"].items()}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
    return peft_config.AdapterConfig(**values | {"trainable_token_indices": tokens})


def _doubled(settings: peft_config.AdapterConfig) -> peft_config.AdapterConfig:
    """Twice the rank at the same scaling."""
    factor = math.sqrt(2) if settings.use_rslora else 2
    return dataclasses.replace(
        settings,
        r=2 * settings.r,
        lora_alpha=factor * settings.lora_alpha,
        rank_pattern={k: 2 * r for k, r in settings.rank_pattern.items()},
        alpha_pattern=_doubled_alphas(settings, factor),
        init_lora_weights="default",
    )


def _doubled_alphas(settings: peft_config.AdapterConfig, factor: float) -> dict[str, float]:
    return {k: factor * alpha for k, alpha in settings.alpha_pattern.items()}


# ---- out of a folder ---------------------------------------------------------------------------


def open_adapter(
    path: str, base: Mapping[str, Any] | None = None, *, lora_alpha: float | None = None
) -> peft_files.Adapter:
    """Reads an adapter from a PEFT folder, a run's folder, a step's folder or a MaxText checkpoint.

    Args:
      path: the folder.
      base: the config.json of its base; without it a MaxText checkpoint cannot be read, nor PEFT's
        adapters on the experts of gpt-oss.
      lora_alpha: used for a MaxText checkpoint that does not state its own; without it, such a
        checkpoint is an error.

    Raises:
      ModelError, CheckpointError: there is none, it is damaged, or it asks for what is not
        supported.
    """
    folder = pathlib.Path(os.path.expanduser(path))
    if not os.path.isdir(folder):
        raise errors.ModelError(path, None, "is not a folder", "give a run or a PEFT folder")
    if any((folder / name).exists() for name in (peft_files.CONFIG, peft_files.WEIGHTS)):
        model = base and causal_lm.from_hf(base, "the base's config.json", dtype="float32")
        return peft_files.read(str(folder), interleaved=model.is_interleaved if model else None)
    arrays = maxtext_folder.find(str(folder))
    if arrays is not None and base is None:
        what = "is a MaxText checkpoint, whose adapters are nothing without their base"
        remedy = "generate and merge take it with --model, and a run as init_adapter"
        raise errors.ModelError(path, None, what, remedy)
    if arrays is not None and base is not None:
        return maxtext_adapter.read(arrays, base, "the base's config.json", lora_alpha=lora_alpha)
    checkpoints, step = store.find(folder)
    return of_checkpoint(checkpoints, step, where=f"{path} (step {step})")


def of_checkpoint(checkpoints: store.Checkpoints, step: int, *, where: str) -> peft_files.Adapter:
    """The adapter of one step; `where` names it in messages.

    Raises:
      CheckpointError: it is damaged, or the run trains all weights.
    """
    meta = checkpoints.meta(step)
    if meta["adaptation"] is None:
        what = "is of a run that trains all weights: it holds no adapter"
        raise errors.CheckpointError(where, None, what, "use it as model.path")
    has_initial = meta["config"]["lora.init_lora_weights"] in config.FACTORED_INITS
    qtype, tile_size = (meta["config"][f"quant.{key}"] for key in ("qtype", "tile_size"))
    tiles = "" if tile_size is None else f" in tiles of {tile_size}"
    adapter = unrolled(
        checkpoints.trained(step),
        meta["adaptation"],
        path=where,
        base_fingerprint=meta["base_fingerprint"],
        initial=checkpoints.leaves(step, "initial") if has_initial else None,
    )
    notes = (f"it was trained on a base of quant.qtype={qtype!r}{tiles}",)
    return dataclasses.replace(adapter, notes=notes)


def check_equal(found: peft_files.Adapter, wanted: peft_files.Adapter) -> None:
    """Raises ModelError unless both hold the same tensors, bit for bit, at the same scalings."""
    same_names = found.modules.keys() == wanted.modules.keys() and all(
        found.modules[name].keys() == wanted.modules[name].keys() for name in wanted.modules
    )
    if not same_names or not all(
        np.array_equal(found.modules[name][kind], array)
        and _have_one_scaling(found.config, wanted.config, name)
        for name, kinds in wanted.modules.items()
        for kind, array in kinds.items()
    ):
        what = "does not read back as it was written"
        raise errors.ModelError(found.path, None, what, "is the disk sound?")


def _have_one_scaling(
    one: peft_config.AdapterConfig, other: peft_config.AdapterConfig, name: str
) -> bool:
    """Whether two configs give a module the same scaling.

    The last bits may differ: where adapters are joined, alpha is computed from a sum of ranks.
    """
    scalings = (peft_config.scaling(config, name) for config in (one, other))
    return math.isclose(*scalings, rel_tol=1e-12)


# ---- onto a model ------------------------------------------------------------------------------


class Attached(NamedTuple):
    """An adapter on its model.

    Attributes:
      model: the model with the adapter's targets.
      trainable: its leaves as numpy arrays, for `model.bind`.
      placed: the adapter under the names of this model, with both names of a tied table.
      base_weights: the base's own weights that the adapter holds copies of, by leaf path.
      notes: what a user should be told.
    """

    model: causal_lm.CausalLM
    trainable: trees.Tree
    placed: peft_files.Adapter
    base_weights: Mapping[str, np.ndarray]
    notes: tuple[str, ...]


def check_base(adapter: peft_files.Adapter, base_fingerprint: str) -> None:
    """Raises ModelError if the adapter says that it was trained on another base."""
    if adapter.base_fingerprint not in (None, base_fingerprint):
        raise errors.ModelError(
            adapter.path,
            adapter.base_fingerprint,
            f"was trained on another base than this one of fingerprint {base_fingerprint[:12]}",
            "use the base that it was trained on",
        )


def check_copies(attached: Attached, base: trees.Tree) -> None:
    """Raises ModelError if the adapter holds other weights of the base than `base` has.

    PEFT puts such copies into the base, so they would be part of what the adapter computes. Weights
    that are quantised here are not compared.
    """
    flat = trees.flatten(base)
    for path, copy in attached.base_weights.items():
        own = flat[path]
        if isinstance(own, jax.Array) and not np.array_equal(
            host_arrays.on_host(own), copy.astype(own.dtype)
        ):
            what = "holds a copy of this weight that is not that of the base"
            remedy = "use the base that it was trained on"
            raise errors.ModelError(path, None, what, remedy)


def attach(
    adapter: peft_files.Adapter, model: causal_lm.CausalLM, *, base_fingerprint: str | None
) -> Attached:
    """Puts an adapter on a model.

    Args:
      adapter: an adapter from a folder or a run.
      model: the model, whatever it trains.
      base_fingerprint: that of its base; None if it is not known yet, see `check_base`.

    Raises:
      ModelError: it was trained on another base, a module that it names is not filled, or a tensor
        does not fit; all problems in one error.
    """
    if base_fingerprint is not None:
        check_base(adapter, base_fingerprint)
    names = {n for module in model.modules.values() for n in module.names}
    names |= {n.rpartition(".")[0] for layer in model.hf_names.values() for n in layer}
    placed = peft_files.place(adapter, names)
    problems = [*_unfilled(placed, model), *_tied_problems(placed, model)]
    joined = {name for names in targets.JOINED.values() for name in names}
    if adapter.interleaved != model.is_interleaved and any(
        peft_experts.is_of_experts(kinds) and name.rpartition(".")[2] in joined
        for name, kinds in placed.modules.items()
    ):
        what = "was read or trained as the adapter of a model with other files than this base's"
        problems.append(errors.Problem(placed.path, None, what, "use it with its own base"))
    rest = {name: dict(kinds) for name, kinds in placed.modules.items()}
    found = _Leaves(placed.path, {}, problems)
    adapted = _take_adapters(rest, placed.config, model, found)
    token_ids = _take_token_rows(rest, placed.config, model, found)
    copies = _take_copies(rest, model, found)
    full = _take_full(rest, model, found)
    for name, kinds in rest.items():
        for kind in kinds:
            found.problem(name, f"has a {kind}, which this model cannot take", "")
    adaptation = targets.Adaptation(adapted, full, token_ids)
    for clash in targets.conflicts(adaptation, is_tied=model.is_tied):
        where = f"{placed.path}: {clash.where.removeprefix('lora.')}"
        remedy = "merge the adapter into its base in PEFT"
        problems.append(dataclasses.replace(clash, where=where, remedy=remedy))
    if problems:
        raise errors.ModelError.of(errors.first(problems, placed.path))
    tree = trees.unflatten(found.leaves)
    placed = _with_both_names(placed, model)
    return Attached(model.with_adaptation(adaptation), tree, placed, copies, placed.notes)


def _with_both_names(adapter: peft_files.Adapter, model: causal_lm.CausalLM) -> peft_files.Adapter:
    """The adapter with what it makes of a tied table under the head's name too."""
    table, head = (model.modules[path].names[0] for path in (targets.EMBEDDING, targets.HEAD))
    shared = {
        kind: array
        for kind, array in adapter.modules.get(table, {}).items()
        if kind in ("weight", "trainable_tokens")
    }
    if not (model.is_tied and shared):
        return adapter
    both = {head: {**adapter.modules.get(head, {}), **shared}}
    return dataclasses.replace(adapter, modules={**adapter.modules, **both})


@dataclasses.dataclass(frozen=True)
class _Leaves:
    """Leaves as they are put together, and what is wrong with them."""

    path: str
    leaves: dict[str, np.ndarray]
    problems: list[errors.Problem]

    def problem(self, name: str, what: str, remedy: str) -> None:
        self.problems.append(errors.Problem(f"{self.path}: {name}", None, what, remedy))

    def fits(self, name: str, array: np.ndarray, shape: Sequence[int]) -> bool:
        if array.shape == tuple(shape):
            return True
        what = f"has shape {list(array.shape)}, but this model makes it {list(shape)}"
        self.problem(name, what, "use the base that the adapter was trained on")
        return False


def _unfilled(adapter: peft_files.Adapter, model: causal_lm.CausalLM) -> list[errors.Problem]:
    """Modules of the model that the config names and the adapter has no tensors for."""
    takes_linear_only = adapter.config.target_modules == targets.ALL_LINEAR
    named = adapter.config.target_parameters
    filled = {n for n, kinds in adapter.modules.items() if peft_checks.is_adapted(kinds)}
    # Several modules may be one parameter in PEFT; a file's tensors tell which of them it adapts.
    shared = {targets.parameter_name(name) for name in filled}

    def is_named(name: str) -> bool:
        return targets.matches(named, targets.parameter_name(name))

    def is_begun(module: targets.AdaptableModule) -> bool:
        # Names in `target_modules` do not mean experts and routers, which PEFT has no modules of,
        # unless the adapter holds tensors of some.
        return not filled.isdisjoint(module.names)

    return [
        errors.Problem(
            f"{adapter.path}: {name}",
            None,
            "is a target of the adapter, which has no tensors for it",
            "is it whole, and is this its base?",
        )
        for module in model.modules.values()
        for name in module.names
        if not (takes_linear_only and module.kind != "linear" and not is_named(name))
        and not (module.is_parameter and not is_named(name) and not is_begun(module))
        and name not in adapter.modules
        and targets.parameter_name(name) not in shared
        and peft_config.is_target(adapter.config, name)
    ]


def _tied_problems(adapter: peft_files.Adapter, model: causal_lm.CausalLM) -> list[errors.Problem]:
    """A tied table that only one of its two sides has a trained copy of."""
    if not model.is_tied:
        return []
    names = [model.modules[path].names[0] for path in (targets.EMBEDDING, targets.HEAD)]
    adapted = "lora_embedding_A" in adapter.modules.get(names[0], {})
    if adapted and adapter.config.ensure_weight_tying:
        what = f"has an adapter that {names[1]} shares (ensure_weight_tying): not supported"
        remedy = "merge the adapter into its base in PEFT"
        return [errors.Problem(f"{adapter.path}: {names[0]}", None, what, remedy)]
    copies = [adapter.modules.get(name, {}).get("weight") for name in names]
    table, head = copies
    if (table is None and head is None) or adapter.config.ensure_weight_tying:
        return []
    if table is not None and head is not None and np.array_equal(table, head):
        return []
    what = f"is trained apart from its twin, but this base ties {names[1]} to {names[0]}"
    return [
        errors.Problem(
            f"{adapter.path}: {name}", None, what, "merge the adapter in PEFT, and untie the model"
        )
        for name, copy in zip(names, copies, strict=True)
        if copy is not None
    ]


def _take_adapters(
    rest: dict[str, dict[str, np.ndarray]],
    settings: peft_config.AdapterConfig,
    model: causal_lm.CausalLM,
    found: _Leaves,
) -> dict[str, targets.Target]:
    """Moves the adapters' tensors out of `rest` into stacked leaves."""
    adapted: dict[str, targets.Target] = {}
    for path, module in model.modules.items():
        is_embedding = module.kind == "embedding"
        kinds = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        layers = [i for i, n in enumerate(module.names) if kinds[0] in rest.get(n, {})]
        if not layers:
            continue
        names = tuple(module.names[i] for i in layers)
        target = targets.Target(
            layers=tuple(layers) if module.is_stacked else (),
            names=names,
            ranks=tuple(peft_config.rank(settings, n) for n in names),
            scalings=tuple(peft_config.scaling(settings, n) for n in names),
            is_embedding=is_embedding,
            use_dora=settings.use_dora,
        )
        adapted[path] = target
        for name, scaling in zip(names, target.scalings, strict=True):
            if not float(_FLOAT32.tiny) <= scaling <= float(_FLOAT32.max):
                what = f"is scaled by {scaling:g}, which float32 cannot hold"
                found.problem(name, what, "correct lora_alpha and r")
        infos = trees.flatten(adapters.adapter_infos(model.modules, {path: target}))
        for leaf, kind in ((f"{path}.lora_a", kinds[0]), (f"{path}.lora_b", kinds[1])):
            arrays = [rest[name].pop(kind) for name in names]
            found.leaves.update(_stacked(leaf, arrays, target, infos[leaf].shape, found))
        if target.use_dora:
            leaf = f"{path}.lora_magnitude"
            arrays = [rest[name].pop("lora_magnitude_vector") for name in names]
            # On an embedding it has a meaning of its own, which `conflicts` refuses.
            if not is_embedding and all([found.fits(n, a, infos[leaf].shape[-1:]) for n, a in
                    zip(names, arrays, strict=True)]):  # fmt: skip
                found.leaves[leaf] = np.stack(arrays) if module.is_stacked else arrays[0]
    return adapted


def _stacked(
    leaf: str,
    arrays: Sequence[np.ndarray],
    target: targets.Target,
    shape: Sequence[int],
    found: _Leaves,
) -> dict[str, np.ndarray]:
    """One leaf of `[r, in]` or `[out, r]` arrays: transposed, padded, stacked, float32."""
    rank_axis = -1 if leaf.endswith("lora_a") else -2
    whole = shape[1:] if target.layers else shape
    layers = []
    for name, r, array in zip(target.names, target.ranks, arrays, strict=True):
        own = list(whole)
        own[rank_axis] = r
        stored = (*own[:-2], own[-1], own[-2])
        if found.fits(f"{name}.{leaf.rpartition('.')[2]}", array, stored):
            layer = np.zeros(whole, np.float32)
            layer[tuple(slice(n) for n in own)] = array.astype(np.float32).swapaxes(-1, -2)
            layers.append(layer)
    if len(layers) < len(arrays):
        return {}
    return {leaf: np.stack(layers) if target.layers else layers[0]}


def _take_token_rows(
    rest: dict[str, dict[str, np.ndarray]],
    settings: peft_config.AdapterConfig,
    model: causal_lm.CausalLM,
    found: _Leaves,
) -> tuple[int, ...]:
    name = model.modules[targets.EMBEDDING].names[0]
    rows = rest.get(name, {}).pop("trainable_tokens", None)
    if rows is None:
        return ()
    ids = next(iter(settings.trainable_token_indices.values()))
    size = model.modules[targets.EMBEDDING].weight.shape[0]
    for token in (token for token in ids if token >= size):
        found.problem(name, f"has the row of token {token}, the base has {size} rows", "")
    if found.fits(name, rows, (len(ids), model.modules[targets.EMBEDDING].weight.shape[1])):
        found.leaves[targets.TOKEN_ROWS] = rows.astype(np.float32)
    return tuple(ids)


def _take_copies(
    rest: dict[str, dict[str, np.ndarray]], model: causal_lm.CausalLM, found: _Leaves
) -> dict[str, np.ndarray]:
    """The base's own weights that PEFT stores beside adapters on the embedding or the head."""
    copies: dict[str, np.ndarray] = {}
    for path in (targets.EMBEDDING, targets.HEAD):
        name = model.modules[path].names[0]
        copy = rest.get(name, {}).pop("base_weight", None)
        if copy is not None and found.fits(name, copy, model.modules[path].weight.shape):
            own = f"{path}.weight" in model.flat_infos
            copies[f"{path if own else targets.EMBEDDING}.weight"] = copy
    return copies


def _take_full(
    rest: dict[str, dict[str, np.ndarray]], model: causal_lm.CausalLM, found: _Leaves
) -> tuple[str, ...]:
    """Moves whole weights and biases out of `rest`."""
    if model.is_tied:  # The two are equal, see `_tied_problems`.
        rest.get(model.modules[targets.HEAD].names[0], {}).pop("weight", None)
    full = []
    for leaf, hf_names in model.hf_names.items():
        kind = leaf.rpartition(".")[2]
        names = [name.rpartition(".")[0] for name in hf_names]
        having = [name for name in names if kind in rest.get(name, {})]
        if not having:
            continue
        if len(having) < len(names):
            what = f"is trained whole in {len(having)} of {len(names)} layers, which needs them all"
            found.problem(having[0], what, "")
        arrays = [rest[name].pop(kind) for name in having]
        info = model.flat_infos[leaf]
        fitting = [found.fits(n, a, info.file_shape) for n, a in zip(having, arrays, strict=True)]
        if all(fitting):
            layers = [(a.T if info.is_transposed else a).astype(np.float32) for a in arrays]
            found.leaves[leaf] = np.stack(layers) if info.is_stacked else layers[0]
        full.append(leaf)
    return tuple(full)


def differences(
    found: targets.Adaptation, wanted: targets.Adaptation, path: str
) -> list[errors.Problem]:
    """How the adapter at `path` differs from what a run trains."""
    problems = []
    has, wants = _per_module(found), _per_module(wanted)
    for name in sorted(has.keys() | wants.keys()):
        if has.get(name) != wants.get(name):
            what = f"has {has.get(name, 'no adapter')}, this run {wants.get(name, 'none')}"
            problems.append(errors.Problem(f"{path}: {name}", None, what, ""))
    for what, one, other in (
        ("whole weights", found.full, wanted.full),
        ("rows of the embedding", found.token_ids, wanted.token_ids),
    ):
        if one != other:
            text = f"trains {list(one) or 'none'}, this run {list(other) or 'none'}"
            problems.append(errors.Problem(f"{path}: {what}", None, text, ""))
    return problems


def _per_module(adaptation: targets.Adaptation) -> dict[str, str]:
    return {
        name: f"r={r}, scaling {scaling:.6g}" + (" with DoRA" if target.use_dora else "")
        for target in adaptation.targets.values()
        for name, r, scaling in zip(target.names, target.ranks, target.scalings, strict=True)
    }

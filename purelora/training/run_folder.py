"""What a run's folder tells of itself beside its records: where it came from and what it made.

<workdir>/config.json     the settings, resolved
         /run.json        versions, command, git state, base, data, what is trained; one entry
                          for each time that the run was started or continued
         /tokenizer/      the model's tokenizer, so that the folder can serve as a model
         /metrics.jsonl   records
         /checkpoints/    steps
         /adapter/        the adapter of the last step, as PEFT keeps it, with a model card
"""

import datetime
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from purelora.config import schema
from purelora.core import errors
from purelora.interop import open_model
from purelora.interop.peft import adapter_sources, artefact
from purelora.interop.peft import files as peft_files
from purelora.multihost import runtime
from purelora.training import log, plan_report, setup
from purelora.weights import hf_write
from purelora.weights.tokenizer import Tokenizer

RECORD = "run.json"
ADAPTER = "adapter"
CARD = "README.md"
_PACKAGES = ("purelora", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "qwix", "numpy")
_GIT_SECS = 10


def check_adapter_folder(settings: schema.Config) -> None:
    """Raises ConfigError if the run's last adapter would take the place of something of the user's.

    What a run of purelora wrote there is replaced; anything else is not.
    """
    folder = os.path.join(settings.workdir, ADAPTER)
    if not settings.lora.enabled or not os.path.lexists(folder):
        return
    source = settings.init_adapter
    if source is not None and os.path.realpath(os.path.expanduser(source)) == (
        os.path.realpath(folder)
    ):
        what = f"is {folder}, which the run would replace"
        raise errors.ConfigError("init_adapter", source, what, "choose another workdir")
    if os.path.islink(folder) or not peft_files.is_own(folder):
        what = f"holds {folder}, which no run of purelora wrote and this one would replace"
        raise errors.ConfigError("workdir", settings.workdir, what, "choose another, or move it")


def begin(run: setup.Run, first_step: int) -> None:
    """Adds an entry to run.json, and keeps the tokenizer beside it.

    Raises:
      ConfigError: the folder cannot be written.
    """
    workdir = pathlib.Path(run.settings.workdir)
    entry = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "first_step": first_step,
        "command": sys.argv,
        "git": git_state(),
        "python": platform.python_version(),
        "versions": versions(),
        "processes": runtime.process_count(),
        "devices": [f"{d.platform} {d.device_kind}" for d in run.plan.mesh.devices.flat],
        "base": {"path": run.settings.model.path, "fingerprint": run.meta["base_fingerprint"]},
        "data": {"report": run.data.report, "fingerprint": run.data.fingerprint},
        "trained": plan_report.describe_targets(run.plan),
    }
    try:
        entries = [*_entries(workdir / RECORD), entry] if first_step else [entry]
        _replace(workdir / RECORD, json.dumps(entries, indent=1) + "\n")
        keep_tokenizer(run.model.tokenizer, workdir)
    except OSError as error:
        what = f"cannot be written: {error}"
        raise errors.ConfigError("workdir", str(workdir), what, "choose another folder") from error


def _entries(path: pathlib.Path) -> list[Any]:
    """What run.json holds; nothing depends on it, so a damaged one is set aside and begun anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        found = None
    if isinstance(found, list):
        return found
    old = path.with_name(path.name + ".old")
    path.replace(old)
    log.say(f"{path}: is damaged, and is begun anew; what it held is in {old.name}")
    return []


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def keep_tokenizer(tokenizer: Tokenizer, workdir: pathlib.Path) -> None:
    """Writes the tokenizer's files beside the checkpoints, so that the run can serve as a model."""
    folder = workdir / open_model.TOKENIZER
    folder.mkdir(exist_ok=True)
    for name, content in hf_write.tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)


def versions() -> dict[str, str]:
    """The installed versions of what decides the numbers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the working folder and whether it has changes; None outside of git."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *arguments], capture_output=True, text=True, timeout=_GIT_SECS, check=True
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changes)}


def finish(run: setup.Run, step: int) -> pathlib.Path | None:
    """Writes the adapter of the run's last step beside its checkpoints; None if it has none.

    What was written is read back and must hold the same bits; then it takes the place of what was
    there. A kill on the way leaves what `finish_once` does not take for the adapter of this step.

    Raises:
      ModelError: it cannot be written, or does not read back.
    """
    if run.meta["adaptation"] is None:
        return None
    folder = pathlib.Path(run.settings.workdir) / ADAPTER
    adapter = adapter_sources.of_checkpoint(run.checkpoints, step, where=run.settings.workdir)
    new, old = (folder.with_name(f"{ADAPTER}.{name}") for name in ("new", "old"))
    try:
        _remove(new)
        _remove(old)
        write_adapter(str(new), adapter, run.checkpoints.meta(step))
        artefact.check_equal(peft_files.read(str(new)), adapter)
        if folder.exists():
            folder.rename(old)  # Never half deleted under its own name.
        new.rename(folder)
        _remove(old)
    except OSError as error:
        what, remedy = f"cannot be written: {error}", "free some space, or check the permissions"
        raise errors.ModelError(str(folder), None, what, remedy) from error
    return folder


def _remove(path: pathlib.Path) -> None:
    """Deletes a folder, or what else there may be by its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def finish_once(run: setup.Run, step: int) -> pathlib.Path | None:
    """`finish`, unless that has been done for this very step: returns the folder if it is new.

    For a run that was killed after its last save. What it finds may be the adapter of a step before
    that, or half of one.
    """
    if run.meta["adaptation"] is None or _is_adapter_of(run, step):
        return None
    return finish(run, step)


def _is_adapter_of(run: setup.Run, step: int) -> bool:
    """Whether the folder of the adapter is whole, and holds the values of `step`."""
    folder = pathlib.Path(run.settings.workdir) / ADAPTER
    wanted = adapter_sources.of_checkpoint(run.checkpoints, step, where=run.settings.workdir)
    try:
        artefact.check_equal(peft_files.read(str(folder)), wanted)
    except errors.ModelError:
        return False
    return True


def write_adapter(folder: str, adapter: artefact.Adapter, meta: Mapping[str, Any]) -> None:
    """Writes a PEFT folder with a model card.

    Args:
      folder: where; new.
      adapter: the adapter of a step.
      meta: the meta of the checkpoint that it comes from.
    """
    facts = {"data_fingerprint": meta["data_fingerprint"], "step": meta["step"]}
    peft_files.write(
        folder, adapter, extra_metadata=facts, files={CARD: card(adapter, meta).encode()}
    )


def card(adapter: artefact.Adapter, meta: Mapping[str, Any]) -> str:
    """The model card of an adapter."""
    c, settings = adapter.config, meta["config"]
    base = c.base_model_name_or_path or "unknown"
    kept = ("task", "steps", "epochs", "batch_size", "max_length", "dtype", "quant.qtype",
            "quant.tile_size", "data.train", "optim.name", "optim.learning_rate",
            "optim.schedule", "lora.target_modules", "lora.lora_dropout", "seed")  # fmt: skip
    rows = "\n".join(f"| {key} | `{settings[key]}` |" for key in kept)
    loss = meta["eval_loss"]
    result = "" if loss is None else f"\nEval loss at that step: {loss:.4f}.\n"
    scaled = "alpha / sqrt(r)" if c.use_rslora else "alpha / r"
    return f"""---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags: [lora, purelora]
---

# Adapter for {base}

{c.adapter_kind.title}: r = {c.r}, alpha = {c.lora_alpha:g} (scaled by {scaled}),
trained by purelora {meta["versions"]["purelora"]} up to step {meta["step"]}.
{result}
| setting | value |
|---|---|
{rows}

Base fingerprint `{adapter.base_fingerprint}`, data fingerprint `{meta["data_fingerprint"]}`.

```python
from peft import PeftModel
model = PeftModel.from_pretrained(base_model, "this folder")
```

`python -m purelora.generate --model={base} --adapter=THIS_FOLDER --prompt="..."` runs it here;
`python -m purelora.merge --model={base} --adapter=THIS_FOLDER --output=merged` folds it into the
base.
"""

"""Records the train step of every family as lowered StableHLO, and compares two records.

    python benchmarks/step_programs.py --out=before.json
    python benchmarks/step_programs.py --out=after.json --against=before.json
    python benchmarks/step_programs.py --families=llama,gemma3 --texts=FOLDER --against=before.json

A change of the code that should not change what is computed is checked by this: record, change,
compare. The models are the small ones of tests/support/families.py. What is lowered is the step
that `python -m purelora.train` compiles, from shapes alone, on eight virtual CPU devices. The
record of a program has digests of its text, its number of operations and what XLA's cost analysis
says of it: operations of arithmetic, and bytes read and written. Names of functions and places in
the source are not part of the text. A setting that a family refuses is recorded as its error.

A program of two records is one of these:

    same        the text is the same
    reordered   the same operations with the same types, in another order
    rewritten   other operations, but as much arithmetic and as many bytes
    changed     anything else, which is an error, as is a program that one record lacks
"""

import argparse
import collections
import hashlib
import json
import pathlib
import re
import sys
from typing import Any

from common import runs

DEVICES, LENGTH = 8, 16
ADAPTED: dict[str, Any] = {
    "steps": 10,
    "batch_size": DEVICES,
    "max_length": LENGTH,
    "dtype": "float32",
    "lora.r": 4,
    "mesh.fsdp": 1,
}
SPLIT = {"mesh.fsdp": DEVICES}
INT8 = {"quant.qtype": "int8"}
SETTINGS: dict[str, dict[str, Any]] = {
    "float": {},
    "float, unrolled": {"scan_layers": False},
    "float, remat, 2 micro-batches": {"remat": "full", "accum_steps": 2},
    "int8, fsdp 8": INT8 | SPLIT,
    "int8, fsdp 8, unrolled": INT8 | SPLIT | {"scan_layers": False},
    "int8, fsdp 8, remat, adapters split": INT8 | SPLIT | {
        "remat": "full", "mesh.shard_adapters": True,
    },
    "int8, tensor 2": INT8 | {"mesh.tensor": 2},
    "int8, expert 2": INT8 | {"mesh.expert": 2},
    "DoRA on int8": INT8 | {"lora.use_dora": True},
    "token rows": {"lora.trainable_token_indices": "1,5"},
    "full fine-tuning, fsdp 8": SPLIT | {"lora.enabled": False},
}  # fmt: skip
SMOKE = (["llama"], ["float", "int8, fsdp 8"])
_NAMES = re.compile(r"@(\"[^\"]*\"|[\w.$-]+)")
_RESULT = re.compile(r"\s*jax\.result_info = \"(?:[^\"\\]|\\.)*\",?")
_NUMBERED = re.compile(r"(%|@f)[\w#:]+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="file to write the record to")
    parser.add_argument("--against", help="earlier record to compare with")
    parser.add_argument("--families", help="names from tests/support/families.py; default: all")
    parser.add_argument("--texts", help="folder for the texts of the programs, to look at")
    parser.add_argument("--smoke", action="store_true", help="two programs of one family")
    arguments = parser.parse_args()
    runs.use_virtual_devices(DEVICES)
    sys.path.insert(0, str(runs.ROOT))
    from tests.support import families

    names = arguments.families.split(",") if arguments.families else list(families.CONFIGS)
    settings = list(SETTINGS)
    if arguments.smoke:
        names, settings = SMOKE
    record = {
        f"{name} | {setting}": program(families.CONFIGS[name], setting, name, arguments.texts)
        for name in names
        for setting in settings
    }
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
    if arguments.smoke:
        compare(record, record)
    if arguments.against:
        earlier = json.loads(pathlib.Path(arguments.against).read_text())
        chosen = {key: entry for key, entry in earlier.items() if key.split(" | ")[0] in names}
        sys.exit(compare(chosen, record))


def program(
    sizes: dict[str, Any], setting: str, name: str, folder: str | None = None
) -> dict[str, Any]:
    """The record of one step; prints a line."""
    from purelora.core import errors

    try:
        lowered = lowering(sizes, SETTINGS[setting])
    except errors.ConfigError as refusal:
        print(f"{name:28} {setting:38} refused", flush=True)
        return {"refused": str(refusal)}
    text = stripped(lowered.as_text())
    if folder:
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name} {setting}.mlir".replace(" ", "_").replace(",", "")).write_text(text)
    operations = sorted(_NUMBERED.sub(r"\1", line).strip() for line in text.splitlines())
    kinds = collections.Counter(re.findall(r"\b(?:stablehlo|func|sdy)\.\w+", text))
    cost = lowered.cost_analysis()
    entry = {
        "text": digest(text),
        "operations": digest("\n".join(operations)),
        "count": sum(kinds.values()),
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "kinds": dict(sorted(kinds.items())),
    }
    print(f"{name:28} {setting:38} {entry['count']:6} {entry['text']}", flush=True)
    return entry


def lowering(sizes: dict[str, Any], changes: dict[str, Any]) -> Any:
    """The lowered step of a run of a model of these sizes."""
    import jax

    from purelora.training import planning

    settings = runs.settings("base", ADAPTED | {"model.path": "random:config.json"} | changes)
    mesh = settings.mesh
    used = (mesh.fsdp or 1) * mesh.tensor * mesh.expert
    plan = planning.make_plan(settings, sizes, "config.json", jax.devices()[:used])
    return runs.abstract_step(plan, schedule_steps=10).lower()


def stripped(text: str) -> str:
    """A program's text with functions numbered and without the names of results."""
    numbers: dict[str, str] = {}

    def numbered(name: re.Match[str]) -> str:
        return numbers.setdefault(name[0], f"@f{len(numbers)}")

    return _NAMES.sub(numbered, _RESULT.sub("", text))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints how the programs of two records differ; 1 if any changed, else 0."""
    verdicts = {key: verdict(before.get(key), after.get(key)) for key in before | after}
    for key, word in verdicts.items():
        if word not in ("same", "reordered"):
            print(f"{key}: {word}{difference(before.get(key), after.get(key))}")
    counts = collections.Counter(verdicts.values())
    print(", ".join(f"{number} {word}" for word, number in counts.most_common()))
    return int(counts["changed"] > 0)


def verdict(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """One of the words of the module's docstring."""
    if before is None or after is None:
        return "changed"
    if before == after:
        return "same"
    if "refused" in before or "refused" in after:
        return "changed"
    if before["operations"] == after["operations"]:
        return "reordered"
    as_much = all(before[key] == after[key] for key in ("flops", "bytes"))
    return "rewritten" if as_much else "changed"


def difference(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """What differs, to print."""
    if before is None or after is None:
        return ": only in the " + ("second" if before is None else "first") + " record"
    parts = [
        f"{key} {before.get(key)} -> {after.get(key)}"
        for key in ("refused", "count", "flops", "bytes")
        if before.get(key) != after.get(key)
    ]
    kinds = before.get("kinds", {}), after.get("kinds", {})
    parts += [
        f"{kind} {kinds[0].get(kind, 0)} -> {kinds[1].get(kind, 0)}"
        for kind in kinds[0] | kinds[1]
        if kinds[0].get(kind) != kinds[1].get(kind)
    ]
    return "".join(f"\n    {part}" for part in parts)


if __name__ == "__main__":
    main()

"""Imports go down only, and the core stays pure: read off the source, without running it."""

import ast
import pathlib

import pytest

import purelora

ROOT = pathlib.Path(purelora.__file__).parent
# The core by level; a module may import its own level and those below. All others are the shell.
LEVELS = (
    {"errors", "tree", "info", "hlo"},
    {"config", "grouped", "quant", "targets", "lora", "parallel", "params"},
    {"models", "loss"},
    {"rules", "specs", "collectives", "scan_axis"},
    {"step", "optim", "state"},
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(path for path in ROOT.rglob("*.py"))
CORE = [path for path in FILES if path.relative_to(ROOT).parts[0].removesuffix(".py") in LEVEL]
# Foreign packages and the only files that may import them.
OWNERS = {"flax": "boundary", "orbax": "checkpoint", "tensorstore": "io"}
SHELL_ONLY = ("ml_collections", "logging", "time", "os", "sys", "pathlib", "io", "flax",
              "orbax", "tensorstore", "absl", "random")  # fmt: skip


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ids(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_files_are_found():
    assert {name_of(path) for path in CORE} == set(LEVEL)


@pytest.mark.parametrize("path", CORE, ids=ids)
def test_core_imports_go_down_only(path):
    for name in imports(path):
        if name.startswith("purelora."):
            target = name.split(".")[1]
            assert target in LEVEL, f"imports the shell: {name}"
            assert LEVEL[target] <= LEVEL[name_of(path)], f"imports upwards: {name}"


def test_the_step_knows_no_model():
    for name in ("step", "optim", "state"):
        assert not any("models" in used for used in imports(ROOT / f"{name}.py"))


@pytest.mark.parametrize("path", CORE, ids=ids)
def test_core_is_pure(path):
    """No flax, no files, no clock, no log, no output and no names of mesh axes outside specs."""
    assert not {n for n in imports(path) if n.partition(".")[0] in SHELL_ONLY}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "open", "input", "exec", "eval"), node.lineno
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("now", "today", "environ", "io_callback"), node.lineno
        assert not isinstance(node, (ast.Global, ast.Nonlocal)), node.lineno
        if isinstance(node, ast.Constant) and name_of(path) not in ("rules", "specs", "config"):
            assert node.value not in ("fsdp", "tensor", "expert"), node.lineno


@pytest.mark.parametrize("package", OWNERS)
def test_one_module_owns_each_foreign_package(package):
    users = {
        name_of(path)
        for path in FILES
        if any(name.partition(".")[0] == package for name in imports(path))
    }
    assert all(user.startswith(OWNERS[package]) for user in users), users

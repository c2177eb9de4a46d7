"""Imports go down only, the core stays pure, tests stand alone: read off the source."""

import ast
import pathlib

import pytest

import purelora

ROOT = pathlib.Path(purelora.__file__).parent
# The packages from the ground up; a module may import its own package and those before it.
ORDER = (
    "core", "config", "ops", "lora", "sharding", "models", "multihost", "formats", "weights",
    "checkpoint", "interop", "data", "training", "inference", "analysis", "commands",
)  # fmt: skip
LEVEL = {name: level for level, name in enumerate(ORDER)}
FILES = sorted(ROOT.rglob("*.py"))
HERE = pathlib.Path(__file__).parent
TESTS = sorted(HERE.rglob("*.py"))
INSIDE = [path for path in FILES if path.parent != ROOT]
PURE = ("core", "config", "ops", "lora", "sharding", "models")
# The step and the optimiser are as pure as the packages below the files.
PURE_MODULES = ("training/step.py", "training/optimisers.py")
# A config file and the texts of a command line: the edge, where settings come in; and what prints
# the document of all keys.
EDGE = ("config/config_file.py", "config/command_line.py", "config/document.py")
# Foreign packages and the only places that may import them.
OWNERS = {
    "flax": ("training/nnx_boundary.py",),
    "orbax": ("checkpoint/",),
    "tensorstore": ("formats/array_store.py",),
    "tokenizers": ("weights/", "interop/"),
    "gguf": ("formats/", "interop/gguf/"),
    "jinja2": ("data/",),
    "ml_collections": ("config/",),
}
SHELL_ONLY = ("ml_collections", "logging", "time", "os", "sys", "pathlib", "io", "flax",
              "orbax", "tensorstore", "absl", "random")  # fmt: skip
MOST_LINES = 400


def place(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0]


CORE = [
    path
    for path in INSIDE
    if (package(path) in PURE and place(path) not in EDGE) or place(path) in PURE_MODULES
]


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_package_has_its_level():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ORDER)


def test_few_modules_stand_beside_the_packages():
    assert len([path for path in FILES if path.parent == ROOT]) <= 12


@pytest.mark.parametrize("path", INSIDE, ids=place)
def test_imports_go_down_only(path):
    for name in imports(path):
        if name.startswith("purelora."):
            target = name.split(".")[1]
            if target in LEVEL:
                assert LEVEL[target] <= LEVEL[package(path)], f"imports upwards: {name}"
            else:
                assert target == "__version__", f"imports a door of the top level: {name}"


def test_modules_do_not_import_each_other_in_a_circle():
    names = {".".join(("purelora", *path.relative_to(ROOT).with_suffix("").parts)): path
             for path in INSIDE}  # fmt: skip
    arrows = {
        name: {
            target
            for used in imports(path)
            for target in (used, used.rpartition(".")[0])
            if target in names and target != name
        }
        for name, path in names.items()
    }
    while arrows:
        ground = {name for name, targets in arrows.items() if not targets & set(arrows)}
        assert ground, f"in a circle, or above one: {sorted(arrows)}"
        arrows = {name: targets for name, targets in arrows.items() if name not in ground}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/**/__init__.py")), ids=place)
def test_a_package_says_what_it_is_and_may_know(path):
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    assert "It may import:" in text and ("It may not know" in text or "No package" in text)


def test_the_step_knows_no_model_but_its_losses():
    for name in PURE_MODULES:
        models = {used for used in imports(ROOT / name) if ".models" in used}
        assert models <= {"purelora.models.loss"}


@pytest.mark.parametrize("path", CORE, ids=place)
def test_core_is_pure(path):
    """No flax, no files, no clock, no log, no output and no names of mesh axes outside specs."""
    assert not {n for n in imports(path) if n.partition(".")[0] in SHELL_ONLY}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "open", "input", "exec", "eval"), node.lineno
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("now", "today", "environ", "io_callback"), node.lineno
        assert not isinstance(node, (ast.Global, ast.Nonlocal)), node.lineno
        if isinstance(node, ast.Constant) and package(path) not in ("sharding", "config"):
            assert node.value not in ("fsdp", "tensor", "expert"), node.lineno


@pytest.mark.parametrize("foreign", OWNERS)
def test_one_place_owns_each_foreign_package(foreign):
    users = {
        place(path)
        for path in FILES
        if any(name.partition(".")[0] == foreign for name in imports(path))
    }
    assert users and all(user.startswith(OWNERS[foreign]) for user in users), users


@pytest.mark.parametrize("path", FILES, ids=place)
def test_files_and_functions_are_short(path):
    text = path.read_text("utf-8")
    assert text.count("\n") <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 50, f"{node.name} has over 50 lines"


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(HERE).as_posix())
def test_no_file_imports_a_test(path):
    """What tests share lies in tests/support."""
    parts = [part for name in imports(path) for part in name.split(".")]
    assert not [part for part in parts if part.startswith("test_")]

"""How two records of programs are compared; and what every benchmark offers."""

import importlib
import sys

import pytest

from tests.support import documents

BENCHMARKS = documents.REPO / "benchmarks"
ENTRY = {"text": "a", "operations": "b", "count": 3, "flops": 5.0, "bytes": 7.0, "kinds": {"x": 3}}


@pytest.fixture
def step_programs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("step_programs")
    for name in ("step_programs", "common", "common.runs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "same"),
        ({"text": "z"}, "reordered"),
        ({"text": "z", "operations": "y", "count": 4}, "rewritten"),
        ({"text": "z", "operations": "y", "flops": 6.0}, "changed"),
        ({"text": "z", "operations": "y", "bytes": 6.0}, "changed"),
    ],
)
def test_two_programs_are_told_apart(step_programs, changes, verdict):
    assert step_programs.verdict(ENTRY, ENTRY | changes) == verdict


def test_a_program_that_is_missing_or_refused_is_a_change(step_programs):
    assert step_programs.verdict(None, ENTRY) == "changed"
    assert step_programs.verdict({"refused": "no"}, ENTRY) == "changed"
    assert step_programs.verdict({"refused": "no"}, {"refused": "no"}) == "same"
    assert step_programs.compare({"p": ENTRY}, {"p": ENTRY}) == 0
    assert step_programs.compare({"p": ENTRY}, {}) == 1


def test_a_text_does_not_depend_on_names_of_functions(step_programs):
    texts = [
        f'func @{name}(%a) {{jax.result_info = "[0].{name}"}}\n call @"{name}"(%b)\n call @other'
        for name in ("first", "second")
    ]
    assert step_programs.stripped(texts[0]) == step_programs.stripped(texts[1])
    assert "@other" not in step_programs.stripped(texts[0])


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_every_benchmark_has_a_smoke_size(script):
    assert '"--smoke"' in script.read_text()

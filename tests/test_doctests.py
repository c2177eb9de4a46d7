"""The examples in docstrings do what they say."""

import doctest
import importlib
import pathlib

import pytest

import purelora

ROOT = pathlib.Path(purelora.__file__).parent
WITH_EXAMPLES = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text("utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples(path):
    name = ".".join(("purelora", *path.relative_to(ROOT).with_suffix("").parts))
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0 and results.failed == 0

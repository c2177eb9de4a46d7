"""What is listed for a lane is there."""

import ast
import pathlib

import pytest

from tests.support import lanes

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("listed", lanes.LISTED)
def test_listed_tests_are_there(listed):
    path, name = listed.split("::")
    tree = ast.parse((HERE / path).read_text("utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]

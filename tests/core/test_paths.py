"""Dotted paths, against lists of their parts."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purelora.core import paths
from purelora.core.paths import Path

PARTS = st.lists(st.text("abw_", min_size=1, max_size=4), min_size=1, max_size=4)


@given(PARTS, PARTS)
def test_a_path_is_the_list_of_its_parts(above, below):
    path = Path.of([*above, *below])
    assert path == ".".join([*above, *below]) and hash(path) == hash(str(path))
    assert path.parts == (*above, *below)
    assert (path.first, path.name) == (above[0], below[-1])
    assert path.parent == Path.of([*above, *below][:-1])
    assert path.is_below(Path.of(above)) and path.below(Path.of(above)) == Path.of(below)
    assert path.ends_with(Path.of(below)) and not path.ends_with("x" + Path.of(below))
    assert path.with_name("x").parts == (*above, *below[:-1], "x")
    assert path.without(below[-1]) == path.parent and path.without("x") == path
    assert Path.of(above) / Path.of(below) == path and Path() / path == path


def test_only_whole_parts_count():
    path = Path("layers.q_proj")
    assert not path.is_below("lay") and not path.ends_with("proj")
    with pytest.raises(ValueError, match="layers.q_proj does not lie below lay"):
        path.below("lay")


def test_the_example_of_the_docstring():
    assert doctest.testmod(paths).failed == 0

"""Packing plans, against a plain search for the best row."""

import hypothesis
import pytest
from hypothesis import strategies as st

from purelora.data import packing

# Shared machines stall: a slow example is no failure.
UNTIMED = hypothesis.settings(deadline=None)
LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def slow_plan(lengths, max_length):
    """Best-fit decreasing by looking at every row; of equal rows, the one changed last."""
    rows = []  # [free space, time of the last change, members]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for time, index in enumerate(order):
        fitting = [row for row in rows if row[0] >= lengths[index]]
        if fitting:
            row = min(fitting, key=lambda row: (row[0], -row[1]))
        else:
            row = [max_length, 0, []]
            rows.append(row)
        row[0] -= lengths[index]
        row[1] = time
        row[2].append(index)
    return tuple(tuple(sorted(members)) for _, _, members in rows)


@UNTIMED
@hypothesis.given(LENGTHS, st.integers(40, 90))
def test_equals_the_plain_search(lengths, max_length):
    assert packing.plan(lengths, max_length, packing=True) == slow_plan(lengths, max_length)


@UNTIMED
@hypothesis.given(LENGTHS, st.integers(40, 90), st.booleans())
def test_every_example_is_in_one_row_and_rows_fit(lengths, max_length, pack):
    rows = packing.plan(lengths, max_length, packing=pack)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= max_length for row in rows)


@UNTIMED
@hypothesis.given(LENGTHS)
def test_no_two_rows_could_be_one(lengths):
    rows = packing.plan(lengths, 40, packing=True)
    sizes = sorted(sum(lengths[index] for index in row) for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 40


def test_known_plans():
    assert packing.plan([3, 9, 7, 1], 10, packing=True) == ((1, 3), (0, 2))
    assert packing.plan([3, 9, 7, 1], 10, packing=False) == ((0,), (1,), (2,), (3,))
    assert packing.plan([5, 5, 5, 5], 10, packing=True) == ((0, 1), (2, 3))
    assert packing.plan([], 10, packing=True) == ()


def test_an_example_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="11 tokens in a row of 10"):
        packing.plan([3, 11], 10, packing=True)


def test_many_examples():
    """Would take minutes if it looked at every row."""
    lengths = [37 + (index * 7919) % 3001 for index in range(100_000)]
    rows = packing.plan(lengths, 4096, packing=True)
    assert len(rows) * 4096 < 1.02 * sum(lengths)

"""Packing: which examples share a row.

Best-fit decreasing: the examples from the longest to the shortest, each into the fullest row that
still holds it. It needs at most 11/9 of the fewest rows possible, plus one.
"""

from collections.abc import Sequence

Row = tuple[int, ...]


def plan(lengths: Sequence[int], max_length: int, *, packing: bool) -> tuple[Row, ...]:
    """The examples of each row, as indices into `lengths`.

    Example: plan([3, 9, 7, 1], 10, packing=True) == ((1, 3), (0, 2)).

    Args:
      lengths: number of tokens of each example, none above `max_length`.
      max_length: tokens in a row.
      packing: False puts every example into a row of its own.
    """
    if lengths and max(lengths) > max_length:
        raise ValueError(f"an example of {max(lengths)} tokens in a row of {max_length}")
    if not packing:
        return tuple((index,) for index in range(len(lengths)))
    rows: list[list[int]] = []
    # rows_by_space[s] are the rows with s tokens free; bit s of `spaces` says that there are any,
    # so that the least sufficient space is the lowest bit from the length upwards.
    rows_by_space: list[list[int]] = [[] for _ in range(max_length + 1)]
    spaces = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        enough = spaces >> length << length
        if enough:
            space = (enough & -enough).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
            rows[row].append(index)
        else:
            space, row = max_length, len(rows)
            rows.append([index])
        rows_by_space[space - length].append(row)
        spaces |= 1 << (space - length)
    return tuple(tuple(sorted(row)) for row in rows)

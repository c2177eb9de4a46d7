"""Values that every package shares: trees, parameter declarations, batches, train state, errors.

It may import: no other package.
It may not know files, clocks, logs or flax.
"""

"""Several processes as one run: barriers, agreement, failure detection.

It may import: core.
It may not know anything of models or training.
"""

"""Checkpoints of MaxText: base weights and adapters.

It may import: as `purelora.interop`.
It may not know the train step.
"""

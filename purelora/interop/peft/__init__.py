"""PEFT adapter folders: reading, writing, checks, and arithmetic on adapters.

It may import: as `purelora.interop`.
It may not know the train step.
"""

"""Steps of a run on disk: what is saved, kept, verified and restored.

It may import: core, config, multihost.
It may not know models or the train step.
"""

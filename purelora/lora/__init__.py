"""Adapters: which modules are adapted, their declarations and their initial values.

It may import: core, config, ops.
It may not know models, meshes or files.
"""

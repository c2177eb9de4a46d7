"""Array functions: quantised and grouped matmuls, attention.

It may import: core.
It may not know modules, meshes or files.
"""

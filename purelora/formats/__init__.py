"""File formats, one a module: safetensors, GGUF, arrays of orbax, MXFP4; atomic output.

It may import: core.
It may not know models: bytes and names only.
"""

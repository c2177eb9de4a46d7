"""GGUF model files: reading, writing, and the tokenizer in them.

It may import: as `purelora.interop`.
It may not know the train step.
"""

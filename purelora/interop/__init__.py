"""Models and adapters of other programs (PEFT, GGUF, MaxText, built-in models, runs), and merging.

It may import: weights, formats, checkpoint and all below.
It may not know the train step.
"""

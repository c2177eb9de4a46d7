"""Model weights from disk to placed, quantised arrays, and back; tokenizers.

It may import: the core packages (floors 0 to 3), multihost, formats.
It may not know runs, checkpoints or the train step.
"""

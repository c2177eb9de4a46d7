"""The decoder, its layers and one short file for each model family.

It may import: core, config, ops, lora, sharding.
It may not know files, clocks or the train step.
"""

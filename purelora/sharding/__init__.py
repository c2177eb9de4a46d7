"""Rules, PartitionSpecs, the layer axis and collectives; the only place that names mesh axes.

It may import: core, config, ops, lora.
It may not know models or files.
"""

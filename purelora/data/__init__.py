"""From files of rows to batches: records, chat templates, masks, packing.

It may import: core, config, weights.
It may not know models, devices or the train step.
"""

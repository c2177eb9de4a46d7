"""One short file for each model family: sizes from config.json, declarations, the layer.

It may import: core, ops and the parts in `purelora.models`.
It may not know other packages.
"""

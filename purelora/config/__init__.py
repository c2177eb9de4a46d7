"""The settings of a run: schema, checks, config files and command lines.

It may import: core.
It may not know models or devices.
"""

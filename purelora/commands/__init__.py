"""The commands, one a module.

It may import: every package.
No package imports it.
"""

"""A model and its adapters, loaded to answer prompts.

It may import: training and all below.
It may not know analysis or commands.
"""

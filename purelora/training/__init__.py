"""The train step and what surrounds it: optimisers, NNX boundary, plan, set-up, log.

It may import: every package but inference, analysis and commands.
It may not know inference, analysis or commands.
"""

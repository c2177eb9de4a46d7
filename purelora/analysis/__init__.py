"""What a compiled program needs and does: HLO, memory, faults by kill.

It may import: training and all below.
It may not know commands.
"""

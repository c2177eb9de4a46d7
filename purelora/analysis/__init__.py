"""What a run needs and whether it resumes: HLO, memory, estimates, fault injection.

It may import: training and all below.
It may not know commands.
"""

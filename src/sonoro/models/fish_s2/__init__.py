"""Fish Audio S2 Pro, read from its released folder.

The weights are for research and other non-commercial use only (Fish Audio Research License); no official code is here.
"""

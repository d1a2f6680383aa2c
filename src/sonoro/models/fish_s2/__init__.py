"""Fish Audio S2 Pro, loaded from its released folder. Contains no official code.

The weights are for research and other non-commercial use only (Fish Audio Research License)."""

"""VoxCPM2, read from its released folder: continuous latents instead of codes.

Code and weights are released under the Apache License 2.0; no official code is here.
"""

"""VoxCPM2, loaded from its released folder: continuous latents instead of codes. Contains no official code.

Official code and weights are under the Apache License 2.0."""

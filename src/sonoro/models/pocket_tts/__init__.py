"""Pocket TTS, loaded from its released layout: a latent a frame, and a voice that is keys and values. Contains no
official code.

Official code is under the MIT License, weights are under CC-BY-4.0; each voice has a licence of its own."""

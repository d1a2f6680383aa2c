"""Pocket TTS, loaded from its released layout: a latent a frame, and a voice that is keys and values. Contains no
official code, which is under the MIT License. Weights are under CC-BY-4.0; each voice has a licence of its own."""

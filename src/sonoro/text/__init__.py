"""Text before a voice: structure, reading, segments. `read` tells what a voice will say."""

from sonoro.text.english.reader import Reading, read

__all__ = ["Reading", "read"]

"""Text of one segment while it arrives: ids as soon as no later character can change them. Runs on the CPU.

Whatever the pieces, the ids are those of the whole text.
"""

from __future__ import annotations

import re
import unicodedata

from sonoro.core.text import spoken_length

from .prompt import PromptBuilder, TextTokenizer

__all__ = ["LiveSegment", "LiveTokens"]

# A space between two words that no rule of the English normaliser reads together: each side is spelled out alone. Not
# after a ZIP or square that is to be counted, nor before what is, or may become, a Roman numeral.
_JOINT = re.compile(r"(?<!\S)(?!(?:[Zz]ip|sq) )[A-Za-z][a-z]+ (?=[a-z])(?![ivx]+(?![a-z]))")


# Marks, and what this version of Unicode does not know.
_UNSETTLED = ("Mn", "Mc", "Me", "Cn")


class LiveTokens:
    """`TextTokenizer.encode` of a text that comes in pieces, white space at both ends cut off."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._is_begun = False

    def feed(self, text: str) -> list[int]:
        """The next ids, now that `text` has come."""
        self._text += text
        self._begin()
        settled = _settled(self._text)
        ids, left = self._tokenizer.encode_settled(self._text[:settled])
        self._text = left + self._text[settled:]
        return ids

    def finish(self) -> list[int]:
        """The remaining ids."""
        return self._tokenizer.encode(self._text.rstrip())

    def _begin(self) -> None:
        if not self._is_begun:
            self._text = self._text.lstrip()
            self._is_begun = bool(self._text)


class LiveSegment:
    """The text of one segment, on its way to the ids that `PromptBuilder.build` lays out, the end of text included.

    Where the checkpoint has its text spelled out, a piece is given up to the last two plain words in a row: what comes
    after them may still decide how a number or a sign is read.
    """

    def __init__(self, prompts: PromptBuilder) -> None:
        self.max_letters = prompts.config.max_segment_letters
        self._prompts = prompts
        self._tokens = LiveTokens(prompts.tokenizer)
        self._raw = ""
        self._is_spoken = False

    def letters(self, text: str) -> int:
        """Letters of `text` as it is spoken."""
        return spoken_length(self._prompts.spell_out(text).text)

    def feed(self, text: str) -> list[int]:
        """The next ids, now that `text` has come."""
        if self._prompts.config.text_normalizer is None:
            return self._give(text)
        self._raw += text
        cut = max((found.end() for found in _JOINT.finditer(self._raw)), default=0)
        ready, self._raw = self._raw[:cut], self._raw[cut:]
        return self._give(self._prompts.normalize(ready).removesuffix(".") + " ") if cut else []

    def finish(self) -> list[int]:
        """The remaining ids and that of the end of text; none at all if nothing could be spoken."""
        ids = [*self._give(self._prompts.normalize(self._raw)), *self._tokens.finish()]
        return [*ids, self._prompts.config.tts_eos_token_id] if self._is_spoken or ids else []

    def _give(self, text: str) -> list[int]:
        ids = self._tokens.feed(text)
        self._is_spoken = self._is_spoken or bool(ids)
        return ids


def _settled(text: str) -> int:
    """How many characters of `text` NFC leaves as they are whatever follows, but for the last if it is not white space.

    A letter may be joined to the one before it (Hangul does), no further.
    """
    if text and text[-1] in " \t\r\n":
        return len(text)
    for index in range(len(text) - 1, 0, -1):
        character = text[index]
        if character.isascii() or unicodedata.category(character) not in _UNSETTLED:
            return index
    return 0

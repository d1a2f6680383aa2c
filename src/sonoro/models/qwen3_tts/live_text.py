"""Incremental tokenisation of live text: ids are released once no later character can change them.

The ids equal those of the whole text, however it is cut into pieces. Runs on the CPU."""

import unicodedata

from sonoro.core.types import TextFormat
from sonoro.text.english.heteronyms import REACH, first_unsettled
from sonoro.text.joints import last_joint
from sonoro.text.splitting import SpokenText, joined, spoken_length

from .prompt import PromptBuilder, TextTokenizer

# Combining marks, and characters unknown to this version of Unicode.
_UNSETTLED = ("Mn", "Mc", "Me", "Cn")


class LiveTokens:
    """`TextTokenizer.encode` of a text that arrives in pieces, stripped at both ends."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._is_begun = False

    def feed(self, text: str) -> list[int]:
        """Append `text`; returns the ids that are now settled."""
        self._text += text
        if not self._is_begun:
            self._text = self._text.lstrip()
            self._is_begun = bool(self._text)
        settled = _settled(self._text)
        ids, left = self._tokenizer.encode_settled(self._text[:settled])
        self._text = left + self._text[settled:]
        return ids

    def finish(self) -> list[int]:
        """The remaining ids."""
        return self._tokenizer.encode(self._text.rstrip())


class LiveSegment:
    """`LiveText` of one segment: the ids are those that `PromptBuilder.build` uses, end of text included.
    With a normaliser, text is released up to the last joint: what follows may still change how the rest is read."""

    def __init__(self, prompts: PromptBuilder, text_format: TextFormat = "auto", voice: str | None = None) -> None:
        self.max_letters = prompts.config.max_segment_letters
        self._prompts, self._format, self._voice = prompts, text_format, voice
        self._tokens = LiveTokens(prompts.tokenizer)
        self._parts: list[SpokenText] = []
        # Text that is not given to the tokeniser yet, and at which character of all text it begins.
        self._raw, self._at = "", 0
        self._before = ""
        self._is_spoken = False

    @property
    def spoken(self) -> SpokenText:
        return joined(self._parts).stripped()

    def letters(self, text: str) -> int:
        """Length of `text` in letters, once normalised."""
        return spoken_length(self._prompts.spell_out(text, self._format, voice=self._voice).text)

    def feed(self, text: str) -> list[int]:
        """Append `text`; returns the ids that are now settled."""
        self._raw += text
        if self._prompts.config.text_normalizer is None:
            return self._give(SpokenText(self._raw), len(self._raw))
        cut, is_sentence = last_joint(self._raw)
        if self._prompts.config.heteronyms and (settled := first_unsettled(self._raw, cut)) < cut:
            cut, is_sentence = last_joint(self._raw[:settled])
        if not cut:
            return []
        comma = "," * (self._raw[cut - 2] in ",;:")
        after = "" if is_sentence else f"{comma} {self._raw[cut : cut + REACH]}"
        spoken = self._prompts.normalize(self._raw[:cut], self._format, (self._before, after), self._voice)
        # The full stop is not of the text, unless a list item ends; a comma and the space before the next word are.
        text = spoken.text if is_sentence else spoken.text.removesuffix(".")
        is_mark = not is_sentence and self._raw[cut - 2] in ",;:" and text != spoken.text
        mark = SpokenText("," * is_mark).moved(cut - 2)
        joint = SpokenText(" " * bool(text)).moved(cut - 1)
        ids = self._give(joined([spoken.part(0, len(text)), mark, joint]), cut)
        self._before = "" if is_sentence else self._before
        return ids

    def finish(self) -> list[int]:
        """The remaining ids and the end of text; empty if the segment has nothing to speak."""
        ids = [
            *self._give(
                self._prompts.normalize(self._raw, self._format, (self._before, ""), self._voice), len(self._raw)
            ),
            *self._tokens.finish(),
        ]
        return [*ids, self._prompts.config.tts_eos_token_id] if self._is_spoken or ids else []

    def _give(self, spoken: SpokenText, written: int) -> list[int]:
        """Give `spoken`, which was written as the first `written` characters of `_raw`, to the tokeniser."""
        self._parts.append(spoken.moved(self._at))
        self._before = (self._before + self._raw[:written])[-REACH:]
        self._raw, self._at = self._raw[written:], self._at + written
        ids = self._tokens.feed(spoken.text)
        self._is_spoken = self._is_spoken or bool(ids)
        return ids


def _settled(text: str) -> int:
    """How many leading characters of `text` NFC leaves unchanged whatever follows.
    A later character may compose with the last letter and its marks (as in Hangul), no further back."""
    if text and text[-1] in " \t\r\n":
        return len(text)
    for index in range(len(text) - 1, 0, -1):
        character = text[index]
        if character.isascii() or unicodedata.category(character) not in _UNSETTLED:
            return index
    return 0

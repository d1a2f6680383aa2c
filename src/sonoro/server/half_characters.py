"""Joins characters that a client has split over two messages: JSON escapes one beyond U+FFFF as two surrogates."""

import json
import re

_FIELDS = ("text", "transcript")
"""The fields of any protocol that hold text which arrives in pieces."""

_SURROGATE = re.compile(r"\\u[dD]")
_MAX_WAITING = 32


class HalfCharacters:
    """The first halves of characters at the ends of pieces of text, by the context of the message."""

    def __init__(self) -> None:
        self._waiting: dict[int, str] = {}
        self.has_lost = False
        """Whether the context of the last message waited for a second half that the message did not bring."""

    def join(self, message: str) -> str | None:
        """`message` with the half that its context waits for before its text, and without one at its end; None if
        nothing is left of its text. Any other message is returned as it is."""
        if not self._waiting and not _SURROGATE.search(message):
            return message
        try:
            fields = json.loads(message)
        except (ValueError, RecursionError):
            return message
        if not isinstance(fields, dict) or fields.get("type") == "synthesize":  # Wyoming; its text is whole
            return message
        data = fields["data"] if isinstance(fields.get("data"), dict) else fields  # Wyoming nests them
        found = next((name for name in _FIELDS if isinstance(data.get(name), str) and data[name]), None)
        if found is None:
            return message
        given: str = data[found]
        # A hash, as the id may be long.
        text = self._joined(hash(repr(fields.get("context_id"))), given)
        if text == given:
            return message
        data[found] = text
        return json.dumps(fields) if text else None

    def _joined(self, context: int, text: str) -> str:
        first = self._waiting.pop(context, "")
        self.has_lost = bool(first) and not "\udc00" <= text[0] <= "\udfff"
        if first and not self.has_lost:
            text = (first + text[0]).encode("utf-16", "surrogatepass").decode("utf-16") + text[1:]
        if "\ud800" <= text[-1] <= "\udbff" and len(self._waiting) < _MAX_WAITING:
            self._waiting[context], text = text[-1], text[:-1]
        return text

"""The sine model, taking its text a character at a time while it speaks: what it says equals what it says of the whole.

An id is held back until another character has come, as a tokeniser would. A row that is stepped before the text of its
frame has come fails loudly; so does appending "☠".
"""

from types import SimpleNamespace

from fakes.voiced_sine import VoicedSineModel

from sonoro.text.splitting import SpokenText

END = 0
ENDLESS = 1_000_000


class SineText:
    max_letters = ENDLESS

    def __init__(self):
        self.text, self.given = "", 0

    def letters(self, text):
        return len(text)

    def feed(self, text, held=1):
        self.text += text
        spoken = self.text.strip()
        ready = spoken[self.given : max(len(spoken) - held, self.given)]
        self.given += len(ready)
        return [ord(character) for character in ready]

    @property
    def spoken(self):
        return SpokenText(self.text).stripped()

    def finish(self):
        last = self.feed("", held=0)
        return [*last, END] if self.given else []


class LiveSineModel(VoicedSineModel):
    def live_text(self, request, voice):
        return None if voice is not None and voice.reference_frames is not None else SineText()

    def prepare_live(self, request, ids, index, voice):
        prompt = self.prepare(request, "".join(map(chr, ids)), index, [], voice)
        return SimpleNamespace(**vars(prompt) | {"positions": 1, "text_ids": len(ids) - 1, "ids": list(ids)})

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.texts = {}
        return state

    def admit(self, state, slots):
        super().admit(state, slots)
        for prompt, slot, _ in state.staged:
            state.texts[slot] = getattr(prompt, "ids", None)
            self._hear(state, slot)

    def append_text(self, state, slots, starts, ids):
        for slot, start, new in zip(slots, starts, ids, strict=True):
            if ord("☠") in new:
                raise RuntimeError("it exploded late")
            assert start == len(state.texts[slot]) - 1, "ids were lost, or came twice"
            state.texts[slot] += new
            self._hear(state, slot)

    def frame(self, state, slots):
        for slot, at in zip(slots.tolist(), state.length[slots].tolist(), strict=True):
            ids = None if state.done[slot] else state.texts[slot]
            assert ids is None or ids[-1] == END or at < len(ids), "a row was stepped before its text had come"
        super().frame(state, slots)

    def _hear(self, state, slot):
        ids = state.texts[slot]
        if ids is not None and state.target[slot] != state.limit[slot] + 1:
            state.target[slot] = len(ids) - 1 if ids[-1] == END else ENDLESS

"""The sine model with prompts that begin alike: what a text has up to its last "|" can be shared.

Pages hold the characters that were run into them. A row that is given pages as filled which hold others than its own
text fails loudly, and so does one that is given pages it would write into which another reads.
"""

import numpy as np
from fakes.sine import SineModel


class PrefixedSineModel(SineModel):
    def prepare(self, request, segment, index, before, voice):
        prompt = super().prepare(request, segment, index, before, voice)
        prompt.prefix = np.array([ord(character) for character in segment.rpartition("|")[0]], np.int64)
        return prompt

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.written = {}
        return state

    def admit(self, state, slots):
        super().admit(state, slots)
        size = state.capacity.page_positions
        for prompt, _, (given, cached) in state.staged:
            for at, page in enumerate(given):
                text = prompt.text[at * size :][:size]
                if at * size < cached:
                    assert state.written.get(page) == text, (
                        f"page {page} holds {state.written.get(page)!r}, not {text!r}"
                    )
                else:
                    state.written[page] = text

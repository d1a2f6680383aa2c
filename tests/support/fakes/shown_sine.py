"""A sine model that shows which character it speaks: a token and a frame each. Takes 2 ms for a frame."""

import time

import torch
from fakes.sine import SineModel

from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Pointing


class ShownSineModel(SineModel):
    attention_heads, text_layouts = (1, 1), {"text_first": {}}

    def __init__(self):
        super().__init__()
        self.word_heads = WordHeads(text_first=Pointing(layer=0, head=0, is_measured=True))

    def pointing(self, request, voice):
        return self.word_heads.text_first

    def text_start(self, prompt):
        return 0

    def token_spans(self, text):
        return [*((at, at + 1) for at in range(len(text))), (len(text), len(text))]

    def watching(self, state):
        return state

    def attention(self, state):
        return state.attention

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.attention = torch.zeros(capacity.slots + 1, 1, capacity.max_positions)
        return state

    def frame(self, state, slots):
        time.sleep(0.002)
        state.attention[slots] = 0
        state.attention[slots, 0, state.length[slots]] = 1
        super().frame(state, slots)

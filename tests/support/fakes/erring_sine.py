"""A sine model that shows which character it speaks, and goes wrong with seeds below 10, or runs away."""

from fakes.shown_sine import ShownSineModel

from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Limits, Pointing


class ErringModel(ShownSineModel):
    """Goes wrong in the way of `fault`, from frame 8 on or at the end; with the seeds `runs` it does not end."""

    def __init__(self, fault, runs=()):
        super().__init__()
        self.fault, self.runs = fault, runs
        limits = Limits(end_frames=5.0, dwell_frames=4.0 if fault == "dwelling" else 1e9, strayed=2.0)
        self.word_heads = WordHeads(text_first=Pointing(layer=0, head=0, is_measured=True, limits=limits))

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.errs = state.length.bool()
        return state

    def admit(self, state, slots):
        super().admit(state, slots)
        for slot, (prompt, *_) in zip(slots.tolist(), state.staged, strict=False):
            state.errs[slot] = prompt.controls.seed < 10
            if prompt.controls.seed in self.runs:
                state.errs[slot], state.target[slot] = False, state.limit[slot] + 1
            elif state.errs[slot]:
                state.target[slot] = {"unreached": 8, "ending": len(prompt.text) + 40}.get(self.fault, len(prompt.text))

    def frame(self, state, slots):
        super().frame(state, slots)
        for slot in slots[state.errs[slots]].tolist():
            # The frame that was made is the one before the length.
            at = int(state.length[slot]) - 1
            looked = {
                "dwelling": min(at, 8),
                "ending": min(at, int(state.target[slot]) - 40),
                "straying": at if at < 8 else 0,
            }
            state.attention[slot] = 0
            state.attention[slot, 0, looked.get(self.fault, at)] = 1

"""The decode step as one call of compiled code, for a few slots on a CPU: pointers into language model and state.

`frame.py` is the reference; its C code is frame.c."""

from __future__ import annotations

import ctypes
import functools
from ctypes import Structure
from pathlib import Path

import torch
from torch import Tensor, nn

from sonoro.models.shared import compiled as shared
from sonoro.native.library import CompiledCode
from sonoro.native.structures import structures

from . import flow as reference
from .backbone import FlowLM
from .frame import EARLIEST_END
from .state import FrameState, prefill

# CPU ms a frame of 1, 4, 8, 16 slots, six layers, one core of an AMD EPYC: 20, 33, 47, 77; in torch 31, 68, 86, 104.
_MOST_SLOTS, _ROWS = 16, 64

_STRUCTURES = structures(Path(__file__).with_name("frame.c"))
Flow, FlowHead, FlowBlock, FlowRoom = (_STRUCTURES[name] for name in ("Flow", "FlowHead", "FlowBlock", "FlowRoom"))


def packed(lm: FlowLM, library: CompiledCode | None = None) -> shared.PackedWeights | None:
    """The weights of a finalized language model for `library`, or that of this machine; None where there is none for
    it."""
    head = lm.flow_net
    own = [head.cond_embed, head.input_proj, head.modulations, head.res_blocks, head.output]
    roots = [lm.transformer, lm.z_proj or nn.Identity(), lm.out_eos, lm.input_linear, *own]
    library = library or shared.library_for(*roots)
    return None if library is None else shared.PackedWeights(library, roots)


class CompiledFrame(shared.Addresses):
    """`CompiledSteps` of a language model and one state. A frame allocates nothing."""

    most = _MOST_SLOTS

    def __init__(self, lm: FlowLM, weights: shared.PackedWeights, state: FrameState) -> None:
        super().__init__(weights)
        at, head = self.at, lm.flow_net
        self._step = weights.library.function("sonoro_flow", "ppip")
        self._stepped = torch.zeros(self.most, dtype=torch.int64)
        self._flow = flow = Flow()
        flow.backbone = shared.stack_of(weights, self, lm.transformer, state.cache, state.rotary, state.watch)
        given, positions = lm.out_eos.in_features, len(state.rotary[0])
        flow.room = shared.room_of(self, (lm.config.backbone,), _ROWS, positions=positions, logits=1, hidden=given)
        flow.head = self._head(weights, head)
        width, modulated = head.cond_embed.out_features, head.modulations.out_features
        sizes = (width, width, modulated, width, max(width, head.latents), head.latents)
        flow.flow = FlowRoom(*(at(torch.zeros(self.most * size)) for size in sizes))
        if lm.z_proj is not None:
            flow.projection = weights.product(lm.z_proj)
        flow.end, flow.input = weights.product(lm.out_eos), weights.product(lm.input_linear)
        flow.std, flow.mean, flow.earliest_end = at(lm.emb_std), at(lm.emb_mean), EARLIEST_END
        for name in ("done", "length", "position", "last", "options", "pending", "frames"):
            setattr(flow, name, at(getattr(state, name)))
        flow.controls, flow.frames_stride = at(state.samplers[0].packed), state.frames[0].numel()
        flow.watch = shared.watch_of(self, state.watch)
        run = shared.prompt_runner(weights.library, flow.backbone, flow.room, _ROWS)
        self.prefill = functools.partial(prefill, lm, state, run=run)

    def frame(self, slots: Tensor) -> None:
        """A frame for each of `slots` [B] int64, at most `most`."""
        assert slots.shape[0] <= self.most
        self._step(ctypes.byref(self._flow), slots.data_ptr(), slots.shape[0], self._stepped.data_ptr())

    def _head(self, weights: shared.PackedWeights, head: reference.FlowHead) -> Structure:
        product, at, width = weights.product, self.at, head.cond_embed.out_features
        blocks = (FlowBlock * len(head.res_blocks))()
        for to, block in zip(blocks, head.res_blocks, strict=True):
            assert isinstance(block, reference.FlowBlock)
            to.inner, to.outer = product(block.mlp["0"]), product(block.mlp["2"])
            to.norm, to.bias = map(at, shared.affine(block.in_ln))
        modulations = product(head.modulations, head.offsets.bias)
        return FlowHead(
            product(head.cond_embed), product(head.input_proj), modulations, product(head.output), blocks,
            at(head.times), at(torch.ones(width)), at(torch.zeros(width)), len(blocks), len(head.times),
            [*reference.TIMES].index(head.kind), width, head.latents, reference.BLOCK_EPS,
        )  # fmt: skip

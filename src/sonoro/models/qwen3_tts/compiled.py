"""The decode step as one call of compiled code, for a few slots on a CPU: pointers into talker and state.

`frame.py` is the reference; its C code is frame.c. Weights that a checkpoint stores in 8 bits are read as
such: the same numbers, a quarter of the memory traffic."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sonoro.models.shared import compiled as shared
from sonoro.native.library import PACKING, CompiledCode, load
from sonoro.native.structures import structures
from sonoro.nn.linear import Linear, kept_as_stored, widen_stored
from sonoro.runtime.threads import is_small

from .backbone import Talker
from .config import MIN_FRAMES
from .state import FrameState, prefill

logger = logging.getLogger(__name__)

_STRUCTURES = structures(Path(__file__).with_name("frame.c"))
Frame, Product = _STRUCTURES["Frame"], _STRUCTURES["Product"]

MOST_SLOTS = 64
"""Larger batches run in torch. One core of an AMD EPYC, built-in voice, CPU ms a frame of 1, 4, 16, 32 and 64 slots:
2.4, 6.4, 22.5, 43.3 and 85.4; in torch 42, 58, 94, 112 and 182."""


class CompiledTalker(shared.PackedWeights):
    """The weights of a finalized talker for the compiled code, packed once for all states."""

    def __init__(self, talker: Talker, library: CompiledCode) -> None:
        super().__init__(library, (talker.model, talker.codec_head, talker.code_predictor))
        self.talker = talker

    @classmethod
    def of(cls, talker: Talker) -> CompiledTalker | None:
        """That of `talker`; None for a large one, which needs more threads, and, said in the log, without a library for
        this machine, or for another layout."""
        if not is_small(talker):
            return None
        is_known = talker.text_table is not None and talker.dtype == torch.float32
        library = shared.library_for(talker, is_known=is_known)
        return None if library is None else cls(talker, library)


def compiles(talker: Talker, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `talker`, on any device yet, will run in compiled code that reads 8 bits on `device` in `dtype`."""
    is_known = device.type == "cpu" and dtype == torch.float32 and is_small(talker)
    return is_known and (library := load()) is not None and library.packs


class TalkerForms:
    """A finalized `talker` for compiled code, and for torch. Engines in several threads may share it."""

    def __init__(self, talker: Talker) -> None:
        self._talker = talker

    @property
    def is_narrow(self) -> bool:
        """Whether weights are in 8 bits because the file has them so."""
        return bool(kept_as_stored(self._talker))

    @functools.cached_property
    def compiled(self) -> CompiledTalker | None:
        """That for compiled code, if any."""
        with PACKING:
            return CompiledTalker.of(self._talker)

    @functools.cached_property
    def in_torch(self) -> Talker:
        """The talker itself, its weights in the form whose products are fast in torch."""
        with PACKING:
            widen_stored(kept_as_stored(self._talker))
        return self._talker


class CompiledFrame:
    """`CompiledSteps` of a talker and one state. A frame allocates nothing."""

    most = MOST_SLOTS

    def __init__(self, compiled: CompiledTalker, state: FrameState) -> None:
        talker, self._addresses = compiled.talker, shared.Addresses(compiled)
        self._at = self._addresses.at
        self._talker, self._state = talker, state
        self._step = compiled.library.function("sonoro_frame", "ppipp")
        books, rows = talker.codebooks, 2 * self.most
        self._codes = torch.zeros(self.most, books, dtype=torch.int64)
        self._stepped = torch.zeros(self.most, dtype=torch.int64)
        self._frame = Frame()
        self._give(state, talker)
        frame, predictor = self._frame, talker.code_predictor
        given = compiled, self._addresses
        frame.backbone = shared.stack_of(*given, talker.model, state.cache, state.rotary, state.watch)
        frame.depth = shared.stack_of(*given, predictor.model, state.loop, state.loop_rotary)
        stacks = talker.model.config, predictor.model.config
        logits = max(talker.config.vocab_size, talker.config.code_predictor_config.vocab_size)
        width = max(config.width for config in stacks)
        positions = state.rotary[0].shape[0]
        frame.room = shared.room_of(self._addresses, stacks, rows, positions=positions, logits=logits, hidden=width)
        frame.head = compiled.product(talker.codec_head)
        if isinstance(predictor.small_to_mtp_projection, Linear):
            frame.projection = compiled.product(predictor.small_to_mtp_projection)
        heads = [compiled.product(cast(Linear, head)) for head in predictor.lm_head]
        frame.depth_heads = (Product * len(heads))(*heads)
        frame.watch = shared.watch_of(self._addresses, state.watch)
        self._run = shared.prompt_runner(compiled.library, frame.backbone, frame.room, rows)

    def frame(self, slots: Tensor) -> None:
        """A frame for each of `slots` [B] int64, at most `MOST_SLOTS`."""
        assert slots.shape[0] <= self.most
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        room = self._codes.data_ptr(), self._stepped.data_ptr()
        self._step(ctypes.byref(self._frame), slots.data_ptr(), slots.shape[0], *room)

    def prefill(self, tokens: Tensor) -> None:
        """`SpeechModel.prefill`."""
        prefill(self._talker, self._state, tokens, self._run)

    def _give(self, state: FrameState, talker: Talker) -> None:
        """Point the frame to the tables of `talker` and the tensors of `state` by slot."""
        frame, config, tables = self._frame, talker.config, talker.code_predictor.input_table
        assert tables is not None
        assert talker.text_table is not None
        assert talker.code_table is not None
        assert talker.code_starts is not None
        frame.depth_inputs, frame.depth_codes = self._at(tables), tables.shape[1]
        frame.text_table, frame.code_table = self._at(talker.text_table), self._at(talker.code_table)
        frame.code_starts, frame.suppressed = self._at(talker.code_starts), self._at(state.suppressed)
        frame.books, frame.codes, frame.end = talker.codebooks, talker.codes, config.codec_eos_token_id
        frame.min_frames = MIN_FRAMES
        for name in ("done", "seen", "length", "position", "frames", "pending", "text_ids"):
            setattr(frame, name, self._at(getattr(state, name)))
        frame.first_controls, frame.rest_controls = (self._at(sampler.packed) for sampler in state.samplers)
        frame.frames_stride, frame.text_stride = state.frames[0].numel(), state.text_ids.shape[1]

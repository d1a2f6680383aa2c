"""The decode step as one call of compiled code, for a few slots on a CPU: pointers into talker and state.

`frame.py` is the reference; the C code is in `sonoro.native`. Weights that a checkpoint stores in 8 bits are read as
such: the same numbers, a quarter of the memory traffic."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sonoro.native.library import CompiledCode, Frame, Layer, Product, Room, Stack, Watch, load
from sonoro.nn.kvcache import PackedTokens, PagedKVCache
from sonoro.nn.linear import Linear
from sonoro.nn.transformer import DecoderLayer, DecoderStack, Rotary
from sonoro.runtime.memory import compact_heap
from sonoro.runtime.threads import is_small

from .backbone import Talker
from .config import MIN_FRAMES
from .state import FrameState, prefill

logger = logging.getLogger(__name__)

MOST_SLOTS = 64
"""Larger batches run in torch. One core of an AMD EPYC, built-in voice, CPU ms a frame of 1, 4, 8, 16 and 24 slots:
2.2, 8.3, 15.8, 31.5 and 46.3; in torch 31.6, 44.4, 53.6, 63.5 and 72.8."""


class CompiledTalker:
    """The weights of a finalized talker for the compiled code, packed once for all states."""

    def __init__(self, talker: Talker, library: CompiledCode) -> None:
        self.library, self.talker = library, talker
        self._kept: list[Any] = []
        self._products = {
            id(part): self._product(part)
            for root in (talker.model, talker.codec_head, talker.code_predictor)
            for part in root.modules()
            if isinstance(part, Linear)
        }

    @classmethod
    def of(cls, talker: Talker) -> CompiledTalker | None:
        """That of `talker`; None for a large one, which needs more threads, and, said in the log, without a library for
        this machine, or for another layout."""
        if talker.device.type != "cpu" or not is_small(talker):
            return None
        library = load()
        if library is None or not has_known_layout(talker, library):
            logger.info("event=decode_step code=torch")
            return None
        with compact_heap():
            return cls(talker, library)

    def product(self, part: Linear) -> Product:
        return self._products[id(part)]

    def _product(self, part: Linear) -> Product:
        bias = None if part.bias is None else part.bias.data_ptr()
        shape = (bias, *part.weight.shape)
        packed = self.library.pack(part.weight.data, part.scale)
        if packed is None:
            return Product(part.weight.data_ptr(), None, None, *shape)
        self._kept.append(packed)
        if part.scale is None:
            # The same numbers in a quarter of the memory, for what runs in torch after all.
            weight, part.scale = packed
            part.weight.requires_grad_(False)
            part.weight.data = weight.transpose(1, 2).flatten(0, 1)[: len(part.weight)].contiguous()
        return Product(None, *(tensor.data_ptr() for tensor in packed), *shape)


def has_known_layout(talker: Talker, library: CompiledCode) -> bool:
    """Whether `library` knows the layout of `talker`: float32, or int8 where it is fast, with a table of all text."""
    parts = [part for part in talker.modules() if isinstance(part, Linear)]
    return (
        talker.text_table is not None
        and talker.dtype == torch.float32
        and all(
            part.weight.t().is_contiguous() if part.scale is None else library.packs and part.weight.dtype == torch.int8
            for part in parts
        )
    )


class CompiledFrame:
    """`CompiledSteps` of a talker and one state. A frame allocates nothing."""

    most = MOST_SLOTS

    def __init__(self, compiled: CompiledTalker, state: FrameState) -> None:
        talker, self._kept = compiled.talker, list[Any]([compiled])
        self._code, self._talker, self._state = compiled.library, talker, state
        books, rows = talker.codebooks, 2 * self.most
        self._codes = torch.zeros(self.most, books, dtype=torch.int64)
        self._stepped = torch.zeros(self.most, dtype=torch.int64)
        self._frame = Frame()
        self._give(state, talker)
        frame, predictor = self._frame, talker.code_predictor
        frame.backbone = self._stack(compiled, talker.model, state.cache, state.rotary, state)
        frame.depth = self._stack(compiled, predictor.model, state.loop, state.loop_rotary, None)
        frame.room = self._room(talker, rows, state.rotary[0].shape[0])
        frame.head = compiled.product(talker.codec_head)
        if isinstance(predictor.small_to_mtp_projection, Linear):
            frame.projection = compiled.product(predictor.small_to_mtp_projection)
        heads = [compiled.product(cast(Linear, head)) for head in predictor.lm_head]
        frame.depth_heads = (Product * len(heads))(*heads)
        if state.watch is not None:
            _, watched, columns = state.watch.attention.shape
            frame.watch = Watch(self._at(state.watch.spans), self._at(state.watch.attention), watched, columns)

    def frame(self, slots: Tensor) -> None:
        """A frame for each of `slots` [B] int64, at most `MOST_SLOTS`."""
        assert slots.shape[0] <= self.most
        room = self._codes.data_ptr(), self._stepped.data_ptr()
        self._code.step(ctypes.byref(self._frame), slots.data_ptr(), slots.shape[0], *room)

    def prefill(self, tokens: Tensor) -> None:
        """`SpeechModel.prefill`."""
        prefill(self._talker, self._state, tokens, self._run)

    def _run(self, rows: Tensor, tokens: PackedTokens) -> None:
        given = rows.contiguous(), tokens.slots.contiguous(), tokens.positions.contiguous()
        self._code.prefill(
            ctypes.byref(self._frame), *(tensor.data_ptr() for tensor in given), len(rows), 2 * self.most
        )

    def _at(self, tensor: Tensor) -> int:
        """The address of `tensor`, which is kept as long as this object."""
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

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

    def _stack(
        self, compiled: CompiledTalker, stack: DecoderStack, cache: PagedKVCache, rotary: Rotary, state: Any
    ) -> Stack:
        """`stack` over `cache`; the heads that `state` watches, if given, are recorded."""
        config, watch = stack.config, None if state is None else state.watch
        layers = (Layer * config.layers)()
        for index, (to, layer) in enumerate(zip(layers, cast(Sequence[DecoderLayer], stack.layers), strict=True)):
            norms = layer.self_attn.head_norms
            assert norms.query is not None
            assert norms.key is not None
            to.qkv, to.out = compiled.product(layer.self_attn.qkv_proj), compiled.product(layer.self_attn.o_proj)
            to.gate_up, to.down = compiled.product(layer.mlp.gate_up_proj), compiled.product(layer.mlp.down_proj)
            to.input_norm, to.inner_norm = (
                self._at(norm.weight) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
            )
            to.query_norm, to.key_norm = self._at(norms.query), self._at(norms.key)
            to.keys, to.values = self._at(cache.keys[index]), self._at(cache.values[index])
            heads = None if watch is None else watch.heads.get(index)
            if heads is not None:
                to.watched, to.watched_count = self._at(heads), len(heads)
        cos, sin = map(self._at, rotary)
        return Stack(
            layers, self._at(stack.norm.weight), cos, sin, self._at(cache.page_table),
            cache.page_table.shape[1], cache.page_positions, config.layers, config.width, config.intermediate,
            config.heads, config.kv_heads, config.head_width, config.norm_eps,
        )  # fmt: skip

    def _room(self, talker: Talker, rows: int, positions: int) -> Room:
        """Room for `rows` rows at up to `positions` positions."""
        stacks = talker.model.config, talker.code_predictor.model.config
        width = max(config.width for config in stacks)
        inner = max(config.intermediate for config in stacks)
        attended = max(config.heads * config.head_width for config in stacks)
        wide = max(2 * inner, *((config.heads + 2 * config.kv_heads) * config.head_width for config in stacks))
        logits = max(talker.config.vocab_size, talker.config.code_predictor_config.vocab_size)
        sizes = {
            "x": rows * width, "normed": rows * width, "wide": rows * wide, "inner": rows * inner,
            "attended": rows * attended, "scores": max(positions, logits), "logits": rows * logits,
            "hidden": rows * width,
        }  # fmt: skip
        numbers = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
        return Room(*(self._at(torch.zeros(sizes[name])) for name in Room.FLOATS), *map(self._at, numbers))

"""What the official implementation computed on the tiny checkpoints, as stored by tools/reference/qwen3_tts.py.

    for case in load("greedy"):
        write_checkpoint(folder, variant=case.facts["variant"], topology=case.facts["topology"])
        case.tensors["codes"]  # [T, K] int64

Every case but those of `tokens` names its checkpoint by `variant` and `topology` (seed 0; `snake_std` where given, else
the writer's default). Floats are float32, codes int64, audio that goes in int16 (see `audio_of`).

tokens: text; ids, instruct_ids, ref_ids of the three templates around it. No tensors.
prompts: R; ids, instruct_ids, ref_ids. prompt [P, H], trail [n, H]; Base: x_vector [H]; in context: ref_codes [R, K].
greedy: as prompts (no trail if batch > 1); batch, eos_row_scale, frames. codes [T, K]; logits [n, V] of the steps
    `logit_steps`, before any processor.
sampling: frames, settings. codes [T, K], logits [T, V] and depth_logits [T, K - 1, C] before any processor,
    probabilities and depth_probabilities of the same shapes: what was drawn from, after all of them.
clone: R; ids, ... ref_audio [S] int16, ref_codes [R, K], x_vector [H], codes [T, K], waveform [T * 1920].
codec: snake_std, batch. codes [T, K], waveform [T * 1920]. In the case float64 the official module was cast to it:
    `waveform` still holds the float32 rounding of its RMS norms and rotary tables, and so depends on the machine in the
    7th digit; `waveform_wide` [T * 1920] has both computed in float64 too. Compare exact structure with the latter.
encoder: snake_std. audio [S] int16, codes [T, K].
speaker: audio [S] int16, mel [frames, 128], embedding [H].

R is the request: mode (custom_voice, voice_design, x_vector, in_context), text, language, speaker, instruct, ref_text,
non_streaming. Cases of one group with `batch` 2 were computed in one call. `eos_row_scale` multiplies the row of
the end-of-speech id in `talker.codec_head.weight`. The official code drops the last sampled token when it hits
the limit, so a run of M tokens has M - 1 frames; one that ended by itself has all its frames.
"""

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tiny_checkpoint import digest, state_dicts
from torch import Tensor

from sonoro.models.base import Capacity, Pages, Prompt, SpeechModel
from sonoro.nn.transformer import DecoderStack

ROOT = Path(__file__).parents[1] / "assets" / "qwen3_tts"


@dataclass(frozen=True)
class Case:
    """One stored computation."""

    name: str
    facts: dict[str, Any]
    tensors: dict[str, NDArray[Any]]


def load(group: str, root: Path | None = None) -> dict[str, Case]:
    """The cases of `group` by name, in the order they were made, from `root` (default: the assets in the tree)."""
    root = root or ROOT
    path = root / f"{group}.safetensors"
    stored = load_file(path) if path.exists() else {}
    tensors: dict[str, dict[str, NDArray[Any]]] = {}
    for key, tensor in stored.items():
        name, leaf = key.split("/")
        tensors.setdefault(name, {})[leaf] = tensor
    cases = _document(root)["groups"][group]
    return {facts["name"]: Case(facts["name"], facts, tensors.get(facts["name"], {})) for facts in cases}


def audio_of(case: Case, name: str = "audio") -> NDArray[np.float32]:
    """A stored int16 recording as the official code got it, [S] float32 at 24 kHz."""
    return case.tensors[name].astype(np.float32) / np.float32(32768)


def drifted_weights(root: Path | None = None) -> list[str]:
    """The checkpoints whose weights, drawn here, are not those the official code ran with: numpy's generator has
    drifted, or the checkpoint writer was changed without a rerun of the tool. No other comparison means much then."""
    drifted = []
    for label, (main_digest, codec_digest) in _document(root or ROOT)["digests"].items():
        variant, topology, snake_std = label.split("/")
        main, codec = state_dicts(variant, topology, snake_std=float(snake_std))
        if (digest(main), digest(codec)) != (main_digest, codec_digest):
            drifted.append(label)
    return drifted


def _document(root: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((root / "scenarios.json").read_text(encoding="utf-8"))
    return document


PAGE = 16


def capacity(slots: int, positions: int, frames: int, text: int) -> Capacity:
    """Room for `slots` rows at once, in pages of 16 positions."""
    pages = slots * -(-positions // PAGE)
    return Capacity(slots, positions, frames, text, page_positions=PAGE, pages=pages, max_tokens=slots * positions)


def pages_of(slot: int, slots: int, count: int) -> list[int]:
    """Pages that no other slot has, far apart and not in order."""
    return [slot + slots * index for index in reversed(range(count))]


class Starts(Protocol):
    """What of a `SpeechModel` brings rows to their first frame."""

    stage: Callable[..., int]
    admit: Callable[[Any, Tensor], None]
    prefill: Callable[[Any, Tensor], None]


def begin(model: Starts, state: Any, prompts: Sequence[Any], slots: Any) -> None:
    """Stage, place and prefill `prompts`; afterwards rows `slots` are ready for their first frame."""
    table = state.cache.page_table
    numbers = torch.as_tensor(slots).tolist()
    pages = [Pages(pages_of(slot, table.shape[0] - 1, table.shape[1])) for slot in numbers]
    tokens = model.stage(state, prompts, numbers, pages)
    model.admit(state, torch.tensor(numbers, device=table.device))
    model.prefill(state, torch.arange(tokens, device=table.device))


SPREAD = {"float32": 1.6e-5, "bfloat16": 0.035}
"""How far two orders move the gap of the two best logits: root mean square, in standard deviations of the logits.

Measured, a batch against its rows alone. In bfloat16 on a CPU .010 to .024 at tiny sizes (3 layers, 32 to 64 wide)
and .029 at the released size of Qwen3-TTS 0.6B (28 layers, 1024 wide), on an H200 .032 for Qwen3-TTS 1.7B and .033
for Fish S2 Pro; a fourteenth is added to the largest. The best logits are 2 to 4 deviations, where a step is 2^-6,
and the median is one or two steps, whatever the depth. In float32 1e-6 and 5e-6; the largest seen was 3 to 7 times
the root mean square.
"""

NEAR_TIE = {dtype: 6 * spread for dtype, spread in SPREAD.items()}
"""A gap that is narrower may be decided either way."""


class Moved(NamedTuple):
    """Of each decision [B, T, K]: the gap of the two best logits alone, and how much wider the batch has it, both over
    the standard deviation of the logits. `by` is NaN where a code before it in its frame was another in the batch."""

    gaps: Tensor
    by: Tensor

    @property
    def rms(self) -> float:
        """Of all that is known."""
        return float(self.by[self.by.isfinite()].square().mean().sqrt())

    @property
    def most(self) -> float:
        return float(self.by[self.by.isfinite()].abs().max())


def rows_of(state: Any) -> list[Tensor]:
    """What has a row for every slot, but for its pages and controls."""
    values = (getattr(state, item.name) for item in fields(state))
    return [value for value in values if isinstance(value, Tensor) and value.shape[0] == len(state.done)]


@torch.inference_mode()
def moved(model: SpeechModel, prompts: Sequence[Prompt], room: Capacity, frames: int) -> Moved:
    """Step greedy `prompts` as one batch and each alone; after each frame what the batch said is fed to both."""
    slots = list(range(len(prompts)))
    together, singles = model.allocate(room), [model.allocate(room) for _ in prompts]
    begin(model, together, prompts, slots)
    for state, prompt in zip(singles, prompts, strict=True):
        begin(model, state, [prompt], [0])
    device, gaps, by = together.done.device, list[Tensor](), list[Tensor]()
    for frame in range(frames):
        record: list[Tensor] = []
        model.frame(together, torch.tensor(slots, device=device), record)
        for slot, single in zip(slots, singles, strict=True):
            own: list[Tensor] = []
            model.frame(single, torch.zeros(1, dtype=torch.int64, device=device), own)
            # Ids beyond the codes, which come first, cannot be drawn.
            codes = min(values.shape[1] for values in own)
            mine = torch.stack([values[0, :codes].double() for values in own])
            theirs = torch.stack([values[slot, :codes].double() for values in record])
            best, spread = mine.topk(2).indices, mine.std(dim=1)
            narrow, wide = (-values.gather(1, best).diff(dim=1)[:, 0] / spread for values in (mine, theirs))
            is_other = single.frames[0, frame] != together.frames[slot, frame]
            # What was drawn before it in this frame is what a decision is made from.
            is_off = is_other.long().cumsum(0) - is_other.long() > 0
            gaps.append(narrow)
            by.append((wide - narrow).masked_fill(is_off, torch.nan))
            for ours, others in zip(rows_of(single), rows_of(together), strict=True):
                ours[0] = others[slot]
    shape = (frames, len(slots), -1)
    return Moved(*(torch.stack(values).view(shape).transpose(0, 1).cpu() for values in (gaps, by)))


def full_attention(stack: DecoderStack, rows: Tensor) -> dict[tuple[int, int], Tensor]:
    """By layer and head the attention matrix [T, T] of `stack` over `rows` [T, H]."""
    made: dict[tuple[int, int], Tensor] = {}

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = queries.shape[2] // keys.shape[2]
        query, key, value = queries[0], keys[0].repeat_interleave(group, 1), values[0].repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        made.update({(layer, head): one for head, one in enumerate(weights)})
        return torch.einsum("hts,shd->thd", weights, value)[None]

    stack(rows[None], stack.config.rotary(torch.arange(len(rows)), rows.dtype), attend)
    return made


def assert_shares_of(
    whole: dict[tuple[int, int], Tensor],
    seen: Sequence[Tensor],
    places: Sequence[tuple[int, int]],
    first: int,
    text: tuple[int, int],
) -> None:
    """That `seen` [H, W], frame by frame from position `first` on, are what the heads at `places` of `whole` look at in
    `text` (start, count), as shares of that."""
    start, count = text
    for position, attention in enumerate(seen, start=first):
        for row, place in zip(attention, places, strict=True):
            wanted = whole[place][position, start : min(start + count, position + 1)]
            # What is kept is float32.
            torch.testing.assert_close(row[: len(wanted)].double(), wanted / wanted.sum(), atol=1e-6, rtol=0)
            assert not row[len(wanted) :].any()


PRODUCTS = (
    *("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_"),
    *("mv", "mv.out", "addmv", "addmv.out", "addmv_", "dot", "convolution"),
    "_scaled_dot_product_flash_attention_for_cpu",
)

HALF_FLIPS = 64
"""One result in as many is another of 16 bits: what is summed in float32 differs only near the middle of two steps."""

_library: list[torch.library.Library] = []


@functools.lru_cache(maxsize=4096)
def factors(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, out: tuple[int, ...], most: int) -> Tensor:
    """What a product of `shapes` is multiplied by: 1, or up to `most` steps of `dtype` more or less."""
    # The hash of integers is the same in every process.
    generator = torch.Generator().manual_seed(hash((shapes, out)) & 0x7FFFFFFF)
    if dtype.itemsize > 2:
        steps = torch.randint(-most, most + 1, out, generator=generator)
    else:
        steps = torch.randint(0, HALF_FLIPS, out, generator=generator).eq(0).long()
    return (1 + steps.double() * torch.finfo(dtype).eps).to(dtype)


def by_shape(kernel: Any, most: int) -> Any:
    def product(keys: Any, *given: Any, **named: Any) -> Any:
        found = kernel.call_boxed(keys, *given, **named)
        first = found[0] if isinstance(found, tuple) else found
        if first.is_floating_point() and first.numel() and first.device.type == "cpu":
            shapes = tuple(tuple(value.shape) for value in given if isinstance(value, Tensor))
            first.mul_(factors(shapes, first.dtype, tuple(first.shape), most))
        return found

    return product


def round_by_shape(most: int) -> None:
    """From now on, in this process; by up to `most` steps, or in 16 bits by one, now and then."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # That they are overridden is what is wanted.
        warnings.simplefilter("ignore")
        for name in PRODUCTS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, by_shape(kernel, most), "CPU", with_keyset=True)
    _library.append(library)


@pytest.fixture
def rounding_by_shape() -> Iterator[None]:
    """For one test, whatever the processor."""
    is_on_anyway = bool(_library)
    if not is_on_anyway:
        round_by_shape(8)
    yield
    if not is_on_anyway:
        _library.pop()._destroy()

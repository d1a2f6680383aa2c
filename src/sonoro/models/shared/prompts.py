"""Prompts as the host has them: a row of ids per token, and what of a prompt is stored as keys and values."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonoro.core.errors import InvalidRequest
from sonoro.models.base import Prompt, Voice
from sonoro.nn.transformer import DecoderStack, causal_attention
from sonoro.runtime.sampling import Controls

Ids = npt.NDArray[np.int64]


class TextSpanned(Prompt, Protocol):
    """A prompt that says where the text to be spoken is."""

    @property
    def text_start(self) -> int:
        """The position of the text's first token."""

    @property
    def text_count(self) -> int:
        """How many positions it takes, those fed while it is spoken included."""


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """Keys (rotated) and values of the first positions of a prompt, [layers, P, kv heads, D] each, on the model's
    device: no token of them is run. `digest` is that of what they were made of (`digest_of`)."""

    keys: Tensor
    values: Tensor
    digest: int

    @property
    def positions(self) -> int:
        return self.keys.shape[1]

    @cached_property
    def names(self) -> Ids:
        """`Prompt.prefix`: rows [P, 2] that are equal for equal positions alone."""
        return np.stack((np.full(self.positions, self.digest), np.arange(self.positions)), axis=1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is on the device."""
        return self.keys, self.values


def digest_of(tensor: Tensor) -> int:
    """62 bits of the SHA-256 of the numbers of `tensor`."""
    return int.from_bytes(hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).digest()[:8], "little") >> 2


@torch.no_grad()
def keys_and_values(stack: DecoderStack, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Those of a `StoredPrefix` whose inputs of `stack` are `rows` [P, H]."""
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kept.append((keys[0], values[0]))
        return causal_attention(layer, queries, keys, values)

    stack(rows[None], stack.config.rotary(torch.arange(len(rows), device=rows.device), rows.dtype), attend)
    keys, values = (torch.stack(part) for part in zip(*kept, strict=True))
    return keys, values


@dataclass(frozen=True)
class RowPrompt:
    """`TextSpanned`, a prompt with a row of ids per token, `rows` [P, V] int64, none of them pending.
    Its first `stored` positions are those of `state`, if it has one."""

    controls: Controls
    rows: Ids
    voice: Voice | None = None
    prefix: Ids | None = None
    text_ids: int = 0
    text_start: int = 0
    text_count: int = 0
    state: StoredPrefix | None = None

    @property
    def positions(self) -> int:
        return len(self.rows)

    @property
    def stored(self) -> int:
        return 0 if self.state is None else self.state.positions


class ControlTokens:
    """Control tokens of a model, names by id, which a text must not hold unless an operator accepts them."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = self._refused = names

    def accept(self, *, is_on: bool) -> None:
        """Accept control tokens in a text as such, or (the default) reject them."""
        self._refused = {} if is_on else self._names

    def check(self, field: str, text: str, ids: Iterable[int]) -> None:
        """Raise `InvalidRequest` naming `field` if `ids`, those of `text`, hold a control token."""
        if found := self._refused.keys() & set(ids):
            raise InvalidRequest(field, text, f"it must not hold the control token {self._refused[min(found)]}")

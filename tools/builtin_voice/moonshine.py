"""Moonshine base speech recognition: 61 M parameters in 8 bits, run by onnxruntime.

The graphs are those of npm `@usefulsensors/moonshine-js` 0.1.9, the tokenizer that of PyPI `useful-moonshine-onnx`
(both MIT); `prepare_judges.sh` fetches them. Follows usefulsensors/moonshine `moonshine_onnx/model.py` `generate`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from builtin_voice.hearing import JUDGE_HZ, Graph, graph

_START, _END = 1, 2
_LAYERS, _HEADS, _HEAD_WIDTH = 8, 8, 52
_TOKENS_A_SECOND = 6.5


class Moonshine:
    """Transcribes audio. Single-threaded."""

    def __init__(self, encoder: Graph, decoder: Graph, tokenizer: Tokenizer) -> None:
        self._encoder, self._decoder, self._tokenizer = encoder, decoder, tokenizer
        self._caches = [output.name.replace("present", "past_key_values") for output in self._decoder.get_outputs()[1:]]

    @classmethod
    def load(cls, folder: Path) -> Moonshine:
        """From the folder that `prepare_judges.sh` filled."""
        encoder, decoder = (graph(folder / f"{name}.onnx") for name in ("encoder_model", "decoder_model_merged"))
        return cls(encoder, decoder, Tokenizer.from_file(str(folder / "tokenizer.json")))

    def hear(self, samples: np.ndarray) -> str:
        """The text of `samples` [S] float32 in [-1, 1] at 16 kHz; at most 6.5 tokens a second."""
        (heard,) = self._encoder.run(None, {"input_values": samples[None].astype(np.float32)})
        caches = {name: np.zeros((0, _HEADS, 1, _HEAD_WIDTH), np.float32) for name in self._caches}
        ids = [_START]
        for step in range(int(len(samples) / JUDGE_HZ * _TOKENS_A_SECOND)):
            inputs = {"input_ids": np.array([ids[-1:]]), "encoder_hidden_states": heard, **caches}
            logits, *states = self._decoder.run(None, inputs | {"use_cache_branch": np.array([step > 0])})
            # Cross-attention keys and values are computed by the first step only.
            new = dict(zip(self._caches, states, strict=True))
            caches |= {name: state for name, state in new.items() if step == 0 or ".decoder." in name}
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == _END:
                break
        return self._tokenizer.decode(ids[1:], skip_special_tokens=True).strip()

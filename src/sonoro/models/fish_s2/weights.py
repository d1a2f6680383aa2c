"""The tensors of a checkpoint folder: what they are called, and which belong to what."""

from __future__ import annotations

from sonoro.models.model_files import ModelFiles, Modules
from sonoro.nn.weights import DummyRule, llama_names

from . import codec_weights
from .backbone import DualAR
from .codec import FishCodec

__all__ = ["FishModules", "count_parts", "init_dummy", "load", "stored_shapes", "weight_bytes"]

_SLOW, _FAST = "text_model.model.", "audio_decoder."

_PARTS = {
    "slow layers": (f"{_SLOW}layers.",),
    "text embedding and head": (f"{_SLOW}embeddings.",),
    "fast layers": (f"{_FAST}layers.",),
    "fast embedding": (f"{_FAST}embeddings.",),
    "fast head": (f"{_FAST}output.",),
    "codebook embeddings": (f"{_FAST}codebook_embeddings.",),
    "norms": (f"{_SLOW}norm.", f"{_FAST}norm."),
}

_FUSIONS = (*llama_names(f"{_SLOW}layers."), *llama_names(f"{_FAST}layers."))

# Logits about twice as wide as they would be: draws that are neither flat nor always the same.
_DUMMY_RULES = (
    DummyRule(rf"^{_SLOW}embeddings\.", gain=2.0),
    DummyRule(rf"^{_FAST}output\.", gain=2.0),
    DummyRule(rf"^{_FAST}(codebook_)?embeddings\.", std=0.3),
)

FishModules = Modules[DualAR, FishCodec]

_FILES = ModelFiles(
    make=DualAR,
    finalize=DualAR.finalize,
    fusions=lambda config: _FUSIONS,
    parts=_PARTS,
    rules=_DUMMY_RULES,
    codec=codec_weights.FILE,
    codec_file=codec_weights.CODEC_FILE,
    codec_parts=codec_weights.PARTS,
    codec_config=lambda config: config.codec_config,
)
load, init_dummy, stored_shapes = _FILES.load, _FILES.init_dummy, _FILES.stored_shapes
count_parts, weight_bytes = _FILES.count_parts, _FILES.weight_bytes

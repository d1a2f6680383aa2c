"""How a checkpoint's tensors are stored: released names, fusions and parts.

Older spellings are read too: separate Q, K and V, and the official code's own names."""

from collections.abc import Callable, Collection, Iterable

from sonoro.models.shared.model_files import ModelFiles, Modules
from sonoro.nn.weights import DummyRule, Fusion, llama_names

from . import codec_weights
from .backbone import DualAR
from .codec import FishCodec
from .config import ModelConfig

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

# Gains that double the spread of the logits, so that samples are neither uniform nor constant.
_DUMMY_RULES = (
    DummyRule(rf"^{_SLOW}embeddings\.", gain=2.0),
    DummyRule(rf"^{_FAST}output\.", gain=2.0),
    DummyRule(rf"^{_FAST}(codebook_)?embeddings\.", std=0.3),
)

FishModules = Modules[DualAR, FishCodec]


def _fusions(config: ModelConfig, names: Iterable[str]) -> tuple[Fusion, ...]:
    """The fusions for a folder whose tensors have these `names`."""
    if not any(".attention.wq." in name for name in names):
        return _FUSIONS
    apart = []
    for prefix, stack in ((_SLOW, config.text_config), (_FAST, config.audio_decoder_config)):
        shares = {
            "attention.wq": stack.n_head,
            "attention.wk": stack.n_local_heads,
            "attention.wv": stack.n_local_heads,
        }
        apart.append(Fusion(prefix, "self_attn.qkv_proj", shares))
    return (*apart, *_FUSIONS)


def _spelling(names: Collection[str]) -> Callable[[str], str]:
    """A map from released names to those in `names`: the same, or the official code's own, perhaps with `model.`."""
    if any(name.startswith((_SLOW, _FAST)) for name in names):
        return str
    prefix = "model." if any(name.startswith("model.layers.") for name in names) else ""
    return lambda name: prefix + _old_name(name)


def _old_name(name: str) -> str:
    if name.startswith(_SLOW):
        return name.removeprefix(_SLOW)
    own = name.removeprefix(_FAST)
    return own if own.startswith("codebook_embeddings.") else f"fast_{own}"


FILES = ModelFiles(
    make=DualAR,
    finalize=DualAR.finalize,
    fusions=_fusions,
    parts=_PARTS,
    rules=_DUMMY_RULES,
    spelling=_spelling,
    row_terms=2,
    codec=codec_weights.FILE,
    codec_file=codec_weights.CODEC_FILE,
    codec_parts=codec_weights.PARTS,
    codec_config=lambda config: config.codec_config,
)

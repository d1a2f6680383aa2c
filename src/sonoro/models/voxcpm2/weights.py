"""How a checkpoint's tensors are stored: released names, fusions and parts."""

from sonoro.models.shared.model_files import ModelFiles, Modules
from sonoro.nn.weights import Fusion, parted_names

from . import codec_weights
from .backbone import VoxLM
from .codec import VoxCodec
from .config import ModelConfig

_PARTS = {
    "base LM": ("base_lm.layers.", "base_lm.norm."),
    "text embedding": ("base_lm.embed_tokens.",),
    "residual LM": ("residual_lm.",),
    "local encoder": ("feat_encoder.",),
    "flow": ("feat_decoder.",),
    "quantiser and projections": ("fsq_layer.", "enc_", "lm_to_", "res_to_", "fusion_", "stop_"),
}

VoxModules = Modules[VoxLM, VoxCodec]


def _fusions(config: ModelConfig) -> tuple[Fusion, ...]:
    lm, local, flow = config.lm_config.num_attention_heads, config.encoder_config.num_heads, config.dit_config.num_heads
    stacks = {"base_lm.": lm, "residual_lm.": lm, "feat_encoder.": local, "feat_decoder.": flow}
    shared = config.lm_config.num_key_value_heads
    return tuple(name for prefix, heads in stacks.items() for name in parted_names(prefix, heads, shared))


FILES = ModelFiles(
    make=VoxLM,
    finalize=VoxLM.finalize,
    fusions=lambda config, names: _fusions(config),
    parts=_PARTS,
    codec=codec_weights.FILE,
    codec_file=codec_weights.CODEC_FILE,
    codec_parts=codec_weights.PARTS,
    codec_config=lambda config: config.codec,
)

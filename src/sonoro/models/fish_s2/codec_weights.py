"""How the tensors of codec.pth are stored: released names and shapes, and rules for random weights."""

from pathlib import Path

from torch import Tensor

from sonoro.models.shared.codec_file import UNIT_NAMES, CodecFile, all_but, split_window_pairs, spread_rates
from sonoro.nn import weights
from sonoro.nn.weights import DummyRule

from .codec import CodecConfig, FishCodec
from .decoder import CodecDecoder

CODEC_FILE = "codec.pth"

_RENAMES = {
    r"^(de|en)coder\.(quantizer\.)?(?=semantic_|quantizer|pre_module|post_module|upsample|downsample)": "quantizer.",
    r"\.self_attn_layer_scale\.scale$": ".attention_layer_scale.gamma",
    r"\.mlp_layer_scale\.scale$": ".ffn_layer_scale.gamma",
}

PARTS = {
    "codec decoder": ("decoder.", "quantizer.post_module.", "quantizer.upsample."),
    "codec codebooks": ("quantizer.semantic_quantizer.", "quantizer.quantizer."),
    "codec encoder": ("encoder.", "quantizer.pre_module.", "quantizer.downsample."),
}


def _sift(tensors: dict[str, Tensor], config: CodecConfig, where: Path) -> dict[str, Tensor]:
    return {name.removeprefix("generator."): tensor for name, tensor in tensors.items()}


# The gains keep residual sums from growing: the output is about a fifth of full scale at the released widths.
_DUMMY_RULES = (
    DummyRule(r"\.alpha$", mean=1.0, std=0.1),
    DummyRule(r"codebook\.weight$", std=1.0),
    DummyRule(r"(\.gamma|layer_scale\.scale)$", mean=0.3, std=0.03),
    DummyRule(r"out_proj\.weight$", gain=0.3),
    DummyRule(r"^decoder\.upsample\.\d+\.0\.conv\.weight$", fan_in=lambda shape: shape[0]),
    DummyRule(r"^decoder\.model\.\d+\.block\.1\.conv\.weight$", fan_in=lambda shape: 2 * shape[0]),
    DummyRule(r"\.conv2\.conv\.weight$", gain=0.3),
    DummyRule(r"^decoder\.model\.[1-9]\d*\.conv\.weight$", gain=0.06),
)

FILE = CodecFile(
    make=FishCodec,
    sift=_sift,
    renames=_RENAMES | UNIT_NAMES,
    shape_of=spread_rates,
    fusions=lambda config: weights.llama_names(""),
    norms={r"(de|en)coder\..*conv": 0, r".*(in|out)_proj": 1},
    arrange=split_window_pairs,
    is_wide=all_but(CodecDecoder),
    rules=_DUMMY_RULES,
)

"""How a checkpoint's tensors are stored: released names and shapes, fusions, and rules for random weights.

Two files: model.safetensors (talker, speaker encoder) and speech_tokenizer/model.safetensors (codec)."""

from torch import nn

from sonoro.models.shared import model_files
from sonoro.models.shared.codec_file import CodecFile, all_but
from sonoro.models.shared.model_files import ModelFiles
from sonoro.nn.weights import DummyRule, Fusion, Shape, parted_names

from .backbone import Talker
from .codec import CodecDecoder, Qwen3Codec
from .compiled import compiles
from .config import (
    CodecConfig,
    CodecDecoderConfig,
    CodecEncoderConfig,
    Configs,
    ModelConfig,
    PredictorConfig,
    TalkerConfig,
)
from .voice import SpeakerEncoder

CODEC_FILE = "speech_tokenizer/model.safetensors"

_PARTS = {
    "talker layers": ("talker.model.layers.", "talker.model.norm."),
    "text embedding": ("talker.model.text_embedding.",),
    "text projection": ("talker.text_projection.",),
    "codec embedding": ("talker.model.codec_embedding.",),
    "codec head": ("talker.codec_head.",),
    "predictor layers": ("talker.code_predictor.model.layers.", "talker.code_predictor.model.norm."),
    "predictor embeddings": ("talker.code_predictor.model.codec_embedding.",),
    "predictor heads": ("talker.code_predictor.lm_head.",),
    "predictor projection": ("talker.code_predictor.small_to_mtp_projection.",),
    "speaker encoder": ("speaker_encoder.",),
}
_Stack = TalkerConfig | PredictorConfig | CodecDecoderConfig | CodecEncoderConfig
_CODEC_PARTS = {"codec decoder": ("decoder.",), "codec encoder": ("encoder.",)}


class LanguageModel(nn.Module):
    """The modules of the model file: the talker and, in the Base variant, the speaker encoder."""

    speaker_encoder: SpeakerEncoder | None

    def __init__(self, configs: Configs) -> None:
        super().__init__()
        # A checkpoint fine-tuned from Base to a speaker keeps the configuration, but not the tensors.
        speaker = configs.model.speaker_encoder_config if configs.model.tts_model_type == "base" else None
        self.talker = Talker(configs.model.talker_config)
        self.speaker_encoder = None if speaker is None else SpeakerEncoder(speaker)

    def finalize(self) -> None:
        """Derive the tables for inference, once the weights are final."""
        self.requires_grad_(False).eval()
        self.talker.finalize()
        if self.talker.device.type != "cpu":
            self.talker.fold_text()


Modules = model_files.Modules[LanguageModel, Qwen3Codec]


def main_fusions(config: ModelConfig) -> tuple[Fusion, ...]:
    talker = config.talker_config
    return _parted("talker.model.", talker) + _parted("talker.code_predictor.model.", talker.code_predictor_config)


def codec_fusions(config: CodecConfig) -> tuple[Fusion, ...]:
    decoder, encoder = config.decoder_config, config.encoder_config
    fusions = _parted("decoder.pre_transformer.", decoder)
    if encoder is None:
        return fusions
    layers = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2", "conv1": "block.1", "conv2": "block.3"}
    names = tuple(Fusion("encoder.encoder", ours, {theirs: 1}) for ours, theirs in layers.items())
    return fusions + _parted("encoder.encoder_transformer.", encoder) + names


def _parted(prefix: str, sizes: _Stack) -> tuple[Fusion, ...]:
    return parted_names(prefix, sizes.num_attention_heads, sizes.num_key_value_heads)


def unused_shapes(config: CodecConfig) -> dict[str, Shape]:
    """Shapes of the tensors in the released codec file that neither decoding nor encoding uses."""
    decoder, encoder = config.decoder_config, config.encoder_config
    book_width = decoder.codebook_dim // 2
    shapes: dict[str, Shape] = {
        f"decoder.quantizer.rvq_{part}.input_proj.weight": (book_width, decoder.codebook_dim, 1)
        for part in ("first", "rest")
    }
    if encoder is None:
        return shapes
    kept = config.encoder_valid_num_quantizers - encoder.num_semantic_quantizers
    for part, books, first_unused in (
        ("semantic", encoder.num_semantic_quantizers, encoder.num_semantic_quantizers),
        ("acoustic", encoder.num_quantizers - encoder.num_semantic_quantizers, kept),
    ):
        quantizer = f"encoder.quantizer.{part}_residual_vector_quantizer"
        shapes[f"{quantizer}.output_proj.weight"] = (encoder.hidden_size, encoder.codebook_dim, 1)
        for index in range(books):
            book = f"{quantizer}.layers.{index}.codebook"
            shapes[f"{book}.initialized"] = (1,)
            if index >= first_unused:
                shapes[f"{book}.embed_sum"] = (encoder.codebook_size, encoder.codebook_dim)
                shapes[f"{book}.cluster_usage"] = (encoder.codebook_size,)
    return shapes


# The gains keep the vocoder's residual sums from growing: its output is about a fifth of full scale at any width.
# A transposed convolution of stride s and kernel 2s computes each sample from two inputs.
_DUMMY_RULES = (
    DummyRule(r"\.(alpha|beta)$", std=0.1),
    DummyRule(r"cluster_usage$", mean=1.0, std=0.1),
    DummyRule(r"(embedding_sum|embed_sum)$", std=1.0),
    DummyRule(r"layer_scale\.scale$", mean=0.3, std=0.03),
    DummyRule(r"\.gamma$", mean=0.3, std=0.03),
    DummyRule(r"text_embedding\.weight$", std=1.0),
    DummyRule(r"codec_embedding\.(\d+\.)?weight$", std=0.25),
    DummyRule(r"^decoder\.upsample\.\d+\.0\.conv\.weight$", fan_in=lambda shape: shape[0]),
    DummyRule(r"^decoder\.decoder\.\d+\.block\.1\.conv\.weight$", fan_in=lambda shape: 2 * shape[0]),
    DummyRule(r"^decoder\.decoder\.\d+\.block\.\d+\.conv2\.conv\.weight$", gain=0.3),
    DummyRule(r"^decoder\.decoder\.6\.conv\.weight$", gain=0.06),
)


FILES = ModelFiles(
    make=LanguageModel,
    finalize=LanguageModel.finalize,
    fusions=lambda configs, names: main_fusions(configs.model),
    parts=_PARTS,
    rules=_DUMMY_RULES,
    is_wide=lambda name: name.startswith("speaker_encoder."),
    reads_8_bits=lambda lm, device, dtype: compiles(lm.talker, device, dtype),
    row_terms=1,
    codec=CodecFile(
        make=Qwen3Codec, fusions=codec_fusions, unused=unused_shapes, is_wide=all_but(CodecDecoder), rules=_DUMMY_RULES
    ),
    codec_file=CODEC_FILE,
    codec_parts=_CODEC_PARTS,
    codec_config=lambda configs: configs.codec,
)

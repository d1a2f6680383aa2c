"""How a checkpoint's tensors are stored: released names, of language model and codec in one file."""

from pathlib import Path

from sonoro.core.errors import CheckpointError, CheckpointNotFound
from sonoro.models.shared.codec_file import UNIT_NAMES, CodecFile, split_window_pairs
from sonoro.models.shared.model_files import MODEL_FILES, ModelFiles, Modules
from sonoro.models.shared.remote import gathered, local_file, snapshot
from sonoro.nn.configs import converted, yaml_values
from sonoro.nn.weights import DummyRule, Fusion

from .backbone import FlowLM
from .codec import PocketCodec
from .config import CONFIG_FILES, HUB, PREFIX, RELEASED, YamlConfig, read
from .prompt import find_tokenizer

_LM, _CODEC = "flow_lm.", "mimi."
_OPEN = f"{HUB}-without-voice-cloning"

_PARTS = {
    "language model": ("transformer.", "z_proj.", "out_eos.", "bos_", "emb_", "input_linear.", "speaker_proj."),
    "text embedding": ("conditioner.",),
    "flow head": ("flow_net.",),
}
_CODEC_PARTS = {
    "codec decoder": ("mimi.decoder", "mimi.quantizer.", "mimi.upsample."),
    "codec encoder": ("mimi.encoder", "mimi.downsample."),
}
_LAYER = {
    "self_attn.qkv_proj": "self_attn.in_proj",
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "mlp.up_proj": "linear1",
    "mlp.down_proj": "linear2",
    "self_attn_layer_scale": "layer_scale_1",
    "mlp_layer_scale": "layer_scale_2",
}
_SPELLINGS = {
    "transformer.norm.": "out_norm.",
    "speaker_proj.weight": "speaker_proj_weight",
    "flow_net.output.": "flow_net.final_layer.linear.",
    ".alpha": ".mlp.3.alpha",
}
_RENAMES = UNIT_NAMES | {
    r"^decoder\.output_proj\.conv\.": "mimi.quantizer.output_proj.",
    r"^decoder\.upsample\.conv\.": "mimi.upsample.convtr.convtr.",
    r"^decoder\.model\.([258])\.conv\.": r"mimi.decoder.model.\1.convtr.",
    r"^(encoder|decoder)\.layers\.": r"mimi.\1_transformer.transformer.layers.",
    r"^(encoder|decoder)\.model\.": r"mimi.\1.model.",
    r"^encoder\.downsample\.": "mimi.downsample.conv.conv.",
}

PocketModules = Modules[FlowLM, PocketCodec]


def _layer_names(prefix: str) -> tuple[Fusion, ...]:
    return tuple(Fusion(prefix, ours, {theirs: 1}) for ours, theirs in _LAYER.items())


_CODEC_FILE = CodecFile(
    make=PocketCodec,
    is_wide=lambda name: name.startswith("encoder."),
    rules=(
        DummyRule(r"layer_scale\.scale$", mean=0.1, std=0.02),
        # A sample is the sum of two taps.
        DummyRule(r"upsample\.conv\.weight$", fan_in=lambda shape: 2),
        DummyRule(r"^decoder\.model\.[258]\.conv\.weight$", fan_in=lambda shape: 2 * shape[0]),
        DummyRule(r"^decoder\.model\.11\.conv\.weight$", gain=0.1),
    ),
    renames=_RENAMES,
    sift=lambda tensors, config, where: {name: one for name, one in tensors.items() if name.startswith(_CODEC)},
    fusions=lambda config: (*_layer_names("decoder.layers."), *_layer_names("encoder.layers.")),
    arrange=split_window_pairs,
)


def _spelled(name: str) -> str:
    """The released name of the language model's tensor `name`."""
    for ours, theirs in _SPELLINGS.items():
        name = name.replace(ours, theirs)
    return _LM + name


def _modulations(depth: int) -> dict[str, int]:
    """Shift, scale and gate of each of `depth` blocks; shift and scale of the output."""
    parts = {f"res_blocks.{index}": 3 for index in range(depth)} | {"final_layer": 2}
    return {f"{part}.adaLN_modulation.1": share for part, share in parts.items()}


FILES = ModelFiles(
    make=FlowLM,
    finalize=FlowLM.finalize,
    fusions=lambda config, names: (
        *_layer_names("transformer.layers."),
        *(Fusion("flow_net.", ours, _modulations(config.flow_lm.flow.depth)) for ours in ("modulations", "offsets")),
    ),
    parts=_PARTS,
    codec=_CODEC_FILE,
    codec_file=MODEL_FILES,
    codec_parts=_CODEC_PARTS,
    codec_config=lambda config: config.mimi,
    rules=(
        DummyRule(r"emb_std$|alpha$|in_ln\.weight$", mean=1.0, std=0.1),
        DummyRule(r"emb_mean$|bos_", std=0.3),
        DummyRule(r"freqs$", mean=0.5, std=0.3),
        DummyRule(r"conditioner\.embed\.weight$", std=1.0),
    ),
    is_wide=FlowLM.is_wide,
    spelling=lambda names: _spelled,
)


def gather(model: str, is_dummy: bool) -> Path | None:
    """`Family.gather`: of a release, kyutai/pocket-tts/languages/NAME, whose tokeniser and voices are in the open
    repository; or of a configuration file, which names its weights. Raises `CheckpointError`."""
    if model.startswith(HUB):
        return _of_release(model, is_dummy)
    file = Path(model).expanduser()
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return None
    config = converted(YamlConfig, yaml_values(file), str(file))
    weights = config.weights_path or config.weights_path_without_voice_cloning
    if weights is None:
        raise CheckpointError(f"{file} names no weights_path")
    table = config.flow_lm.lookup_table
    files = {CONFIG_FILES[0]: file, config.tokenizer_file: local_file(table.tokenizer_path, file.parent)}
    if not is_dummy:
        files[MODEL_FILES] = local_file(weights, file.parent)
    return gathered(file.stem, files | {"embeddings": file.parent / "embeddings"})


def _of_release(model: str, is_dummy: bool) -> Path:
    repository, _, name = model.partition("/languages/")
    if repository not in (HUB, _OPEN) or PREFIX + name not in RELEASED:
        raise CheckpointNotFound(f"{model} is no release; on the hub: {', '.join(RELEASED.values())}")
    own = [f"languages/{name}/{pattern}" for pattern in ("tokenizer.*", "embeddings/*")]
    shared = ("tokenizer.json", "languages/english_2026-09/tokenizer.json")
    folder, config = snapshot(_OPEN, [*own, *shared]) / "languages" / name, read(PREFIX + name)
    files = {config.tokenizer_file: find_tokenizer(config, folder)}
    if not is_dummy:
        wanted = f"languages/{name}/{MODEL_FILES}"
        files[MODEL_FILES] = snapshot(repository, [wanted]) / wanted
    return gathered(name, files | {"embeddings": folder / "embeddings"})

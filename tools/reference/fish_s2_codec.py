"""Run the official Fish Audio S2 codec with the tiny weights of tests/support/tiny_fish.py and store its results.

    python fish_s2_codec.py --source FOLDER --out tests/assets/fish_s2

FOLDER is a checkout of fishaudio/fish-speech, whose code is under the Fish Audio Research License: it is run, for
research, and nothing of it is kept. Needs an environment of its own, never sonoro's: torch==2.13.0, numpy==2.4.6,
safetensors==0.8.0, einops==0.8.2, tqdm==4.70.1 and, without its dependencies, descript-audio-codec==1.0.0.
"""

import argparse
import functools
import importlib
import sys
import types
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import tiny_fish

MASK_SIDE = 32768
"""Side of a square mask that each transformer allocates but never reads."""


def import_official(source: Path) -> tuple[types.ModuleType, types.ModuleType]:
    """Import the official modules of the codec and its quantizer, with stubs for imports that only training needs."""
    for name in ("audiotools", "audiotools.ml"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["audiotools"].AudioSignal = object  # type: ignore[attr-defined]
    sys.modules["audiotools.ml"].BaseModel = torch.nn.Module  # type: ignore[attr-defined]
    spec = find_spec("dac")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for part in ("", "nn", "model"):
        # Their __init__.py files would import audio packages.
        package = types.ModuleType(".".join(("dac", part)) if part else "dac")
        package.__path__ = [str(Path(spec.submodule_search_locations[0]) / part)]
        sys.modules[package.__name__] = package
    sys.path.insert(0, str(source))
    dac = importlib.import_module("fish_speech.models.dac.modded_dac")
    return dac, importlib.import_module("fish_speech.models.dac.rvq")


def build(source: Path, tensors: dict[str, np.ndarray]) -> Any:
    """The official codec in tiny sizes, with exactly `tensors`."""
    dac, rvq = import_official(source)
    sizes = tiny_fish.TINY_CODEC
    ones = torch.ones
    torch.ones = lambda *shape, **kwargs: ones(*((1, 1) if shape == (MASK_SIDE, MASK_SIDE) else shape), **kwargs)

    def module() -> Any:
        inner = sizes["transformer"]
        config = dac.ModelArgs(
            n_layer=inner["layers"],
            n_head=inner["heads"],
            dim=inner["width"],
            intermediate_size=inner["intermediate"],
            head_dim=inner["head_width"],
            rope_base=inner["rope_theta"],
            norm_eps=inner["norm_eps"],
        )
        return dac.WindowLimitedTransformer(config, input_dim=inner["width"], window_size=inner["window"], causal=True)

    quantizer = rvq.DownsampleResidualVectorQuantize(
        input_dim=sizes["transformer"]["width"],
        n_codebooks=sizes["residual_codebooks"],
        codebook_size=sizes["residual_codes"],
        codebook_dim=sizes["codebook_width"],
        semantic_codebook_size=sizes["semantic_codes"],
        downsample_factor=sizes["downsample"],
        pre_module=module(),
        post_module=module(),
    )
    depths = [0] * (len(sizes["encoder_rates"]) - 1) + [sizes["encoder_transformer"]["layers"]]
    codec = dac.DAC(
        encoder_dim=sizes["encoder_dim"],
        encoder_rates=sizes["encoder_rates"],
        decoder_dim=sizes["decoder_dim"],
        decoder_rates=sizes["decoder_rates"],
        quantizer=quantizer,
        sample_rate=sizes["sample_rate"],
        encoder_transformer_layers=depths,
        transformer_general_config=functools.partial(dac.ModelArgs, rope_base=10000.0, norm_eps=1e-5, head_dim=64),
    )
    torch.ones = ones
    codec.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=True)
    return codec.eval()


def main() -> None:
    """Decode and encode, and write the asset file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    tensors = tiny_fish.codec_tensors()
    codec = build(arguments.source, tensors)
    random = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for name, frames, largest in (("decode", 40, 32), ("short", 1, 32), ("past_the_end", 9, 64)):
            codes = random.integers(0, largest, (2, frames, 10))
            codes[..., 0] = random.integers(0, 64, (2, frames))
            audio = codec.from_indices(torch.from_numpy(codes.transpose(0, 2, 1).copy()))
            stored |= {f"{name}/codes": codes, f"{name}/audio": audio[:, 0].numpy()}
        for samples in (1, tiny_fish.HOP, 999, 5000):
            audio = (tiny_fish.sound(samples) * 32767).astype(np.int16)
            signal = torch.from_numpy(audio.astype(np.float32) / np.float32(32768))
            codes, _ = codec.encode(signal[None, None])
            stored |= {f"encode_{samples}/audio": audio, f"encode_{samples}/codes": codes[0].T.numpy()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "codec.safetensors"
    metadata = {"weights": tiny_fish.digest(tensors), "torch": torch.__version__, "numpy": np.__version__}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in stored.items()}, file, metadata=metadata)
    print(f"wrote {len(stored)} tensors, {file.stat().st_size} bytes, to {file}")


if __name__ == "__main__":
    main()

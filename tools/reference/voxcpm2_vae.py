"""Run the official AudioVAE v2 with the tiny weights of tests/support/tiny_vox.py and store its results.

    python voxcpm2_vae.py --out tests/assets/voxcpm2

Needs an environment of its own, never sonoro's: torch==2.13.0, pydantic==2.14.3, numpy==2.4.6, safetensors==0.8.0 and,
without its dependencies, voxcpm==2.0.3, whose file of that class alone is run.
"""

import argparse
import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import tiny_fish
import tiny_vox

ENCODED = ((1, "right"), (40, "left"), (41, "left"), (41, "right"), (2999, "left"), (2999, "right"))
"""Lengths of recordings in samples, and the side on which they are padded to whole patches."""


def import_official() -> types.ModuleType:
    """Import the module of the class without its package, which imports much that the class does not need."""
    package = importlib.util.find_spec("voxcpm")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "modules" / "audiovae" / "audio_vae_v2.py"
    spec = importlib.util.spec_from_file_location("audio_vae_v2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(tensors: dict[str, np.ndarray]) -> Any:
    """The official class in tiny sizes, with exactly `tensors`."""
    official = import_official()
    vae = official.AudioVAE(official.AudioVAEConfig(**tiny_vox.TINY_CODEC))
    vae.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=True)
    return vae.eval()


def main() -> None:
    """Decode and encode, and write the asset file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tensors = tiny_vox.codec_tensors()
    vae, random, patch = build(tensors), np.random.default_rng(0), tiny_vox.PATCH
    stored: dict[str, np.ndarray] = {}

    def columns(patches: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(patches).flatten(1, 2).mT

    with torch.no_grad():
        for name, frames in (("decode", 40), ("short", 1)):
            patches = random.standard_normal((2, frames, patch, vae.latent_dim)).astype(np.float32)
            stored |= {f"{name}/patches": patches, f"{name}/audio": vae.decode(columns(patches))[:, 0].numpy()}
        # A continued clip: its last three patches are decoded first, and their audio is cut off.
        prompt, made = np.split(random.standard_normal((1, 17, patch, vae.latent_dim)).astype(np.float32), [9], axis=1)
        audio = vae.decode(columns(np.concatenate([prompt[:, -3:], made], axis=1)))[:, 0, 3 * tiny_vox.HOP :]
        stored |= {"continued/prompt": prompt[0], "continued/patches": made, "continued/audio": audio.numpy()}
        for samples, side in ENCODED:
            audio = (tiny_fish.sound(samples) * 32767).astype(np.int16)
            signal = torch.from_numpy(audio.astype(np.float32) / np.float32(32768))
            pad = -samples % tiny_vox.ENCODER_HOP
            signal = F.pad(signal, (pad, 0) if side == "left" else (0, pad))
            latents = vae.encode(signal[None], vae.sample_rate)[0].mT.reshape(-1, patch, vae.latent_dim)
            stored |= {f"encode_{samples}_{side}/audio": audio, f"encode_{samples}_{side}/patches": latents.numpy()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "vae.safetensors"
    metadata = {"weights": tiny_fish.digest(tensors), "torch": torch.__version__, "numpy": np.__version__}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in stored.items()}, file, metadata=metadata)
    print(f"wrote {len(stored)} tensors, {file.stat().st_size} bytes, to {file}")


if __name__ == "__main__":
    main()

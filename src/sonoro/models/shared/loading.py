"""A model family: what a model folder hands to the registry, which loads, randomly fills or describes a model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sonoro.core.errors import CheckpointError
from sonoro.core.options import OptionValue
from sonoro.core.types import ModelSpec
from sonoro.models.base import Description, LoadedModel
from sonoro.models.shared.model_files import ModelFiles
from sonoro.models.words import ShowsWords
from sonoro.nn import stored
from sonoro.words.heads import FILE, read_heads

_DUMMY_SEED = 0
_WEIGHT_FILES = ("*.safetensors*", "pytorch_model*", "model.bin*", "model.pth*")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model folder's entry in the registry. A source is a checkpoint folder or a name in `configurations`.

    `model_type`: that of config.json, or else its `architecture`. `configurations`: released configurations, packaged,
    and their hub ids. `hub_files`: patterns of files to download. `hub_settings`: settings of a model loaded by hub id
    (`models.settings`). `quantizations`: 8-bit formats that it is offered in, having failed no gate. `holds_float16`:
    its activations were measured to fit float16, with sums in float32. `owns`: whether a folder without config.json is
    a checkpoint of this family. `gather`: for a name that is neither a folder nor a repository whose root is the
    checkpoint, a folder of its files, without weights for a dummy; None for a name of another family.

    `read` returns the configuration of a source, `files` loads weights, `tokenizer` that of a folder with
    `tokenizer_file`, or for None a stand-in; `model` takes name, configuration, modules and tokeniser. `spec`, `sizes`
    and `position_bytes` describe a model without allocating it."""

    model_type: str
    configurations: Mapping[str, str]
    hub_files: Sequence[str]
    read: Callable[[Any], Any]
    files: ModelFiles[Any, Any, Any]
    tokenizer: Callable[[Any, Path | None], Any]
    tokenizer_file: str | Callable[[Any], str]
    model: Callable[[str, Any, Any, Any], Any]
    spec: Callable[[str, Any], ModelSpec]
    sizes: Callable[[Any], dict[str, str | int | float]]
    position_bytes: Callable[[Any, torch.dtype], int]
    hub_settings: Mapping[str, OptionValue] = field(default_factory=dict)
    quantizations: Sequence[str] = ("int8", "fp8")
    holds_float16: bool = False
    owns: Callable[[Path], bool] = lambda folder: False
    gather: Callable[[str, bool], Path | None] = lambda model, is_dummy: None

    def from_folder(
        self, folder: Path, name: str, device: torch.device, dtype: torch.dtype, quantization: str = "none"
    ) -> LoadedModel:
        """Load the model of `folder`. Raises `CheckpointError` naming file, key or tensor."""
        # Headers and small files first, so that errors in them show before gigabytes are read.
        config = self.read(folder)
        parameters = self.files.count_parts(self.files.stored_shapes(config, folder))
        tokenizer = self.tokenizer(config, folder)
        modules = self.files.load(folder, config, device=device, dtype=dtype, quantization=quantization)
        stored.warn(name, modules.skipped)
        model = self._model(name, config, modules, tokenizer, folder)
        return LoadedModel(model, device, dtype, parameters, modules.skipped, quantization)

    def from_random(
        self, source: Path | str, name: str, device: torch.device, dtype: torch.dtype, quantization: str = "none"
    ) -> LoadedModel:
        """A model of random weights in the shapes of `source`. Raises `CheckpointError` for a bad configuration."""
        config = self.read(source)
        file = self.tokenizer_file if isinstance(self.tokenizer_file, str) else self.tokenizer_file(config)
        has_tokenizer = isinstance(source, Path) and (source / file).is_file()
        tokenizer = self.tokenizer(config, Path(source) if has_tokenizer else None)
        modules = self.files.init_dummy(config, _DUMMY_SEED, device=device, dtype=dtype, quantization=quantization)
        parameters = self.files.count_parts(self.files.stored_shapes(config))
        model = self._model(name, config, modules, tokenizer, source if isinstance(source, Path) else None)
        return LoadedModel(model, device, dtype, parameters, quantization=quantization)

    def _model(self, name: str, config: Any, modules: Any, tokenizer: Any, folder: Path | None) -> Any:
        """Assemble the model, with the word heads stored in `folder` if it has any."""
        model = self.model(name, config, modules, tokenizer)
        if folder is not None and isinstance(model, ShowsWords) and (folder / FILE).is_file():
            model.word_heads = read_heads(folder)
            layers, heads = model.attention_heads
            for layer, head in model.word_heads.places:
                if not (0 <= layer < layers and 0 <= head < heads):
                    limit = f"the model has {layers} layers of {heads} heads"
                    raise CheckpointError(f"{folder / FILE} names layer {layer}, head {head}, from 0; {limit}")
        return model

    def describe(self, source: Path | str, name: str, dtype: torch.dtype) -> Description:
        """Sizes, parameters and memory of `source`, without allocating it. Raises as `from_folder`."""
        config = self.read(source)
        # The tensors of a folder are checked as `from_folder` does, unless it has no weights.
        has_weights = isinstance(source, Path) and any(any(source.glob(kind)) for kind in _WEIGHT_FILES)
        shapes = self.files.stored_shapes(config, Path(source) if has_weights else None)
        spec = self.spec(name, config)
        return Description(
            spec=spec,
            configuration={"family": self.model_type, **self.sizes(config)},
            parameters=self.files.count_parts(shapes),
            files={file: sum(math.prod(shape) for shape in named.values()) for file, named in shapes.items()},
            memory_bytes={
                "weights": self.files.weight_bytes(config, dtype),
                "attention, per second of audio": round(self.position_bytes(config, dtype) / spec.frame_s),
            },
        )

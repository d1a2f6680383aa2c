"""From the public ONNX file of Kokoro-82M, whose weights are in 8 bits, to one file of arrays under our own names.

Weights stay in 8 bits beside their scales (`NAME` and `NAME.scale`), in PyTorch's layouts; what is stored in float32
becomes float16. `read` gives float32. Needs the onnx package to convert, NumPy alone to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_GATES = (0, 2, 3, 1)
"""ONNX holds an LSTM's gates as input, output, forget, cell; PyTorch as input, forget, cell, output."""
_SUFFIX = re.compile(r"/(?:Gemm_MatMul_quant|MatMul_quant|MatMul|Conv_quant|Conv|ConvTranspose|LSTM_quant)$")
_ALBERT = "bert.encoder.albert_layer_groups.0.albert_layers.0."
_BEGINNINGS = (
    (_ALBERT + "attention.LayerNorm", "bert.attention_norm"),
    (_ALBERT + "full_layer_layer_norm", "bert.output_norm"),
    (_ALBERT + "attention.", "bert."),
    (_ALBERT, "bert."),
    ("bert.encoder.embedding_hidden_mapping_in", "bert.mapping_in"),
    ("bert.embeddings.LayerNorm", "bert.norm"),
    ("bert.embeddings.word_embeddings", "bert.word"),
    ("bert.embeddings.position_embeddings", "bert.position"),
    ("bert.embeddings.token_type_embeddings", "bert.token_type"),
    ("predictor.duration_proj.linear_layer", "predictor.duration_proj"),
    ("decoder.asr_res.0", "decoder.asr_res"),
)
_PREDICTED = ("F0.", "N.", "F0_proj", "N_proj", "shared")


def our_name(name: str) -> str:
    """Where a tensor or node of the graph (`encoder.predictor.lstms.0`, `/decoder/decoder/encode/conv1/Conv`) goes."""
    name = _SUFFIX.sub("", name).strip("/").replace("/", ".")
    # A module within a list is named by its list and its number, and a node by both once more.
    name = re.sub(r"\b([a-z_]+\.\d+)\.\1(?=\.|$)", r"\1", name)
    name = name.removeprefix("encoder.").removeprefix("decoder.")
    name = re.sub(r"\b(convs1|convs2|asr_res|adain1|adain2)\.\1\.", r"\1.", name)
    if name.startswith(_PREDICTED):
        name = "predictor." + name
    for given, ours in _BEGINNINGS:
        if name.startswith(given):
            name = ours + name[len(given) :]
    name = re.sub(r"^text_encoder\.cnn\.(\d)\.0\b", r"text_encoder.convs.\1", name)
    name = re.sub(r"^text_encoder\.cnn\.(\d)\.1\b", r"text_encoder.norms.\1", name)
    name = re.sub(r"^predictor\.text_encoder\.lstms\.(\d)", _predictor_layer, name)
    name = re.sub(r"\.alpha([12])\.(\d)$", r".snake\1.\2.alpha", name)
    return name.replace(".gamma", ".weight").replace(".beta", ".bias")


def _predictor_layer(match: re.Match[str]) -> str:
    layer = int(match[1])
    return f"predictor.{'norms' if layer % 2 else 'lstms'}.{layer // 2}"


def lstm(
    name: str, given: np.ndarray, fed: np.ndarray, bias: np.ndarray, scales: tuple[np.ndarray, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """PyTorch's arrays of an LSTM in both directions: int8 `given` [2, in, 4 H] and `fed` [2, H, 4 H], `bias` [2, 8 H]
    and a scale for each direction."""

    def ordered(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([np.split(rows, 4)[gate] for gate in _GATES])

    for direction, ending in enumerate(("", "_reverse")):
        for kind, array, scale in (("ih", given, scales[0]), ("hh", fed, scales[1])):
            yield f"{name}.weight_{kind}_l0{ending}", ordered(array[direction].T)
            yield f"{name}.weight_{kind}_l0{ending}.scale", scale[direction].reshape(1, 1)
        for kind, part in zip(("ih", "hh"), np.split(bias[direction], 2), strict=True):
            yield f"{name}.bias_{kind}_l0{ending}", ordered(part)


def _convert(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    from onnx import numpy_helper  # noqa: PLC0415 - only here is the package needed

    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    converted = set()
    for node in model.graph.node:
        inputs = [held.get(name) for name in node.input]
        weight = inputs[1] if len(inputs) > 1 else None
        ours = our_name(node.name)
        if node.op_type == "DynamicQuantizeLSTM":
            assert weight is not None
            yield from lstm(ours, weight, inputs[2], inputs[3], (inputs[8], inputs[10]))
        elif weight is None or weight.ndim < 2 or node.input[1] in converted:
            # Weights that several nodes share (those of ALBERT's layers) belong to the first.
            continue
        elif node.op_type == "MatMulInteger":
            yield f"{ours}.weight", weight.T
            yield f"{ours}.weight.scale", held[node.input[1].replace("_quantized", "_scale")][:, None]
        elif node.op_type == "ConvInteger":
            # Weights are within 0..127, so that what is left without the zero point fits 8 bits.
            yield f"{ours}.weight", (weight.astype(np.int16) - inputs[3]).astype(np.int8)
            scale = held[node.input[1].replace("_quantized", "_scale")]
            yield f"{ours}.weight.scale", scale.reshape((1,) * weight.ndim)
        elif node.op_type == "MatMul":
            yield f"{ours}.weight", weight.T
        elif node.op_type in ("Conv", "ConvTranspose") and "istft" not in node.name:
            yield f"{ours}.weight", weight
        converted.add(node.input[1] if len(node.input) > 1 else "")
    for name, array in held.items():
        if name.endswith((".bias", ".gamma", ".beta", "LayerNorm.weight", "layer_norm.weight")) or ".alpha" in name:
            yield our_name(name), array
        elif name.endswith("embeddings.weight_quantized") or name.endswith("embedding.weight_quantized"):
            ours = our_name(name.removesuffix("_quantized"))
            yield ours, array
            yield f"{ours}.scale", held[name.replace("_quantized", "_scale")].reshape(1, 1)


def convert(graph: Path, tokenizer: Path, styles: dict[str, Path], output: Path) -> None:
    """Write `output` (.npz) from the graph, the tokenizer and a style file [N, 1, 256] for each voice."""
    import onnx  # noqa: PLC0415

    arrays = {
        name: array.astype(np.float16) if array.dtype == np.float32 and not name.endswith(".scale") else array
        for name, array in _convert(onnx.load(str(graph)))
    }
    for voice, path in styles.items():
        arrays[f"style.{voice}"] = np.fromfile(path, np.float32).reshape(-1, 256).astype(np.float16)
    vocabulary = json.loads(tokenizer.read_text("utf-8"))["model"]["vocab"]
    arrays["vocabulary"] = np.frombuffer(json.dumps(vocabulary).encode("ascii"), np.uint8)
    np.savez(output, **arrays)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, int]]:
    """The weights in float32 by our names, the styles [N, 256] float32 by voice, and the id of each phoneme."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    vocabulary = json.loads(arrays.pop("vocabulary").tobytes())
    styles = {
        n.removeprefix("style."): arrays.pop(n).astype(np.float32) for n in list(arrays) if n.startswith("style.")
    }
    scales = {n.removesuffix(".scale"): arrays.pop(n) for n in list(arrays) if n.endswith(".scale")}
    weights = {name: array.astype(np.float32) * scales.get(name, np.float32(1)) for name, array in arrays.items()}
    return weights, styles, vocabulary

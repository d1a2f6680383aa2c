"""Loading: what a damaged or foreign file is told; export and load undo each other; dummy tensors."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from processes import GUARD_S
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from builtin_voice.export import export
from sonoro.core.errors import CheckpointError, CheckpointNotFound, OutputError, TensorMismatch
from sonoro.nn.linear import Linear, kept_as_stored, widen_stored
from sonoro.nn.stored import find
from sonoro.nn.transformer import DecoderConfig, DecoderStack, NormedAttention
from sonoro.nn.weights import (
    DummyRule,
    Fusion,
    check,
    empty,
    fill,
    init_dummy,
    llama_names,
    load,
    stored_shapes,
)

CPU = torch.device("cpu")
FUSIONS = (Fusion("stack.", "qkv_proj", {"q_proj": 2, "k_proj": 1, "v_proj": 1}),)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(3, 8, bias=False)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("usage", torch.zeros(()))
        self.register_buffer("table", torch.zeros(2), persistent=False)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([Layer(), Layer()])
        self.qkv_proj = nn.Linear(3, 4)


def empty_stack() -> Stack:
    with torch.device("meta"):
        return Stack()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = stored_shapes(empty_stack(), FUSIONS)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def written(folder: Path, values: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    save_file(values, folder / name)
    return folder / name


def loaded(*files: Path) -> Stack:
    stack = empty_stack()
    load(stack, files, dtype_of=lambda _: torch.float32, device=CPU, fusions=FUSIONS)
    return stack


def test_stored_names_and_shapes_are_those_of_the_parts() -> None:
    shapes = stored_shapes(empty_stack(), FUSIONS)
    assert shapes["stack.1.q_proj.weight"] == (4, 3)
    assert shapes["stack.1.v_proj.weight"] == (2, 3)
    assert shapes["qkv_proj.weight"] == (4, 3), "a fusion concerns names with its prefix alone"
    assert "stack.0.qkv_proj.weight" not in shapes
    assert "stack.0.table" not in shapes
    assert shapes["stack.0.usage"] == ()


def test_load_joins_the_parts_in_order(tmp_path: Path) -> None:
    values = tensors()
    stack = loaded(written(tmp_path, values))
    joined = torch.cat([values[f"stack.1.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(stack.stack[1].qkv_proj.weight, joined)
    assert torch.equal(stack.stack[0].usage, values["stack.0.usage"])


def test_load_casts_each_tensor_as_it_is_told(tmp_path: Path) -> None:
    stack = empty_stack()
    load(
        stack,
        [written(tmp_path, tensors())],
        dtype_of=lambda name: torch.float64 if "norm" in name else torch.bfloat16,
        device=CPU,
        fusions=FUSIONS,
    )
    assert stack.stack[0].norm.weight.dtype == torch.float64
    assert stack.stack[0].qkv_proj.weight.dtype == torch.bfloat16


def test_load_keeps_nothing_of_the_file(tmp_path: Path) -> None:
    values = tensors()
    file = written(tmp_path, values)
    stack = loaded(file)
    written(tmp_path, {name: torch.zeros_like(value) for name, value in values.items()})
    assert torch.equal(stack.qkv_proj.weight, values["qkv_proj.weight"])


def test_readers_read_at_once_and_no_further_ahead_than_they_are() -> None:
    """So what is held besides the module is a few tensors, whatever the checkpoint."""
    readers, count, lock = 3, 20, threading.Lock()
    reading, held, most, meet = 0, 0, 0, threading.Barrier(readers)

    class Counted(Linear):
        def stored(self, weight: Tensor) -> Tensor:
            nonlocal held
            with lock:
                held -= 1
            return super().stored(weight)

    def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
        nonlocal reading, held, most
        with lock:
            reading, held = reading + 1, held + 1
            most = max(most, held)
            is_early = reading <= readers
        if is_early:
            meet.wait(GUARD_S)
        return torch.full(shape, float(name.split(".", maxsplit=1)[0]))

    with torch.device("meta"):
        module = nn.ModuleList([Counted(4, 2, bias=False) for _ in range(count)])
    fill(module, value_of, readers=readers)
    assert [float(layer.weight.detach()[0, 0]) for layer in module] == [*range(count)]
    assert most == readers


def test_what_a_reader_raises_is_raised() -> None:
    def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
        raise OSError(f"{name} is gone")

    with torch.device("meta"):
        module = nn.Linear(3, 4)
    with pytest.raises(OSError, match="weight is gone"):
        fill(module, value_of, readers=2)


def test_several_files_make_one_checkpoint(tmp_path: Path) -> None:
    values = tensors()
    first = {name: value for name, value in values.items() if "q_proj" in name}
    rest = {name: value for name, value in values.items() if "q_proj" not in name}
    stack = loaded(written(tmp_path, first, "a.safetensors"), written(tmp_path, rest, "b.safetensors"))
    assert torch.equal(stack.stack[0].qkv_proj.weight[:4], values["stack.0.q_proj.weight"])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path, tensors(), "a.safetensors")
    second = written(tmp_path, {"qkv_proj.bias": torch.zeros(4)}, "b.safetensors")
    with pytest.raises(TensorMismatch, match=r"'qkv_proj\.bias' is in .*a\.safetensors and again in .*b\.safetensors"):
        loaded(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_export_writes_what_load_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {name: value.to(dtype) for name, value in tensors().items()}
    stack = loaded(written(tmp_path, values))
    export(stack, tmp_path / "new" / "model.safetensors", dtype=dtype, fusions=FUSIONS)
    back = load_file(tmp_path / "new" / "model.safetensors")
    assert back.keys() == values.keys()
    assert all(torch.equal(back[name], values[name]) and back[name].dtype == dtype for name in values)


def test_export_stores_in_8_bits_what_it_is_told_to(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stack, file = Stack(), tmp_path / "model.safetensors"
    export(
        stack, file, dtype=torch.float16, fusions=FUSIONS, is_in_8_bits=lambda name, value: value.ndim > 1
    )  # fmt: skip
    stored = load_file(file)
    assert stored["stack.0.q_proj.weight"].dtype == torch.int8
    assert stored["stack.0.q_proj.weight_scale"].shape == (4,)
    assert stored["stack.0.norm.weight"].dtype == torch.float16
    loaded = empty_stack()
    load(loaded, [file], dtype_of=lambda name: torch.float32, device=CPU, fusions=FUSIONS)
    assert check(empty_stack(), [file], fusions=FUSIONS) == stored_shapes(empty_stack(), FUSIONS)
    for name, value in stack.state_dict().items():
        step = value.abs().amax(-1, keepdim=True) / 127 if value.ndim > 1 else 1e-3
        assert ((loaded.state_dict()[name] - value).abs() <= 0.501 * step).all()


def test_a_layer_that_keeps_8_bits_has_them_as_stored_until_it_is_widened(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = tmp_path / "model.safetensors"
    export(
        Stack(), file, dtype=torch.float16, fusions=FUSIONS,
        is_in_8_bits=lambda name, value: name.startswith("stack.0") and value.ndim > 1,
    )  # fmt: skip
    stored, expected = load_file(file), loaded(file)
    stack = empty_stack()
    for layer in stack.stack:
        with torch.device("meta"):
            layer.qkv_proj = Linear(3, 8, bias=False)
        layer.qkv_proj.quantization = "stored"
    load(stack, [file], dtype_of=lambda _: torch.float32, device=CPU, fusions=FUSIONS)
    kept, other = (layer.qkv_proj for layer in stack.stack)
    parts = [stored[f"stack.0.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(kept.weight, torch.cat(parts))
    assert torch.equal(other.weight, expected.stack[1].qkv_proj.weight)
    assert kept_as_stored(stack) == [kept]
    x = torch.randn(5, 3)
    torch.testing.assert_close(kept(x), expected.stack[0].qkv_proj(x))
    widen_stored([kept])
    assert torch.equal(kept.weight, expected.stack[0].qkv_proj.weight)
    assert kept_as_stored(stack) == []


def test_export_writes_shards_with_an_index(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stack, file = Stack(), tmp_path / "model.safetensors"
    export(stack, file, dtype=torch.float32, fusions=FUSIONS, shard_bytes=100)
    files = find(file)
    assert len(files) > 2
    assert not file.exists()
    assert all(sum(tensor.nbytes for tensor in load_file(part).values()) <= 100 for part in files)
    loaded = empty_stack()
    load(loaded, files, dtype_of=lambda name: torch.float32, device=CPU, fusions=FUSIONS)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in stack.state_dict().items())


@pytest.mark.parametrize("scale", [torch.ones(7), torch.ones(8, 1), torch.ones(8, dtype=torch.int32), None])
def test_integers_without_a_scale_by_row_are_refused(tmp_path: Path, scale: Tensor | None) -> None:
    module, values = nn.Linear(3, 8, bias=False), {"weight": torch.ones(8, 3, dtype=torch.int8)}
    file = written(tmp_path, values if scale is None else values | {"weight_scale": scale})
    with pytest.raises(TensorMismatch, match=r"'weight' is stored as I8"):
        load(module, [file], dtype_of=lambda name: torch.float32, device=CPU)


def test_export_refuses_a_place_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    stack = loaded(written(tmp_path, tensors()))
    with pytest.raises(OutputError, match="file"):
        export(stack, tmp_path / "file" / "model.safetensors", dtype=torch.float32)


def test_export_refuses_a_value_its_dtype_cannot_hold(tmp_path: Path) -> None:
    stack = loaded(written(tmp_path, tensors() | {"qkv_proj.bias": torch.full((4,), 1e6)}))
    with pytest.raises(OutputError, match=r"'qkv_proj\.bias' has a value that torch\.float16 cannot hold"):
        export(stack, tmp_path / "half.safetensors", dtype=torch.float16)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    values = tensors()
    del values["stack.1.k_proj.weight"]
    with pytest.raises(
        TensorMismatch, match=r"model\.safetensors: tensor 'stack\.1\.k_proj\.weight' \[2, 3\] is missing"
    ):
        loaded(written(tmp_path, values))


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    for name in ("lora.weight", "stack.0.norm.scale", "stack.2.norm.weight"):
        with pytest.raises(TensorMismatch, match=rf"tensor '{name}' \[5\] is not part of the model"):
            loaded(written(tmp_path, tensors() | {name: torch.zeros(5)}))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    values = tensors() | {"stack.0.v_proj.weight": torch.zeros(3, 2)}
    with pytest.raises(TensorMismatch, match=r"'stack\.0\.v_proj\.weight' has shape \[3, 2\], expected \[2, 3\]"):
        loaded(written(tmp_path, values))


def test_many_mismatches_are_counted_not_listed(tmp_path: Path) -> None:
    extra = {f"stack.9.extra{index}": torch.zeros(1) for index in range(9)}
    with pytest.raises(TensorMismatch, match=r"\.\.\. 4 more"):
        loaded(written(tmp_path, tensors() | extra))


def test_a_truncated_file_is_refused_by_its_first_cut_tensor(tmp_path: Path) -> None:
    file = written(tmp_path, tensors())
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    spans = {name: entry["data_offsets"] for name, entry in json.loads(whole[8 : 8 + length]).items()}
    last = max(spans, key=lambda name: spans[name][1])
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is truncated: tensor '{last}'"):
        loaded(file)


@pytest.mark.parametrize(
    "content", [b"", b"\x10", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]", b"\x03" + b"\0" * 7 + b"{a}"]
)
def test_what_is_not_a_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        loaded(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"absent\.safetensors"):
        loaded(tmp_path / "absent.safetensors")


def test_quantised_storage_is_refused_rather_than_cast(tmp_path: Path) -> None:
    values = tensors()
    values["qkv_proj.bias"] = values["qkv_proj.bias"].to(torch.int8)
    with pytest.raises(TensorMismatch, match=r"'qkv_proj\.bias' is stored as I8"):
        loaded(written(tmp_path, values))


def dummy(seed: int, dtype: torch.dtype = torch.float32) -> Stack:
    stack = empty_stack()
    rules = (DummyRule(r"usage$", mean=3.0, std=0.5), DummyRule(r"^qkv_proj\.weight$", gain=10.0))
    init_dummy(stack, seed, rules=rules, dtype_of=lambda _: dtype, device=CPU)
    return stack


def test_dummy_tensors_depend_on_seed_and_name_alone() -> None:
    first, again, other = dummy(1).state_dict(), dummy(1).state_dict(), dummy(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["stack.0.qkv_proj.weight"], first["stack.1.qkv_proj.weight"])


def test_dummy_tensors_are_never_zero_and_are_scaled_by_fan_in() -> None:
    linear = nn.Linear(400, 300, device="meta")
    init_dummy(linear, 0, rules=(), dtype_of=lambda _: torch.bfloat16, device=CPU)
    assert linear.weight.dtype == torch.bfloat16
    # The standard error of a deviation over 120,000 draws is .2 percent, and bfloat16 rounds by .4 percent.
    assert linear.weight.float().std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert all((value != 0).all() and value.isfinite().all() for value in dummy(3).state_dict().values())


def test_stacks_are_read_by_the_names_of_llama_files() -> None:
    config = DecoderConfig(
        width=8, intermediate=6, layers=1, heads=4, kv_heads=2, head_width=4, norm_eps=1e-6, rope_theta=1e4
    )
    shapes = stored_shapes(
        nn.ModuleDict({"model": DecoderStack(config, NormedAttention)}), llama_names("model.layers.")
    )
    layer = "model.layers.0"
    assert shapes == {
        f"{layer}.attention_norm.weight": (8,),
        f"{layer}.attention.wqkv.weight": (32, 8),
        f"{layer}.attention.q_norm.weight": (4,),
        f"{layer}.attention.k_norm.weight": (4,),
        f"{layer}.attention.wo.weight": (8, 16),
        f"{layer}.ffn_norm.weight": (8,),
        f"{layer}.feed_forward.w1.weight": (6, 8),
        f"{layer}.feed_forward.w3.weight": (6, 8),
        f"{layer}.feed_forward.w2.weight": (8, 6),
        "model.norm.weight": (8,),
    }


def test_neither_shapes_alone_nor_loading_need_a_compiler(tmp_path: Path) -> None:
    """In a process of its own, as what has been loaded once stays."""
    for name, family in FAMILIES.items():
        family.write(tmp_path / name)
    code = (
        "import sys; from sonoro.models import registry; "
        "[registry.describe(name) for name in ('fish-s2-pro', 'voxcpm2', 'qwen3-tts-0.6b-base')]; "
        "[registry.load(folder, device='cpu') for folder in sys.argv[1:]]; "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *(str(tmp_path / name) for name in FAMILIES)], check=True)


def test_shapes_alone_are_those_of_the_module() -> None:
    made, full = empty(lambda _: nn.Linear(3, 2), None), nn.Linear(3, 2)
    assert {name: tensor.shape for name, tensor in made.state_dict().items()} == {
        name: tensor.shape for name, tensor in full.state_dict().items()
    }
    assert all(tensor.is_meta for tensor in made.parameters())

"""What `sonoro tune` does with its measurements: nothing here measures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from sonoro.compile.variants import card_named, compilers
from sonoro.core.errors import ConfigError
from sonoro.ops import plans
from sonoro.ops.device import TYPICAL, Card
from sonoro.ops.plans import LIMITS, CublasPlan, GemvPlan, Plan, Product, TilePlan, from_text, plan_for, use_tuned
from sonoro.profile import tune
from sonoro.profile.tune import MOST_ROWS, Gpu, TuneSettings, parse_shape, run
from sonoro.runtime import kernels

CARD = Card("A card/2", (8, 9), 40, 99 * 1024, 3e11)
SHAPES = (((2048, 1024), False), ((512, 256), True))
COLUMNS = [limit for limit in LIMITS if limit <= MOST_ROWS]


class Clock:
    """Says how long plans take that were compiled: the wanted one is fastest. It stops after so many products."""

    def __init__(self, stops_after: int = 10**6) -> None:
        self.products, self._stops_after = list[Product](), stops_after
        self.compiled: set[tuple[Product, Plan]] = set()

    def compile(self, product: Product, plans: Iterable[Plan]) -> None:
        self.compiled |= {(product, plan) for plan in plans}

    def seconds(self, product: Product, plan: Plan) -> float:
        assert (product, plan) in self.compiled
        if product not in self.products:
            if len(self.products) == self._stops_after:
                raise KeyboardInterrupt
            self.products.append(product)
        match plan:
            case CublasPlan():
                return 5e-6 if product.rows < 64 else 1e-6
            case GemvPlan():
                return 2e-6 + 1e-7 * plan.rows + 1e-9 * plan.warps
            case TilePlan():
                return 3e-6 + 1e-9 * (plan.block_n + abs(plan.stages - 2))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The made-up card, and a cache of its own."""
    for module in (tune, kernels, plans):
        monkeypatch.setattr(module, "card", lambda device: CARD)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans, "_read", lambda known={}: known)
    plans._plan_for.cache_clear()
    return tmp_path / "sonoro" / "tuned" / "A_card_2.json"


def test_the_fastest_is_written_and_read_at_the_next_start(here: Path) -> None:
    said: list[str] = []
    assert run(TuneSettings(SHAPES), torch.device("cuda"), said.append, Clock()) == here
    file = json.loads(here.read_text(encoding="utf-8"))
    assert file["device"] == "A card/2"
    assert file["gated"] == ["512x256"]
    for line in file["plans"].values():
        found = [from_text(plan) for plan in line]
        assert len(found) == len(COLUMNS)
        for rows, plan in zip(COLUMNS, found, strict=True):
            assert isinstance(plan, GemvPlan if rows <= 2 else TilePlan if rows < 64 else CublasPlan), (rows, plan)
        # Varied once it was found: two warps, two stages.
        assert isinstance(found[0], GemvPlan)
        assert (found[0].rows, found[0].warps) == (1, 2)
        assert isinstance(found[2], TilePlan)
        assert found[2].stages == 2
    # How far it is, what it found, and what to contribute.
    assert said[0].startswith("1/14 2048x1024 rows=1: gemv 1")
    assert said[13].startswith("14/14 512x256 rows=256: cublas")
    assert str(here) in said[14]
    assert said[15] == here.read_text(encoding="utf-8")
    kernels.use_own_plans(torch.device("cuda"))
    for rows, text in zip(COLUMNS, file["plans"]["2048x1024"], strict=True):
        weight = torch.empty(2048, 1024, dtype=torch.bfloat16, device="meta")
        assert plan_for(rows, weight, False) == from_text(text)


def test_plans_for_weights_in_8_bits_are_a_file_of_their_own(here: Path) -> None:
    weight, x_rows = torch.empty(2048, 1024, dtype=torch.int8, device="meta"), 1
    before = plan_for(x_rows, weight, False), plan_for(1024, weight, False)
    clock = Clock()
    path = run(TuneSettings(SHAPES[:1], quantization="int8"), torch.device("cuda"), lambda line: None, clock)
    assert path == here.with_stem("A_card_2-int8")
    assert {product.itemsize for product in clock.products} == {1}
    kernels.use_own_plans(torch.device("cuda"))
    found = plan_for(x_rows, weight, False)
    assert found == from_text(json.loads(path.read_text(encoding="utf-8"))["plans"]["2048x1024"][0]) != before[0]
    # Beyond what was measured they are computed as before; other weights have none.
    assert plan_for(1024, weight, False) == before[1]
    assert not plans.measured(CARD)
    assert not plans.measured(CARD, "fp8")


def test_it_goes_on_where_it_was_broken_off(here: Path) -> None:
    first, second, said = Clock(stops_after=9), Clock(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        run(TuneSettings(SHAPES), torch.device("cuda"), said.append, first)
    # What is whole can be used already.
    assert list(json.loads(here.read_text(encoding="utf-8"))["plans"]) == ["2048x1024"]
    use_tuned(here.read_text(encoding="utf-8"))
    run(TuneSettings(SHAPES), torch.device("cuda"), said.append, second)
    assert len(first.products) == 9
    assert [product.rows for product in second.products] == COLUMNS
    assert {product.shape for product in second.products} == {(512, 256)}
    assert [line.partition(" ")[0] for line in said if "rows=" in line] == [f"{n}/14" for n in range(1, 15)]


def test_a_file_that_is_whole_is_told_again(here: Path) -> None:
    first, second, said = Clock(), Clock(), list[str]()
    run(TuneSettings(SHAPES[:1]), torch.device("cuda"), lambda line: None, first)
    assert run(TuneSettings(SHAPES[:1]), torch.device("cuda"), said.append, second) == here
    assert not second.products
    assert said[-1] == here.read_text(encoding="utf-8")


def test_all_known_weights_are_measured_if_none_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "known_shapes", lambda: {(96, 64): False})
    run(TuneSettings(), torch.device("cuda"), lambda line: None, Clock())
    assert list(json.loads(here.read_text(encoding="utf-8"))["plans"]) == ["96x64"]


def test_the_plans_of_another_card_are_not_written_over(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text(json.dumps({"device": "Another", "dtype": "bfloat16", "rows": list(LIMITS), "plans": {}}))
    with pytest.raises(ConfigError, match="another card"):
        run(TuneSettings(SHAPES, out), torch.device("cuda"), lambda line: None, Clock())
    for text in ("{", "[]", "notes"):
        out.write_text(text)
        with pytest.raises(ConfigError, match="output: "):
            run(TuneSettings(SHAPES, out), torch.device("cuda"), lambda line: None, Clock())
        assert out.read_text() == text


def test_a_file_that_cannot_be_read_is_a_warning(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    here.parent.mkdir(parents=True)
    here.write_text("{")
    kernels.use_own_plans(torch.device("cuda"))
    assert "event=plans_not_read" in caplog.text


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="measured on a GPU"):
        run(TuneSettings(SHAPES), torch.device("cpu"), lambda line: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"device.*cuda:1.*1 CUDA devices"):
        run(TuneSettings(SHAPES), torch.device("cuda:1"), lambda line: None)


def test_what_the_card_has_no_units_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tune, "card", lambda device: TYPICAL[8, 6])
    with pytest.raises(ConfigError, match=r"quantization.*NVIDIA A10.*compute capability 8\.9.*int8"):
        run(TuneSettings(SHAPES, quantization="fp8"), torch.device("cuda"), lambda line: None)


@pytest.mark.parametrize(
    ("plan", "quantization", "on", "names"),
    [
        ("gemv 2 256 4", "none", "NVIDIA L4", {"_gemv_kernel"}),
        ("gemv 2 256 4", "int8", "NVIDIA L4", {"_gemv_kernel"}),
        ("tile 64 32 64 1 4 3 4", "none", "NVIDIA L4", {"_tile_kernel", "_reduce_split_k"}),
        ("tile 64 32 64 1 4 3 4 tma", "none", "NVIDIA L4", {"_tile_kernel", "_reduce_split_k"}),
        ("tile 64 32 64 1 4 3 4 tma", "none", "NVIDIA H200", {"_tma_tile_kernel", "_reduce_split_k"}),
        ("tile 64 32 64 1 1 3 4 tma prefetch", "none", "NVIDIA H200", {"_tma_tile_kernel"}),
        ("tile 16 64 64 1 1 3 4 swapped prefetch", "fp8", "NVIDIA L4", {"_tile_kernel"}),
    ],
)
def test_what_a_plan_launches_is_compiled_for_a_card_that_is_not_there(
    plan: str, quantization: str, on: str, names: set[str], tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    product = Product(1 if plan.startswith("gemv") else 16, (64, 256))
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        with compilers(1) as pool:
            pool.submit(tune.compile_plan, product, from_text(plan), card_named(on), quantization).result()
        made = {path.stem: path for path in tmp_path.glob("*/*.ptx") if path.with_suffix(".cubin").exists()}
    assert made.keys() >= names, made
    for name in names:
        is_tma = "cp.async.bulk.tensor" in made[name].read_text(encoding="utf-8")
        assert is_tma == (name == "_tma_tile_kernel")


def test_tiles_by_tma_are_tried_with_many_rows_where_a_card_has_it() -> None:
    for on, rows, itemsize, is_tried in (
        (TYPICAL[9, 0], 64, 2, True),
        (TYPICAL[9, 0], 256, 2, True),
        (TYPICAL[9, 0], 32, 2, False),
        (TYPICAL[9, 0], 64, 1, False),
        (TYPICAL[8, 9], 64, 2, False),
    ):
        clock, product = Clock(), Product(rows, (4096, 1024), itemsize=itemsize)
        shape = tune._Shape([product], on, clock)
        shape.begin()
        shape.measure_first()
        shape.vary()
        tried = [plan for _, plan in clock.compiled if isinstance(plan, TilePlan) and plan.has_tma]
        assert bool(tried) == is_tried


@pytest.mark.parametrize("text", ["4096", "4096x", "0x5", "4096x2048:fast", "axb", "-1x5"])
def test_a_shape_is_two_numbers(text: str) -> None:
    assert parse_shape("12288x2048:gated") == ((12288, 2048), True)
    with pytest.raises(ConfigError):
        parse_shape(text)


@pytest.mark.gpu
def test_what_is_found_from_nothing_is_nearly_as_fast_as_what_is_committed(tmp_path: Path) -> None:
    """On a card with a committed file: within 5% of its plans, by the same clock."""
    device = torch.device("cuda")
    known = plans.measured(plans.card(device))
    if not known:
        pytest.skip("no plans are committed for this card")
    shape = (1024, 2048)
    path = run(TuneSettings(((shape, False),), tmp_path / "plans.json"), device, print)
    found = json.loads(path.read_text(encoding="utf-8"))["plans"]["1024x2048"]
    with compilers(2) as pool:
        bench = Gpu(device, pool)
        for rows, text, committed in zip(COLUMNS, found, known[shape], strict=False):
            product = Product(rows, shape)
            bench.compile(product, [from_text(text), committed])
            assert bench.seconds(product, from_text(text)) < 1.05 * bench.seconds(product, committed), (rows, text)

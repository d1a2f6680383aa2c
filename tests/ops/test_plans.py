"""Plans of products: files of what was measured, and what is computed for cards and sizes that nobody measured."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sonoro.ops
from sonoro.ops import plans
from sonoro.ops.device import TYPICAL, Card
from sonoro.ops.plans import (
    LIMITS,
    W8A8,
    CublasPlan,
    GemvPlan,
    Plan,
    Product,
    TilePlan,
    e4m3_plan,
    estimate_s,
    from_text,
    measured,
    plan_for,
    to_text,
    use_tuned,
)
from sonoro.runtime.kernels import plans_of

H200 = TYPICAL[9, 0]
FISH = {(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)}
MADE_UP = [
    Card("Small", (8, 6), 20, 99 * 1024, 2e11),
    Card("Wide", (9, 0), 78, 227 * 1024, 4e12),
    Card("Thin", (12, 0), 170, 99 * 1024, 1e12),
    Card("Capped", (9, 0), 132, 64 * 1024, 4.8e12),
    Card("Red", (0, 0), 60, 64 * 1024, 6e11, "gfx1100"),
    Card("Old", (7, 5), 40, 64 * 1024, 3e11),
]
SIZES = [(4096, 2048), (1024, 2048), (12288, 2048), (2560, 9728), (96, 40), (6144, 1024), (4097, 2560), (20000, 3000)]


def weight(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> object:
    """Says what card there is."""
    return lambda card: monkeypatch.setattr(plans, "card", lambda device: card)


def terms_of(shape: tuple[int, int]) -> int:
    """E4M3 terms of the rows that meet a weight of `shape`, as its model says."""
    return 2 if shape in FISH else 1


@pytest.mark.parametrize("path", sorted((Path(sonoro.ops.__file__).parent / "tuned").glob("*.json")), ids=str)
def test_a_committed_file_is_named_after_its_card_and_fits_it(path: Path) -> None:
    file = json.loads(path.read_text(encoding="utf-8"))
    card = next(card for card in TYPICAL.values() if card.name == file["device"])
    quantization = file.get("quantization", "none")
    assert path.stem == plans_of(card)[quantization].stem
    for shape, line in measured(card, quantization).items():
        for limit, plan in zip(LIMITS, line, strict=False):
            is_gated, itemsize = f"{shape[0]}x{shape[1]}" in file["gated"], 2 if quantization == "none" else 1
            product = Product(limit, shape, is_gated, itemsize, terms_of(shape) if quantization == W8A8 else 0)
            assert product.fits(plan, card), (shape, plan)
            assert from_text(to_text(plan)) == plan


def test_plans_change_at_the_limits_of_a_file(on) -> None:
    on(H200)
    for shape, row in measured(H200).items():
        # A line may end sooner: what is beyond it is the library's.
        line = (*row, *[CublasPlan()] * (len(LIMITS) - len(row)))
        for limit, plan, beyond in zip(LIMITS, line, (*line[1:], CublasPlan()), strict=True):
            assert plan_for(limit, weight(shape), False) == plan
            assert plan_for(limit + 1, weight(shape), False) == beyond


def test_a_card_that_is_as_fast_has_the_plans_of_its_like() -> None:
    assert measured(Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * 1024, 3.3e12)) == measured(H200)
    assert not measured(Card("NVIDIA H20", (9, 0), 78, 227 * 1024, 4e12))


@pytest.mark.parametrize("card", [*MADE_UP, *TYPICAL.values()], ids=lambda card: card.name)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_computed_plan_fits_its_card(card: Card, is_gated: bool, on) -> None:
    on(card)
    for shape in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn):
            for column, limit in enumerate(LIMITS):
                plan = plan_for(limit, weight(shape, dtype), is_gated)
                assert Product(limit, shape, is_gated, dtype.itemsize).fits(plan, card)
                assert not isinstance(plan, GemvPlan) or limit <= 2
                if isinstance(plan, TilePlan):
                    # Products in float32 are the library's, which knows what precision was asked for.
                    assert dtype != torch.float32
                    assert card.capability >= (8, 0) or card.gfx
                    assert plan.warps % plan.slice_k == 0
                    assert plan.block_m >= min(limit, 64), (column, plan)
            assert isinstance(plan_for(LIMITS[-1] + 1, weight(shape, dtype), is_gated), CublasPlan)


def test_few_rows_of_a_small_weight_keep_every_multiprocessor_busy(on) -> None:
    for card in MADE_UP[:3]:
        on(card)
        for rows in (3, 16, 32, 64):
            plan = plan_for(rows, weight((2048, 2048)), False)
            assert isinstance(plan, TilePlan), (card.name, rows)
            assert Product(rows, (2048, 2048)).programs(plan) >= min(card.multiprocessors, 64)


def test_a_card_with_less_of_everything_is_estimated_to_take_longer() -> None:
    product, plan = Product(16, (4096, 2048)), TilePlan(16, 16, 64, 1, 1, 3, 4, False)
    small, large = MADE_UP[0], H200
    for choice in (plan, GemvPlan(2, 2048, 4), CublasPlan()):
        assert estimate_s(choice, product, small) > estimate_s(choice, product, large)


def test_a_measured_plan_is_made_smaller_where_shared_memory_is_capped(on) -> None:
    for limit in (101_376, 65_536):
        card = Card(H200.name, H200.capability, H200.multiprocessors, limit, H200.bandwidth)
        on(card)
        for shape in measured(H200):
            for rows in LIMITS:
                assert Product(rows, shape).fits(plan_for(rows, weight(shape), False), card)


def test_rows_are_rounded_where_that_was_measured_alone(on) -> None:
    """Of fp8 weights on that card, at the row counts of its file: all four products of a layer of the 1.7B's backbone
    and of Fish's."""
    columns = {shape: [isinstance(plan, TilePlan) for plan in line] for shape, line in measured(H200, W8A8).items()}
    assert columns.keys() == {(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)} | FISH
    for card in (H200, *MADE_UP):
        on(card)
        for shape in columns:
            for rows in (*LIMITS, 33, 2000):
                is_known = card == H200 and rows <= LIMITS[len(columns[shape]) - 1]
                is_rounded = is_known and columns[shape][sum(limit < rows for limit in LIMITS)]
                plan = e4m3_plan(rows, weight(shape, torch.float8_e4m3fn), False, terms_of(shape))
                assert (plan is not None) == is_rounded, (card.name, shape, rows)
                assert e4m3_plan(rows, weight(shape, torch.int8), False, 1) is None


def test_a_plan_of_rounded_rows_is_made_smaller_where_shared_memory_is_capped(on) -> None:
    for limit in (101_376, 65_536):
        card = Card(H200.name, H200.capability, H200.multiprocessors, limit, H200.bandwidth)
        on(card)
        for shape in measured(H200, W8A8):
            for is_gated in (False, True):
                plan = e4m3_plan(64, weight(shape, torch.float8_e4m3fn), is_gated, terms_of(shape))
                assert plan is None or Product(64, shape, is_gated, 1, terms_of(shape)).fits(plan, card)


def test_on_no_gpu_there_are_vectors_and_the_library(on) -> None:
    on(Card())
    for inputs in (16, 1000, 5120, 40000):
        for batch in (1, 2, 3, 64, 500):
            plan = plan_for(batch, weight((96, inputs), torch.float32), True)
            assert isinstance(plan, GemvPlan | CublasPlan)
            if isinstance(plan, GemvPlan):
                # Weights in registers: a thread has 255 of four bytes, for its sums too.
                assert 2 * plan.rows * inputs * 4 <= 512 * 32 * plan.warps


def tuned_file(**changed: object) -> str:
    file = {"device": "Small", "dtype": "bfloat16", "rows": list(LIMITS), "plans": {"96x40": ["gemv 2 64 1", "cublas"]}}
    return json.dumps(file | changed)


def test_a_users_file_is_used_over_what_is_computed(on, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_read", lambda known={}: known)
    on(MADE_UP[0])
    assert plan_for(1, weight((96, 40)), False) != GemvPlan(2, 64, 1)
    assert use_tuned(tuned_file()) == "Small"
    assert plan_for(1, weight((96, 40)), False) == GemvPlan(2, 64, 1)
    assert plan_for(2, weight((96, 40)), False) == CublasPlan()
    on(MADE_UP[1])
    assert plan_for(1, weight((96, 40)), False) != GemvPlan(2, 64, 1)
    plans._plan_for.cache_clear()


def test_a_users_file_of_some_shapes_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {key: dict(value) for key, value in plans._read().items()}
    monkeypatch.setattr(plans, "_read", lambda: known)
    alike = Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * 1024, 3.3e12)
    before = dict(measured(alike))
    use_tuned(tuned_file(device=alike.name))
    assert measured(alike) == before | {(96, 40): (GemvPlan(2, 64, 1), CublasPlan())}
    assert measured(H200) == before
    plans._plan_for.cache_clear()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", tuned_file(rows=[1]), tuned_file(dtype="float32"), tuned_file(plans={"96": ["cublas"]})]
    + [tuned_file(plans={"96x40": [plan]}) for plan in ("tile 16", "tile 16 tma", "gemv a b c", "", "magic")],
)
def test_what_is_no_file_of_plans_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (which of many it is, does not matter)
        use_tuned(text)


@pytest.mark.parametrize(
    "plan",
    [
        GemvPlan(4, 512, 2),
        TilePlan(16, 8, 64, 4, 1, 3, 4, True),
        TilePlan(16, 64, 128, 1, 1, 4, 4, False, is_swapped=True),
        TilePlan(16, 64, 128, 1, 1, 4, 4, True, is_swapped=True),
        TilePlan(128, 64, 64, 1, 2, 4, 8, False, has_tma=True),
        TilePlan(128, 64, 64, 1, 1, 4, 8, True, has_tma=True),
        CublasPlan(),
    ],
)
def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    assert from_text(to_text(plan)) == plan

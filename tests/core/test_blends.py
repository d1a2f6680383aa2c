"""Names of blended voices: the syntaxes of other servers, and one name for each blend."""

import pytest

from sonoro.core.blends import find_voice, read_blend

VOICES = ("nora", "miles", "edith", "hugh")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("nora(2)+edith", {"edith": 1 / 3, "nora": 2 / 3}),
        ("nora(2)+edith(1)", {"edith": 1 / 3, "nora": 2 / 3}),
        (".7*nora+.3*edith", {"edith": 0.3, "nora": 0.7}),
        ("0.7 * Nora + 0.3 * edith", {"edith": 0.3, "nora": 0.7}),
        ("nora*0.6+edith*0.4", {"edith": 0.4, "nora": 0.6}),
        ("nora+edith", {"edith": 0.5, "nora": 0.5}),
        ("nora+nora", {"nora": 1.0}),
    ],
)
def test_blends_are_read(name: str, weights: dict[str, float]) -> None:
    assert read_blend(name) == pytest.approx(weights)
    assert [*(read_blend(name) or {})] == sorted(weights)


@pytest.mark.parametrize(
    "name", ["nora", "nora-edith", "nora(0)+edith", "2*nora*2+edith", "nora+", "+", "a+b+c+d+e+f", "nora(x)+edith", ""]
)
def test_what_is_no_blend_is_none(name: str) -> None:
    assert read_blend(name) is None


def test_a_blend_has_one_name() -> None:
    aliases = {"alloy": "nora", "nora2": "nora"}

    def found(name: str) -> str | None:
        return find_voice(name, VOICES, aliases, can_blend=True)

    assert found("nora(3)+edith(1)") == found(".25*edith + .75*alloy") == "0.25*edith+0.75*nora"
    assert found(found("nora+edith+hugh") or "") == found("hugh+edith+nora")
    assert found("2*nora") == found("nora+alloy") == found("nora+nora2") == "nora"
    assert found("nora+nobody") is None
    assert find_voice("nora+edith", VOICES, aliases, can_blend=False) is None

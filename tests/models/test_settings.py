"""Settings of a model: every family's control tokens, and what is refused."""

import dataclasses
import re
from pathlib import Path

import pytest
from families import FAMILIES, TinyFamily
from families import tiny as tiny  # noqa: PLC0414 (a fixture)
from sine_engines import Engine
from sine_models import SineModel

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.models.settings import Configurable, configure


def test_every_family_says_what_can_be_set(tiny: TinyFamily) -> None:
    model = tiny.load().model
    assert isinstance(model, Configurable)
    for one in model.settings:
        assert one.check(one.default) == one.default
        assert one.help


def test_a_setting_that_is_unknown_or_out_of_bounds_is_refused(tiny: TinyFamily) -> None:
    model = tiny.load().model
    with pytest.raises(
        ConfigError, match=r"model_settings\.reads_control_token: .*did you mean reads_control_tokens\?"
    ):
        configure(model, {"reads_control_token": True})
    with pytest.raises(ConfigError, match=r"model_settings\.reads_control_tokens: .*it must be"):
        configure(model, {"reads_control_tokens": "yes"})
    configure(model, {})


def test_an_engine_sets_them(tiny: TinyFamily) -> None:
    with pytest.raises(ConfigError, match=r"model_settings\.nothing"):
        Engine(tiny.load().model, EngineConfig(model_settings={"nothing": 1}))


def test_a_model_may_have_none() -> None:
    configure(SineModel(), {})
    with pytest.raises(ConfigError, match="settings of this model: none"):
        configure(SineModel(), {"strength": 3})


def test_the_page_of_differences_names_all_settings_and_none_that_is_not() -> None:
    page = (Path(__file__).parents[2] / "docs" / "differences.md").read_text(encoding="utf-8")
    settings = {one.name for family in FAMILIES.values() for one in family.load().model.settings}
    named = set(re.findall(r"([a-z_]+): \w", " ".join(re.findall(r"`[^`]+`", page))))
    assert settings <= named
    assert named <= settings | {field.name for field in dataclasses.fields(EngineConfig)} | {"attempts"}

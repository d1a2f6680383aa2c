"""The choice of heads that point at the text, without labels: the built-in voice's, and none of random weights."""

from pathlib import Path

import pytest
from families import TinyFamily, tiny
from sine_engines import Engine
from sine_models import SineModel

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.core.types import Finished, SpeechRequest
from sonoro.engine.word_heads import calibrate
from sonoro.models import registry
from sonoro.models.words import ShowsWords
from sonoro.words.calibration import TEXTS
from sonoro.words.heads import FILE, WordHeads, read_heads, write_heads

__all__ = ["tiny"]


def test_of_the_built_in_voice_it_chooses_the_heads_of_its_table() -> None:
    model = registry.load(None, device="cpu").model
    assert isinstance(model, ShowsWords)
    known = model.word_heads
    found = calibrate(model, texts=TEXTS[:3])
    for layout, shift in (("text_first", 0.5), ("text_along", 0.5)):
        chosen, labelled = getattr(found.heads, layout), getattr(known, layout)
        assert (chosen.layer, chosen.head) == (labelled.layer, labelled.head)
        assert chosen.shift == pytest.approx(labelled.shift, abs=shift)
        assert not chosen.is_measured
        # Those that pass are far from those that do not.
        judged = found.judged[layout]
        assert min(one.mass for one in judged if one.points) > 0.3
        assert max((one.mass for one in judged if not one.points and one.deviation_s < 0.25), default=0.0) < 0.12


def test_of_random_weights_it_chooses_none_and_words_have_no_times(tiny: TinyFamily, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    model = registry.load(tmp_path, device="cpu").model
    found = calibrate(model, texts=TEXTS[:3])
    assert set(found.judged) == set(model.text_layouts)
    assert found.heads == WordHeads()
    engine = Engine(model, EngineConfig(slots=2, max_positions=1024, max_frames=64))
    engine.submit(SpeechRequest(id="a", text="Hello.", with_words=True, max_frames=8))
    made = []
    while engine.has_work:
        made += engine.tick()
    assert [event.words for event in made if isinstance(event, Finished)] == [None]


def test_a_model_that_shows_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot show"):
        calibrate(SineModel())


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    heads = read_heads(registry.locate(None) or tmp_path)
    write_heads(tmp_path / FILE, heads)
    assert read_heads(tmp_path) == heads
    assert heads.is_measured

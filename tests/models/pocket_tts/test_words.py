"""Which word is being spoken: the published heads, and texts that are read as English before the official rules."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_pocket
import torch
from parity import begin, capacity
from sine_engines import Engine, drain
from tiny_pocket_lm import controls, model_of
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, InvalidRequest
from sonoro.core.types import SpeechRequest
from sonoro.models import registry
from sonoro.models.pocket_tts.config import RELEASED, read
from sonoro.models.pocket_tts.model import PocketTTS
from sonoro.models.settings import configure
from sonoro.nn.transformer import causal_attention
from sonoro.text.splitting import placed
from sonoro.words.heads import FILE, WordHeads, write_heads
from sonoro.words.request import RequestWords
from sonoro.words.spans import spoken_words, word_spans
from sonoro.words.tracking import Pointing

WRITTEN = "It cost $3.50 on May 3rd."
HEADS = Pointing(layer=1, head=2, beside=((0, 3), (1, 0)))
"""Of the tiny model: two in one layer, and not in order."""

GERMAN = WordHeads(text_first=Pointing(layer=3, head=14, beside=((3, 9), (3, 10))))
FIRST = Pointing(layer=1, head=2)


def tiny(pointing: Pointing | None = None, **changes: object) -> PocketTTS:
    """The tiny model with another configuration, for which the heads of `pointing` are published."""
    model, heads = model_of(), WordHeads(text_first=pointing)
    config = msgspec.structs.replace(model._config, voices={"alba": None}, word_heads=heads, **changes)
    return PocketTTS("tiny", config, model._modules, model._prompts.rules.tokenizer)


def test_releases_have_the_published_heads() -> None:
    configs = {name.removeprefix("pocket-"): read(name) for name in RELEASED}
    for config in configs.values():
        sizes = config.backbone
        assert all(layer < sizes.layers and head < sizes.heads for layer, head in config.word_heads.places)
    # Nobody has measured those of the newest weights.
    assert {name for name, config in configs.items() if not config.word_heads.places} == {"english", "english_2026-10"}
    assert configs["german"].word_heads == GERMAN
    assert configs["english_drifting_26-09"].word_heads == WordHeads(text_first=Pointing(layer=2, head=15))


def test_a_folder_with_a_configuration_of_its_own_has_none_of_a_release(tmp_path: Path) -> None:
    tiny_pocket.write_checkpoint(tmp_path / "german")
    assert read(tmp_path / "german").word_heads == WordHeads()
    (tmp_path / "german" / "config.yaml").unlink()
    assert read(tmp_path / "german").word_heads == GERMAN


def test_watched_heads_show_their_softmax_over_the_text() -> None:
    """After the whole attention of the layers, by torch alone."""
    model = tiny(HEADS)
    lm, frames = model._modules.lm, 4
    assert model.word_heads.places == tuple(sorted(HEADS.places))
    with torch.inference_mode():
        prompt = model._prompts.build("Hello you.", controls(ignore_eos=True), model._own_voice("alba"))
        state = model.allocate(capacity(slots=1, positions=160, frames=12, text=1))
        begin(model, state, [prompt], [0])
        looked = []
        for _ in range(frames):
            model.frame(state, torch.tensor([0]))
            looked.append(model.attention(state)[0, :, : prompt.text_count].clone())
        latents = (state.frames[0, : frames - 1, 0] - lm.emb_mean) / lm.emb_std
        rows = torch.cat((lm.embed(torch.from_numpy(prompt.rows[prompt.stored :, 0])), lm.embed_latents(latents)))
        whole = whole_attention(lm, prompt.state, rows)
    text = slice(prompt.text_start, prompt.text_start + prompt.text_count)
    shares = torch.stack([whole[layer][head, -frames:, text] for layer, head in model.word_heads.places], dim=1)
    torch.testing.assert_close(torch.stack(looked), shares / shares.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)


def whole_attention(lm: object, voice: object, rows: Tensor) -> list[Tensor]:
    """Of each layer, the attention [heads, T, P + T] of `rows` [T, H] after the keys and values of a `voice`."""
    found, sizes = list[Tensor](), lm.config.backbone

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (torch.cat((past[layer][None], new), dim=1) for past, new in
                        ((voice.keys, keys), (voice.values, values)))  # fmt: skip
        spread = keys[0].repeat_interleave(sizes.heads // sizes.kv_heads, dim=1)
        scores = torch.einsum("thd,phd->htp", queries[0], spread) / sizes.head_width**0.5
        past = keys.shape[1] - queries.shape[1]
        found.append(scores.masked_fill(torch.ones_like(scores).triu(past + 1).bool(), -torch.inf).softmax(-1))
        padded = torch.cat((queries.new_zeros(1, past, *queries.shape[2:]), queries), dim=1)
        return causal_attention(layer, padded, keys, values)[:, past:]

    positions = torch.arange(voice.positions, voice.positions + len(rows))
    lm.transformer(rows[None], sizes.rotary(positions, rows.dtype), attend)
    return found


def test_the_weights_of_all_heads_are_averaged() -> None:
    model, text = tiny(HEADS), "one two three four"
    tokens, generator = len(model.token_spans(text)), np.random.default_rng(0)
    looked = generator.random((4 * tokens, 3, tokens)).astype(np.float32)
    for row, by_head in enumerate(looked):
        by_head[:, row // 4] += generator.integers(0, 9, 3)
    looked /= looked.sum(-1, keepdims=True)
    order = [model.word_heads.places.index(place) for place in HEADS.places]
    mean = looked[:, order].mean(axis=1, keepdims=True)
    assert timed(model, text, looked) == timed(tiny(FIRST), text, mean)
    assert timed(model, text, looked) != timed(tiny(FIRST), text, looked[:, order[:1]])


def timed(model: PocketTTS, text: str, looked: np.ndarray) -> list[tuple[int, float, float]]:
    """When each word of `text` is spoken, by the attention `looked` [frames, heads, tokens] at full loudness."""
    words = RequestWords(model, model.spec, text)
    words.begin(placed(model.segments(text, "auto"), 0, len(text))[0], model.word_heads.text_first, 0.0)
    for number, attention in enumerate(looked):
        words.add_attention(np.pad(attention, ((0, 0), (0, 8))), number + 1)
        words.add_audio(np.full(tiny_pocket.HOP, 9000, "<i2").tobytes())
    words.end()
    assert [word.text for word in words.timed] == text.split()
    assert all(word.is_estimated for word in words.timed)
    return [(word.start, word.start_s, word.end_s) for word in words.timed]


def test_a_table_beside_the_weights_replaces_the_published_heads(tmp_path: Path) -> None:
    heads = WordHeads(text_first=Pointing(layer=1, head=3, beside=((0, 1),), shift=0.5))
    tiny_pocket.write_checkpoint(tmp_path)
    write_heads(tmp_path / FILE, heads)
    engine = Engine(
        registry.load(tmp_path, device="cpu").model, EngineConfig(slots=1, max_positions=512, max_frames=32)
    )
    engine.submit(SpeechRequest(id="a", text="Hello you.", with_words=True, max_frames=12, ignore_eos=True))
    words = [word for event in drain(engine) for word in getattr(event, "words", None) or ()]
    assert [word.text for word in words] == ["Hello", "you"]


def test_a_text_is_read_as_english_where_that_is_set_and_its_words_are_those_as_written() -> None:
    model = model_of()
    [plain] = model.segments(WRITTEN, "auto")
    assert plain.text == WRITTEN
    with pytest.raises(InvalidRequest, match="reads a text as it stands"):
        model.spec.resolve(SpeechRequest(id="1", text=WRITTEN, text_format="plain"))
    configure(model, {"reads_english": True})
    [segment] = model.segments(WRITTEN, "auto")
    assert segment.text == "It cost three dollars and fifty cents on May third."
    found = spoken_words(word_spans(WRITTEN), segment.text, segment.origins, model.token_spans(segment.text))
    assert [WRITTEN[word.start : word.end] for word in found] == ["It", "cost", "$3.50", "on", "May", "3rd"]
    money = found[2]
    spans = model.token_spans(segment.text)[int(money.first) : int(money.last)]
    assert segment.text[spans[0][0] : spans[-1][1]].strip() == "three dollars and fifty cents"
    assert model.spec.resolve(SpeechRequest(id="1", text="**So**", text_format="markdown"))


def test_other_languages_are_not_read_as_english() -> None:
    with pytest.raises(ConfigError, match=r"model_settings\.reads_english"):
        configure(tiny(language="german"), {"reads_english": True})

"""The rows and losses the talker is trained on, beside what the engine feeds and computes with the shipped voice."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from parity import capacity
from tiny_talker import begin_talker
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import sonoro
from builtin_voice.forwards import predictor_logits, talker_forward
from builtin_voice.settings import Noise, TalkerTraining
from builtin_voice.talker_training import (
    IGNORED,
    NO_NOISE,
    WIDTHS,
    Batch,
    Forwards,
    Layout,
    Plan,
    Rows,
    Utterances,
    assemble,
    batches,
    corrupt,
    losses,
    train_talker,
)
from builtin_voice.training import Course, Run, Unfinished, steps_of
from sonoro.api import speech_request
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.config import Configs, read_configs
from sonoro.models.qwen3_tts.frame import frame
from sonoro.models.qwen3_tts.model import Qwen3TTS
from sonoro.models.qwen3_tts.prompt import TalkerPrompt, TextTokenizer
from sonoro.models.qwen3_tts.state import allocate

FOLDER = Path(sonoro.__file__).parent / "builtin_voice"
TEXTS = ["go.", "the birch canoe slid on the smooth planks.", "a quiet street, and an old lamp."]
SPEAKERS = ["miles", "nora", "nora"]
CASES = list(itertools.product((True, False), ("auto", "english")))


class Shipped(NamedTuple):
    """The shipped voice, its talker in float64: so a greedy code does not hang on rounding."""

    configs: Configs
    tokenizer: TextTokenizer
    model: Qwen3TTS
    talker: Talker
    layout: Layout

    @property
    def pad_id(self) -> int:
        return self.configs.model.tts_pad_token_id

    @property
    def end_id(self) -> int:
        return self.configs.model.talker_config.codec_eos_token_id

    @property
    def size(self) -> int:
        return self.configs.model.talker_config.code_predictor_config.vocab_size


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    configs, tokenizer = read_configs(FOLDER), TextTokenizer.from_folder(FOLDER)
    modules = weights.FILES.load(FOLDER, configs, device=torch.device("cpu"), dtype=torch.float64)
    model = Qwen3TTS("builtin", configs, modules, tokenizer)
    return Shipped(configs, tokenizer, model, modules.lm.talker, Layout(configs.model, tokenizer.encode("\n")[0]))


def prompts(shipped: Shipped, *, is_streaming: bool, language: str) -> list[TalkerPrompt]:
    """What the engine prepares for TEXTS, greedy in every codebook."""
    made = []
    for text, speaker in zip(TEXTS, SPEAKERS, strict=True):
        request = speech_request(
            text, speaker, language=language, max_frames=40, temperature=0, top_k=0, top_p=1.0,
            repetition_penalty=1.0, non_streaming_mode=not is_streaming, subtalker_dosample=False,
            subtalker_temperature=1.0, subtalker_top_k=0, subtalker_top_p=1.0,
        )  # fmt: skip
        made.append(shipped.model.prepare(request, text, 0, [], None))
    return made


def utterances(shipped: Shipped, codes: list[Tensor]) -> Utterances:
    texts = [torch.tensor(shipped.tokenizer.encode(text)) for text in TEXTS]
    return Utterances(
        text=pad_sequence(texts, batch_first=True),
        text_lengths=torch.tensor([len(row) for row in texts]),
        codes=pad_sequence(codes, batch_first=True),
        frame_lengths=torch.tensor([len(row) for row in codes]),
        speaker=torch.tensor([shipped.configs.model.talker_config.spk_id[speaker] for speaker in SPEAKERS]),
    )


def each(is_streaming: bool, language: str) -> dict[str, Tensor]:
    """That layout and language for all of TEXTS."""
    number = ["auto", "english"].index(language)
    return {"is_streaming": torch.full((3,), is_streaming), "language": torch.full((3,), number)}


def random_codes(shipped: Shipped, *frames: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    books = shipped.talker.codebooks
    return [torch.randint(shipped.size, (count, books), generator=generator) for count in frames]


@pytest.mark.parametrize(("is_streaming", "language"), CASES)
@pytest.mark.parametrize("frames", [(1, 1, 1), (7, 30, 18), (40, 3, 9)])
def test_rows_are_those_the_engine_feeds(
    shipped: Shipped,
    frames: tuple[int, ...],
    is_streaming: bool,
    language: str,
) -> None:
    codes = random_codes(shipped, *frames)
    rows = assemble(utterances(shipped, codes), shipped.layout, **each(is_streaming, language))
    for row, prompt in enumerate(prompts(shipped, is_streaming=is_streaming, language=language)):
        start, count = prompt.positions, frames[row]
        # The row that carries frame t has text id t of the trail beside it, and the pad id once that has ended.
        fed = torch.cat((prompt.trail, torch.full((count,), shipped.pad_id)))[:count]
        assert torch.equal(rows.text_rows[row, : start + count], torch.cat((prompt.text_rows, fed)))
        assert torch.equal(rows.code_rows[row, : start + count], torch.cat((prompt.code_rows, codes[row])))
        targets = torch.full_like(rows.targets[row], IGNORED)
        targets[start - 1 : start - 1 + count] = codes[row][:, 0]
        targets[start - 1 + count] = shipped.end_id
        assert torch.equal(rows.targets[row], targets)
        decided = torch.full_like(rows.frame[row], -1)
        decided[start - 1 : start - 1 + count] = torch.arange(count)
        assert torch.equal(rows.frame[row], decided)


def speak(shipped: Shipped, prompt: TalkerPrompt, frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy codes [T, K] the engine makes, with its logits [T, V] of codebook 0 and [T, K-1, V] of the others."""
    prompt = replace(prompt, controls=replace(prompt.controls, max_frames=frames))
    talker = shipped.talker
    with torch.inference_mode():
        state = allocate(talker, capacity(slots=1, positions=128, frames=frames, text=64), shipped.pad_id)
        begin_talker(talker, state, [prompt], torch.tensor([0]))
        steps: list[list[Tensor]] = []
        while not state.done[0]:
            steps.append([])
            frame(talker, state, torch.tensor([0]), steps[-1])
        made = state.frames[0, : int(state.length[0])].clone()
    steps = steps[: len(made)]
    first, rest = (
        torch.stack([step[0][0] for step in steps]),
        torch.stack([torch.cat(step[1:]) for step in steps]),
    )
    return made.clone(), first.clone(), rest.clone()


@pytest.mark.parametrize(("is_streaming", "language"), CASES)
def test_training_forward_gives_the_engines_logits_and_loss(
    shipped: Shipped,
    is_streaming: bool,
    language: str,
) -> None:
    spoken = [
        speak(shipped, prompt, limit)
        for prompt, limit in zip(
            prompts(shipped, is_streaming=is_streaming, language=language), (5, 12, 9), strict=True
        )
    ]
    codes = [made for made, _, _ in spoken]
    assert all(len(made) >= 2 for made in codes)
    batch = utterances(shipped, codes)
    rows = assemble(batch, shipped.layout, **each(is_streaming, language))
    assert torch.is_grad_enabled(), "training takes the path without derived tables"
    output = talker_forward(shipped.talker, shipped.talker.embed_rows(rows.text_rows, rows.code_rows))
    for row, (made, first, rest) in enumerate(spoken):
        decided = rows.frame[row] >= 0
        # Float64, other order of sums.
        torch.testing.assert_close(output.logits[row, decided], first, atol=1e-9, rtol=0)
        found = predictor_logits(shipped.talker, output.hidden[row, decided], made)
        torch.testing.assert_close(found, rest, atol=1e-9, rtol=0)
    forwards = Forwards.of(shipped.talker, is_compiled=False)
    first_loss, rest_loss = losses(forwards, rows, batch.codes, NO_NOISE, shipped.size)
    ends = torch.stack(
        [logits[targets != IGNORED][-1] for logits, targets in zip(output[1], rows.targets, strict=True)]
    )
    wanted = torch.cat([*(made[:, 0] for made in codes), torch.full((len(codes),), shipped.end_id)])
    expected = F.cross_entropy(torch.cat([*(first for _, first, _ in spoken), ends]), wanted)
    # The loss is taken in float32.
    torch.testing.assert_close(first_loss.double(), expected, atol=1e-5, rtol=0)
    others = torch.cat([rest for _, _, rest in spoken]).flatten(0, 1)
    expected = F.cross_entropy(others, torch.cat([made[:, 1:] for made in codes]).flatten())
    torch.testing.assert_close(rest_loss.double(), expected, atol=1e-5, rtol=0)


def heard(rows: Rows, codes: Tensor, noise: Noise, size: int, kept: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Code rows the talker is given under `noise`, codes the predictor is given, and codes it is asked for."""
    seen: list[Tensor] = []

    def first(text_rows: Tensor, code_rows: Tensor, targets: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
        assert torch.equal(text_rows, rows.text_rows)
        assert torch.equal(targets, rows.targets)
        seen.append(code_rows)
        return torch.zeros(*text_rows.shape, 1), torch.zeros(())

    def rest(hidden: Tensor, given: Tensor, frames: Tensor, dropout: float) -> Tensor:
        seen.extend((given, frames))
        return torch.zeros(())

    losses(Forwards(first, rest), rows, codes, noise, size, kept=kept)
    code_rows, given, frames = seen
    return code_rows, given, frames


@pytest.mark.parametrize("is_streaming", [True, False])
def test_noise_spoils_the_frames_fed_back_and_nothing_else(shipped: Shipped, is_streaming: bool) -> None:
    codes = random_codes(shipped, 7, 30, 18)
    batch = utterances(shipped, codes)
    rows = assemble(batch, shipped.layout, **each(is_streaming, "auto"))
    torch.manual_seed(0)
    column = torch.arange(rows.frame.shape[1])
    fed_back = torch.stack(
        [
            (column > int((decided == 0).nonzero())) & (column <= int((decided == 0).nonzero()) + len(made))
            for decided, made in zip(rows.frame, codes, strict=True)
        ]
    )
    true_frames = torch.cat(codes)

    blank, given, asked = heard(rows, batch.codes, Noise(codes=0.0, frames=1.0, dropout=0.0), shipped.size)
    assert (blank[fed_back] == -1).all()
    assert torch.equal(blank[~fed_back], rows.code_rows[~fed_back])
    assert torch.equal(given, true_frames)
    assert torch.equal(asked, true_frames)

    wrong, given, asked = heard(rows, batch.codes, Noise(codes=1.0, frames=0.0, dropout=0.0), shipped.size)
    assert torch.equal(wrong[~fed_back], rows.code_rows[~fed_back])
    assert torch.equal(asked, true_frames)
    for drawn, true in ((wrong[fed_back], rows.code_rows[fed_back]), (given, true_frames)):
        assert ((drawn >= 0) & (drawn < shipped.size)).all()
        assert (drawn != true).float().mean() > 0.9

    clean, given, asked = heard(rows, batch.codes, NO_NOISE, shipped.size, kept=20)
    assert torch.equal(clean, rows.code_rows)
    assert torch.equal(given, asked)
    assert len(asked.unique(dim=0)) == 20
    assert all((true_frames == row).all(-1).any() for row in asked)


def test_frames_beyond_those_there_are_have_no_target(shipped: Shipped) -> None:
    codes = random_codes(shipped, 7, 30, 18)
    batch = utterances(shipped, codes)
    rows = assemble(batch, shipped.layout, **each(False, "english"))
    _, _, asked = heard(rows, batch.codes, NO_NOISE, shipped.size, kept=60)
    is_asked = asked[:, 0] != IGNORED
    assert (is_asked.sum(), len(asked)) == (55, 60)
    assert (asked[~is_asked] == IGNORED).all()


def test_layouts_and_languages_of_a_batch_are_mixed(shipped: Shipped) -> None:
    """Each utterance as in a batch of its kind alone, whatever the width."""
    batch = utterances(shipped, random_codes(shipped, 7, 30, 18))
    kinds = [(True, "auto"), (False, "english"), (False, "auto")]
    streaming, language = torch.tensor([True, False, False]), torch.tensor([0, 1, 0])
    mixed = assemble(batch, shipped.layout, is_streaming=streaming, language=language, width=88)
    for row, kind in enumerate(kinds):
        alone = assemble(batch, shipped.layout, **each(*kind))
        needed = int((alone.targets[row] != IGNORED).nonzero().max()) + 1
        for wide, narrow in zip(vars(mixed).values(), vars(alone).values(), strict=True):
            assert torch.equal(wide[row, :needed], narrow[row, :needed])
        assert (mixed.targets[row, needed:] == IGNORED).all()


def test_corrupt_draws_a_share_and_leaves_what_is_nothing() -> None:
    torch.manual_seed(0)
    codes = torch.full((100, 100), 999)
    codes[::2] = -1
    assert torch.equal(corrupt(codes, 0.0, 8), codes)
    changed = corrupt(codes, 0.25, 8)
    assert torch.equal(changed[::2], codes[::2])
    drawn = changed[1::2][changed[1::2] != 999]
    assert drawn.min() == 0
    assert drawn.max() == 7
    assert abs(len(drawn) / 5000 - 0.25) < 0.03


def test_batches_hold_every_utterance_and_each_width_has_one_size() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(10, 200, (700,), generator=generator)
    lengths[5], lengths[7] = WIDTHS[-1] + 1, WIDTHS[-1]
    found = batches(lengths, 1000, torch.Generator().manual_seed(1))
    assert set(torch.cat([picks for picks, _ in found]).tolist()) == set(range(700)) - {5}
    for picks, width in found:
        assert len(picks) == max(1, 1000 // width)
        assert (lengths[picks] <= width).all()
        assert (lengths[picks] > max((other for other in WIDTHS if other < width), default=0)).all()
    filled = sum(len(picks) for picks, _ in found) - 699
    assert filled < sum(max(1, 1000 // width) for width in {width for _, width in found})
    assert is_same(found, batches(lengths, 1000, torch.Generator().manual_seed(1)))
    assert not is_same(found, batches(lengths, 1000, torch.Generator().manual_seed(2)))


def is_same(found: list[Batch], other: list[Batch]) -> bool:
    return [(picks.tolist(), width) for picks, width in found] == [(picks.tolist(), width) for picks, width in other]


def test_a_plan_gives_every_step_its_batch_wherever_it_begins() -> None:
    lengths = torch.randint(10, 120, (300,), generator=torch.Generator().manual_seed(3))
    training = TalkerTraining(positions=1000, seed=7)
    plan, count = Plan(lengths, training), len(batches(lengths, 1000, torch.Generator()))
    steps = [plan.batch(step) for step in range(100)]
    assert 10 < count < 50
    first = torch.cat([picks for picks, _ in steps[:count]])
    assert set(first.tolist()) == set(range(300)), "all of them, before the next round"
    assert not is_same(steps[:count], steps[count : 2 * count])
    later = Plan(lengths, training)
    assert is_same([later.batch(step) for step in range(61, 100)], steps[61:])


def test_training_learns_and_averages(shipped: Shipped, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "text_hidden_size": 16}
    predictor = replace(
        shipped.configs.model.talker_config.code_predictor_config, num_hidden_layers=1, intermediate_size=64
    )
    config = replace(shipped.configs.model.talker_config, **small, code_predictor_config=predictor)
    torch.manual_seed(0)
    talker = Talker(config)
    batch = utterances(shipped, random_codes(shipped, 7, 30, 18))
    figures: list[dict[str, float]] = []
    training = TalkerTraining(steps=60, positions=400, learning_rate=3e-3, warmup_steps=5, noise=NO_NOISE)
    small_layout = Layout(replace(shipped.configs.model, talker_config=config), shipped.layout.newline_id)
    run = Run(float("inf"), figures.append, tmp_path / "state.pt")
    trained = train_talker(talker, batch, batch, small_layout, training=training, run=run)
    assert figures[-1]["step"] == 59
    assert figures[-1]["first"] < 0.5 * figures[0]["first"]
    assert figures[-1]["held_out_first"] < figures[0]["held_out_first"]
    rows = assemble(batch, small_layout, **each(False, "auto"))
    with torch.no_grad():
        first, _ = losses(Forwards.of(trained, is_compiled=False), rows, batch.codes, NO_NOISE, predictor.vocab_size)
    assert first.item() == pytest.approx(figures[-1]["held_out_first"], rel=1e-5)


def test_steps_go_on_where_the_time_was_up_and_rates_rise_and_fall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    course, part = Course(steps=300, learning_rate=2.0, warmup_steps=10, seed=5), torch.nn.Linear(1, 1)
    made, draws = [], []

    def run(deadline_s: float) -> None:
        nonlocal now
        now = 0.0
        for step in steps_of(course, Run(deadline_s, print, tmp_path / "state.pt"), {"part": part}):
            assert step.number in (0, part.weight.item() + 1)
            now += 1
            made.append(step)
            draws.append(torch.rand(()).item())
            part.weight.data.fill_(step.number)

    for count in (101, 202):
        with pytest.raises(Unfinished, match=f"{count} of 300"):
            run(100.0)
        part.weight.data.zero_()
    run(float("inf"))
    assert [step.number for step in made] == list(range(300))
    assert [step.is_last for step in made] == [False] * 299 + [True]
    assert len(set(draws)) == 300
    assert made[0].rate == pytest.approx(0.2)
    assert max(step.rate for step in made) == pytest.approx(2.0)
    assert made[-1].rate == pytest.approx(0.04, rel=0.02)
    (tmp_path / "state.pt").unlink()
    run(float("inf"))
    assert draws[300:] == draws[:300], "draws hang on the seed and the step alone"

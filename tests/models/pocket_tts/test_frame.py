"""The frame step: the official latents, and when a segment ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_pocket
import torch
from parity import begin, capacity
from tiny_pocket_lm import NEVER, cases, controls, model_of, random_prompt, use_stored_noise
from torch import Tensor

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.models.base import SavedVoice
from sonoro.models.pocket_tts.model import PocketTTS
from sonoro.models.pocket_tts.voice import PocketVoice

CAPACITY = capacity(slots=3, positions=192, frames=80, text=1)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def official_voice(model: PocketTTS, case: object) -> PocketVoice:
    state = {name.replace("|", "/"): torch.from_numpy(value) for name, value in case.tensors.items() if "|" in name}
    return model.load_voice(SavedVoice(state, {})).data


def run(model: PocketTTS, prompt: object, frames: int, slot: int = 1) -> tuple[Tensor, list[Tensor], bool]:
    """The frames of `prompt`, what was recorded of each, and whether it has ended."""
    state, record = model.allocate(CAPACITY), list[Tensor]()
    begin(model, state, [prompt], [slot])
    for _ in range(frames):
        model.frame(state, torch.tensor([slot]), record)
    return state.frames[slot, : state.length[slot], 0].clone(), record, bool(state.done[slot])


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
def test_frames_are_the_official_ones(reference_root: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty in a row, each fed back, after the official state of a voice; float32."""
    case = cases("runs", reference_root)[variant]
    model = model_of(variant)
    use_stored_noise(monkeypatch, variant)
    wanted = controls(max_frames=80, ignore_eos=True)
    prompt = model._prompts.build(case.facts["text"], wanted, official_voice(model, case))
    assert prompt.rows[prompt.stored : -1, 0].tolist() == case.tensors["ids"].tolist()
    frames, record, _ = run(model, prompt, tiny_pocket.FRAMES)
    hidden, logits, latents = (torch.cat(record[part::3]) for part in range(3))
    expected = torch.from_numpy(case.tensors["frames"])
    assert expected.std(0).min() > 0.03
    torch.testing.assert_close(latents[:, 0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[:, 1], torch.from_numpy(case.tensors["logits"]), atol=3e-5, rtol=0)
    torch.testing.assert_close(hidden[::20], torch.from_numpy(case.tensors["hidden"]), atol=3e-5, rtol=0)
    torch.testing.assert_close(frames, model._modules.lm.denormalize(latents[:, 0]))


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
def test_a_segment_ends_where_the_official_one_does(
    reference_root: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, model = cases("runs", reference_root)[variant], model_of(variant)
    use_stored_noise(monkeypatch, variant)
    threshold = model._config.default_eos_threshold
    prompt = model._prompts.build(
        case.facts["text"], controls(max_frames=80, threshold=threshold), official_voice(model, case)
    )
    frames, _, is_done = run(model, prompt, tiny_pocket.FRAMES)
    assert is_done
    assert len(frames) == case.facts["frames_spoken"] < tiny_pocket.FRAMES


@pytest.mark.parametrize(("after", "frames"), [(0, 6), (1, 7), (4, 10), (-1, 11)])
def test_speech_ends_some_frames_after_the_decision(after: int, frames: int) -> None:
    """Which may be made from the seventh frame on: it is dropped itself if none may follow."""
    model = model_of()
    ended = model._prompts.build(
        "So.", controls(threshold=-NEVER, after=after, max_frames=40), model._own_voice("alba")
    )
    made, _, is_done = run(model, ended, 20)
    assert (len(made), is_done) == (frames, True)
    whole = model._prompts.build("So.", controls(max_frames=40, after=after), model._own_voice("alba"))
    torch.testing.assert_close(made, run(model, whole, frames)[0])


def test_the_temperature_is_the_variance_of_the_noise() -> None:
    model = model_of("pointwise")
    lm = model._modules.lm
    made = {}
    for temperature in (0.0, 0.25, 1.0):
        prompt = model._prompts.build(
            "So.", controls(seed=4, temperature=temperature, max_frames=40), model._own_voice("alba")
        )
        _, (hidden, _, latent), _ = run(model, prompt, 1)
        made[temperature] = (latent[:, 0], hidden)
    still, hidden = made[0.0]
    assert torch.equal(still, lm.flow_net(torch.zeros_like(still), hidden))
    noise = {temperature: solved(lm, *made[temperature]) for temperature in (0.25, 1.0)}
    torch.testing.assert_close(noise[0.25] * 2, noise[1.0], atol=1e-4, rtol=0)


def solved(lm: object, latent: Tensor, hidden: Tensor) -> Tensor:
    """The noise that the head made `latent` of, by fixed points of its inverse."""
    noise = latent.clone().double()
    head = lm.flow_net
    for _ in range(400):
        noise = noise + 0.2 * (latent - head(noise.float(), hidden)).double()
    torch.testing.assert_close(head(noise.float(), hidden), latent, atol=1e-5, rtol=0)
    return noise


def test_more_steps_of_the_head_are_a_setting(reference_root: Path) -> None:
    model = model_of("lsd")
    head, hidden = model._modules.lm.flow_net, torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    model.configure({"flow_steps": 4})
    assert head.times.shape == (4, 24)
    expected, y = noise, head.cond_embed(hidden)
    for step in range(4):
        moments = (torch.tensor([step / 4]), torch.tensor([(step + 1) / 4]))
        times = sum(embed(moment) for embed, moment in zip(head.time_embed, moments, strict=True)) / 2
        expected = expected + head._output(expected, y + times) / 4
    torch.testing.assert_close(head(noise, hidden), expected)


def test_sampling_parameters_that_choose_codes_are_refused() -> None:
    model = model_of()
    request = model.spec.resolve(SpeechRequest(id="1", text="So.", sampling=SamplingParams(top_k=5)))
    with pytest.raises(InvalidRequest, match=r"top_k.*has no codes"):
        model.prepare(request, "So.", 0, [], None)


def test_prompts_of_other_voices_speak_differently() -> None:
    model = model_of()
    first, second = (run(model, random_prompt(key, controls(seed=1)), 3)[0] for key in (0, 1))
    assert (first - second).abs().max() > 0.01

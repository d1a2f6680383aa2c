"""Scripts of texts with markup, in short: what is said, with bars around pauses in ms and a name before each style."""

from collections.abc import Sequence
from typing import Any

from sonoro.core.types import ModelSpec, SamplingParams, SpeechRequest
from sonoro.text import read
from sonoro.text.script import Lexicon, scripted

SPEC = ModelSpec(
    name="spoken",
    sample_rate=24000,
    hop=1920,
    max_frames=1000,
    voice_modes=("named",),
    voices=("nora", "edith", "hugh"),
    languages=("auto", "english"),
    sampling=SamplingParams(),
    text_normalizer="english",
    respellings={"a": "ay"},
    voice_sexes={"nora": "female", "edith": "female", "hugh": "male"},
)


def spoken(
    text: str,
    *,
    markup: str = "auto",
    on_markup: str = "refuse",
    lexicons: Sequence[Lexicon] = (),
    spec: ModelSpec = SPEC,
    raw: bool = False,
) -> Any:
    """What is said of `text`, as a model of `spec` reads it; the script itself if `raw`."""
    request = SpeechRequest(id="a", text=text, markup=markup, on_markup=on_markup)
    script = scripted(request, spec, lexicons).script
    if raw:
        return script
    if script is None:
        return _read(text, spec)
    parts = [f"|{1000 * script.lead_s:g}|"] * bool(script.lead_s)
    for line in script.lines:
        rate, gain = f"rate {line.rate:g}" * (line.rate != 1), f"gain {line.gain:.3g}" * (line.gain != 1)
        style = " ".join(word for word in (line.voice, rate, gain) if word)
        parts.append(f"{style}: " * bool(style) + _read(line.text, spec, is_plain=script.is_plain))
        parts += [f"|{1000 * line.pause_s:g}|"] * bool(line.pause_s)
    warnings = ", ".join(warning.partition(" (")[0] for warning in script.warnings)
    return " ".join([*parts, *[f"w: {warnings}"] * bool(warnings)])


def _read(text: str, spec: ModelSpec, *, is_plain: bool = False) -> str:
    form = "plain" if is_plain else "auto"
    return read(text, form, lowercase=True, respellings=spec.respellings).text

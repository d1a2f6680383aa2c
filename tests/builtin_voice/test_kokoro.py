"""The teacher Kokoro: batches say what utterances say alone, conversion gives PyTorch's layouts, and shards hold it."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from builtin_voice import shards
from builtin_voice.kokoro import convert, prepare, synthesize
from builtin_voice.kokoro.layers import HarmonicSource, PackedLSTM, ShortFourier, mask_of, styled_snake
from builtin_voice.kokoro.model import Kokoro, Sizes
from builtin_voice.kokoro.teacher import LEADING_S, TRAILING_S, Teacher, batches, edges
from builtin_voice.spectra import Bands

TINY = Sizes(
    symbols=12, width=32, style=8, longest=6, max_positions=40, bert_embedding=8, bert_width=24, bert_heads=2,
    bert_inner=32, bert_layers=2, decoder_width=32, asr_width=4,
)  # fmt: skip
VOCABULARY = {symbol: number for number, symbol in enumerate("abcdefgh .?", start=1)}


@pytest.fixture
def teacher() -> Teacher:
    torch.manual_seed(0)
    styles = {voice: torch.randn(30, 2 * TINY.style).numpy() for voice in ("af_heart", "bm_george")}
    return Teacher(Kokoro(TINY), styles, VOCABULARY, torch.device("cpu"))


def log_spectrum(sound: Tensor) -> Tensor:
    return torch.stft(sound, 512, 128, window=torch.hann_window(512), return_complex=True).abs().clamp(min=1e-3).log()


@torch.inference_mode()
def test_batch_says_what_each_says_alone(teacher: Teacher) -> None:
    lines = [torch.tensor([0, *ids, 0]) for ids in ([1, 2, 3, 4, 9, 5, 10], [6, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])]
    styles = torch.randn(3, 2 * TINY.style)
    lengths = torch.tensor([len(line) for line in lines])
    padded = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
    frames, encoded = teacher.model.durations(padded, styles, lengths)
    sounds = teacher.model.sound(padded, styles, lengths, frames=frames, encoded=encoded, noise=None)
    for row, line in enumerate(lines):
        one, style = lengths[row : row + 1], styles[row : row + 1]
        alone, known = teacher.model.durations(line[None], style, one)
        assert frames[row].tolist() == alone[0].tolist() + [0] * (len(padded[0]) - len(line))
        sound = teacher.model.sound(line[None], style, one, frames=alone, encoded=known, noise=None)[0]
        assert len(sound) == alone.sum() * TINY.frame
        ours = sounds[row, : len(sound)]
        assert sound.std() > 1e-3
        assert (log_spectrum(ours) - log_spectrum(sound)).abs().mean() < 0.02
        # To the last sample: the inverse transform ends where the utterance does.
        # Random weights make much of rounding: up to a tenth on some processors. Three samples early would be 1.6.
        assert (ours[-50:] - sound[-50:]).std() < 0.3 * sound[-50:].std()


def test_norm_and_snake_in_few_passes_are_norm_and_snake() -> None:
    torch.manual_seed(0)
    x, mask = 3 + 2 * torch.randn(2, 4, 50), mask_of(torch.tensor([50, 31]), 50)
    gamma, beta, alpha = torch.randn(2, 4, 1), torch.randn(2, 4, 1), torch.randn(1, 4, 1)
    given = styled_snake(x, mask, (gamma, beta), alpha)
    for row, length in enumerate((50, 31)):
        normed = torch.nn.functional.instance_norm(x[row : row + 1, :, :length])[0]
        y = (1 + gamma[row]) * normed + beta[row]
        assert torch.allclose(given[row, :, :length], y + torch.sin(alpha[0] * y).square() / alpha[0], atol=1e-4)
        assert given[row, :, length:].abs().sum() == 0


@torch.inference_mode()
def test_harmonics_follow_the_pitch() -> None:
    source = HarmonicSource(24_000, 300)
    with torch.no_grad():
        source.l_linear.weight.copy_(torch.eye(1, 9))
        source.l_linear.bias.zero_()
    sound = source(torch.full((1, 80), 200.0), torch.ones(1, 1, 80), None)[0]
    assert sound.shape == (24_000,)
    assert int(torch.fft.rfft(sound).abs().argmax()) == 200
    assert float(sound.abs().max()) == pytest.approx(np.tanh(0.1), rel=1e-3)
    assert source(torch.zeros(1, 80), torch.ones(1, 1, 80), None).abs().max() == 0
    breath = source(torch.zeros(1, 80), torch.ones(1, 1, 80), torch.Generator().manual_seed(0))
    assert float(breath.std()) == pytest.approx(0.1 / 3, rel=0.05)


def test_spectra_are_those_of_torch_and_return() -> None:
    fourier = ShortFourier(20, 5)
    sound = torch.randn(1, 600)
    given = fourier(sound, torch.tensor([600]))
    theirs = torch.stft(sound, 20, 5, window=torch.hann_window(20), return_complex=True)
    assert torch.allclose(torch.polar(given[:, :11], given[:, 11:]), theirs, atol=1e-5)
    back = fourier.inverse(given[:, :11], given[:, 11:], torch.ones(1, 1, given.shape[-1]))
    assert torch.allclose(back, sound, atol=1e-5)


def test_lstm_is_converted_gate_by_gate() -> None:
    """Against the equations of the ONNX operator (gates i, o, f, c; bias for input and state), run forward."""
    rng, hidden, inputs = np.random.default_rng(0), 3, 4
    given = rng.integers(-100, 100, (2, inputs, 4 * hidden), dtype=np.int8)
    fed = rng.integers(-100, 100, (2, hidden, 4 * hidden), dtype=np.int8)
    bias = rng.standard_normal((2, 8 * hidden)).astype(np.float32)
    scales = np.array([0.01, 0.02], np.float32), np.array([0.005, 0.015], np.float32)
    arrays = dict(convert.lstm("x", given, fed, bias, scales))
    lstm = PackedLSTM(inputs, 2 * hidden)
    weights = {}
    for name in lstm.state_dict():
        scale = arrays.get(f"x.{name}.scale", np.float32(1))
        weights[name] = torch.from_numpy((arrays[f"x.{name}"] * scale).astype(np.float32))
    lstm.load_state_dict(weights)
    x = rng.standard_normal((5, inputs)).astype(np.float32)
    h, c = np.zeros(hidden), np.zeros(hidden)
    for column in x:
        gates = column @ (given[0] * scales[0][0]) + h @ (fed[0] * scales[1][0]) + bias[0].reshape(2, -1).sum(0)
        i, o, f = (1 / (1 + np.exp(-part)) for part in np.split(gates, 4)[:3])
        c = f * c + i * np.tanh(np.split(gates, 4)[3])
        h = o * np.tanh(c)
    found = lstm(torch.from_numpy(x.T.copy())[None], torch.tensor([5]))[0, :hidden, -1]
    assert np.allclose(found.detach(), h, atol=1e-5)


def test_another_file_than_the_expected_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_bytes(b"something")
    prepare.check(path, hashlib.sha256(b"something").hexdigest())
    with pytest.raises(ValueError, match="graph: its sha256 is 3fc9"):
        prepare.check(path, prepare.GRAPH_SHA256)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("/encoder/bert/encoder/albert_layer_groups.0/albert_layers.0/attention/query/MatMul_quant", "bert.query"),
        ("encoder.text_encoder.cnn.1.1.gamma", "text_encoder.norms.1.weight"),
        ("/encoder/text_encoder/cnn.2/cnn.2.0/Conv_quant", "text_encoder.convs.2"),
        ("/encoder/predictor/text_encoder/lstms.4/LSTM_quant", "predictor.lstms.2"),
        ("encoder.predictor.text_encoder.lstms.3.fc.bias", "predictor.norms.1.fc.bias"),
        ("/encoder/F0.1/pool/ConvTranspose", "predictor.F0.1.pool"),
        ("/encoder/shared/LSTM_quant", "predictor.shared"),
        ("/decoder/decoder/asr_res/asr_res.0/Conv_quant", "decoder.asr_res"),
        ("decoder.decoder.generator.noise_res.0.alpha2.1", "decoder.generator.noise_res.0.snake2.1.alpha"),
        (
            "/decoder/decoder/generator/resblocks.5/adain2.0/fc/Gemm_MatMul_quant",
            "decoder.generator.resblocks.5.adain2.0.fc",
        ),
    ],
)
def test_names_of_the_graph(given: str, ours: str) -> None:
    assert convert.our_name(given) == ours


def test_batches_hold_everything_once_within_the_budget() -> None:
    lengths = [5, 90, 30, 31, 7, 200, 12]
    groups = list(batches(lengths, 100))
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or len(group) * max(lengths[place] for place in group) <= 100 for group in groups)


def test_edges_are_where_sound_is() -> None:
    sound = torch.full((2, 24_000), 1e-5)
    sound[0, 6_000:12_000] = 0.5
    sound[1, 1_200:2_400] = 0.01
    sound[1, 3_000:] = 0.9
    first, last = edges(sound, torch.tensor([24_000, 2_880]), 24_000)
    assert first.tolist() == [6_000, 1_200]
    assert last.tolist() == [12_000, 2_400]


def test_speech_is_cut_with_its_times(teacher: Teacher) -> None:
    lines = ["abc def.", "gh?", "abcabcab cdef gh."]
    spoken = teacher.synthesize(lines, ["af_heart", "bm_george", "af_heart"])
    for line, said in zip(lines, spoken, strict=True):
        assert said.samples.dtype == np.int16
        assert said.phones == ["", *line, ""]
        assert said.ends == sorted(said.ends)
        assert said.ends[-1] == len(said.samples)
        assert len(said.samples) > (LEADING_S + TRAILING_S) * 24_000
    again = teacher.synthesize(lines[:1], ["af_heart"])[0]
    assert again.ends == spoken[0].ends
    with pytest.raises(ValueError, match="0 known symbols"):
        teacher.synthesize(["zzz"], ["af_heart"])


def test_shards_are_shared_and_not_spoken_again(teacher: Teacher, tmp_path: Path) -> None:
    path = tmp_path / "phonemes.jsonl.xz"
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for row in range(6):
            line = {"row": row, "text": f"text {row}.", "us": "ab" * (row + 1), "gb": "cd" * (row + 1)}
            file.write(json.dumps(line) + "\n")
    voices = ["af_heart", "bm_george"]
    rows = synthesize.read_phonemes(path, voices, 5)
    assert [row[1:] for row in rows[:2]] == [("ab", "af_heart"), ("cdcd", "bm_george")]
    assert len(synthesize.read_phonemes(path, voices, 5, is_all=True)) == 10
    synthesize.synthesize(rows, teacher, tmp_path / "one", size=2)
    (tmp_path / "two").mkdir()
    claimed = synthesize.claim(tmp_path / "two", 1)
    assert claimed is not None
    synthesize.synthesize(rows, teacher, tmp_path / "two", size=2)
    assert sorted(shards.written(tmp_path / "two")) == [0, 2]
    assert synthesize.claim(tmp_path / "two", 2) is None
    claimed.unlink()
    synthesize.synthesize(rows, teacher, tmp_path / "two", size=2)
    assert not list((tmp_path / "two").glob("*.claim"))
    (one, utterances), (two, same) = (shards.load(tmp_path / name) for name in ("one", "two"))
    assert [row.text for row in utterances] == [f"text {row}." for row in range(5)]
    assert utterances == same
    assert all((one[shard] == two[shard]).all() for shard in range(3))
    assert sum(row.samples for row in utterances) == sum(map(len, one.values()))
    # What is there is not spoken again.
    (tmp_path / "one" / "shard-00000.npy").unlink()
    (tmp_path / "one" / "shard-00001.jsonl").unlink()
    synthesize.synthesize(rows, teacher, tmp_path / "one", size=2)
    assert sorted(file.name for file in (tmp_path / "one").glob("*.npy")) == ["shard-00001.npy", "shard-00002.npy"]


@pytest.mark.weights
@torch.inference_mode()
def test_says_what_the_graph_says(request: pytest.FixtureRequest) -> None:
    """Without noise, against the public graph, whose activations are in 8 bits too: as long to two frames, and where
    just as long the same spectra, half as loud again (the graph does not normalise its inverse transform)."""
    runtime = pytest.importorskip("onnxruntime")
    folder = request.config.getoption("--kokoro")
    if folder is None:
        pytest.skip("needs --kokoro DIR")
    teacher = Teacher.load(folder / prepare.WEIGHTS, "cpu")
    session = runtime.InferenceSession(str(folder / prepare.GRAPH))
    line = "ðə kwˈɪk bɹˈWn fˈɑks ʤˈʌmps ˌOvəɹ ðə lˈAzi dˈɔɡ, ænd ɪt slˈips."
    ids = torch.tensor([[0, *(teacher.vocabulary[symbol] for symbol in line), 0]])
    spectra, apart = Bands(24_000, 1024, 256, 80, 12_000.0), []
    for voice in ("af_heart", "bm_george"):
        style = torch.from_numpy(np.fromfile(folder / f"{voice}.bin", np.float32).reshape(-1, 256)[len(line) - 1][None])
        inputs = {"input_ids": ids.numpy(), "style": style.numpy(), "speed": np.ones(1, np.float32)}
        theirs = torch.from_numpy(session.run(None, inputs)[0].ravel())
        lengths = torch.tensor([ids.shape[1]])
        frames, encoded = teacher.model.durations(ids, style, lengths)
        ours = teacher.model.sound(ids, style, lengths, frames=frames, encoded=encoded, noise=None)[0]
        assert abs(len(ours) - len(theirs)) <= 2 * TINY.frame
        if len(ours) == len(theirs):
            mels = [spectra.log_mel(spectra.magnitudes(sound[None])) for sound in (1.5 * ours, theirs)]
            apart.append(float((mels[0] - mels[1]).abs().mean()))
    assert apart
    assert max(apart) < 0.2

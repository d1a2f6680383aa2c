"""The talker's weights, rows and training forwards, against the official implementation's stored results."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from parity import Case
from tiny_talker import controls, random_prompt, reference_prompt, stored_tensors, tiny_config, tiny_talker
from torch import Tensor

from builtin_voice.forwards import embed_prompt, predictor_logits, talker_forward
from sonoro.models.qwen3_tts import backbone
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.prompt import TalkerPrompt

Reference = Callable[[str], dict[str, Case]]
LAYOUTS = ("stream", "whole")
TOPOLOGIES = ["1.7b", "0.6b"]
GREEDY = [
    *(f"{mode}_{layout}" for mode in ("custom_voice", "voice_design", "x_vector", "in_context") for layout in LAYOUTS),
    "pair_long",
    "pair_short",
    "ending",
]


def tensor(case: Case, name: str) -> Tensor:
    return torch.from_numpy(case.tensors[name])


def talker_of(case: Case) -> Talker:
    return tiny_talker(case.facts["variant"], case.facts["topology"], end_scale=case.facts.get("eos_row_scale", 1.0))


def input_rows(talker: Talker, prompt: TalkerPrompt, codes: Tensor) -> Tensor:
    """All input rows [P + T, H] of a run: its prompt, then one row after each of its frames `codes` [T, K]."""
    pad = tiny_config().tts_pad_token_id
    text = torch.cat((prompt.trail, torch.full((len(codes),), pad)))[: len(codes)]
    return torch.cat((embed_prompt(talker, prompt), talker.embed_frames(codes) + talker.embed_text(text)))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_parameters_carry_the_released_names(topology: str) -> None:
    talker = tiny_talker(topology=topology)
    shapes = {name: tuple(value.shape) for name, value in stored_tensors(topology=topology).items()}
    for name, value in talker.state_dict().items():
        if name in shapes:
            assert shapes.pop(name) == tuple(value.shape)
            continue
        layer, fused = name.removesuffix(".weight").rsplit(".", 1)
        parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}[fused]
        found = [shapes.pop(f"{layer}.{part}_proj.weight") for part in parts]
        assert tuple(value.shape) == (sum(rows for rows, _ in found), found[0][1])
    assert not shapes


def test_greedy_covers_every_variant(reference: Reference) -> None:
    runs = [case.facts for case in reference("greedy").values() if case.facts["frames"] >= 32]
    assert {facts["variant"] for facts in runs} == {"custom_voice", "voice_design", "base"}
    assert {facts["topology"] for facts in runs} == set(TOPOLOGIES)
    assert {facts["mode"] for facts in runs} >= {"x_vector", "in_context"}


@torch.no_grad()
@pytest.mark.parametrize("name", GREEDY)
def test_prompts_and_logits_match_the_official_ones(reference: Reference, name: str) -> None:
    case = reference("greedy")[name]
    talker = talker_of(case)
    prompt = reference_prompt(case, controls())
    positions = prompt.positions
    rows = input_rows(talker, prompt, tensor(case, "codes"))
    torch.testing.assert_close(rows[:positions], tensor(case, "prompt"), atol=1e-5, rtol=0)
    logits = talker_forward(talker, rows[None]).logits[0]
    steps = torch.tensor(case.facts["logit_steps"])
    # Float32, other order of sums.
    torch.testing.assert_close(logits[positions - 1 + steps], tensor(case, "logits"), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["default", "narrow"])
def test_predictor_logits_match_the_official_ones(reference: Reference, name: str) -> None:
    case, spoken = reference("sampling")[name], reference("greedy")["custom_voice_stream"]
    talker, codes = talker_of(case), tensor(case, "codes")
    prompt = reference_prompt(replace(spoken, facts=spoken.facts | {"speaker": "serena"}), controls())
    output = talker_forward(talker, input_rows(talker, prompt, codes)[None])
    decided = slice(prompt.positions - 1, prompt.positions - 1 + len(codes))
    torch.testing.assert_close(output.logits[0, decided], tensor(case, "logits"), atol=1e-4, rtol=0)
    depth = predictor_logits(talker, output.hidden[0, decided], codes)
    torch.testing.assert_close(depth, tensor(case, "depth_logits"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tables_made_for_speaking_equal_the_plain_parameters(topology: str) -> None:
    talker = tiny_talker(topology=topology, dtype=torch.float64)
    plain = tiny_talker(topology=topology, dtype=torch.float64, is_final=False)
    assert plain.text_table is None
    prompt = random_prompt(1, controls())
    hidden = torch.randn(5, talker.config.hidden_size, dtype=torch.float64)
    codes = torch.randint(talker.codes, (5, talker.codebooks))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(embed_prompt(talker, prompt), embed_prompt(plain, prompt), atol=1e-12, rtol=0)
            torch.testing.assert_close(talker.embed_frames(codes), plain.embed_frames(codes), atol=1e-12, rtol=0)
            torch.testing.assert_close(
                predictor_logits(talker, hidden, codes), predictor_logits(plain, hidden, codes), atol=1e-12, rtol=0
            )
    project, tables = plain.code_predictor.small_to_mtp_projection, plain.code_predictor.model.codec_embedding
    for book in range(talker.codebooks - 1):
        table = plain.model.codec_embedding if book == 0 else tables[book - 1]
        expected = project(table(codes[:, book]))
        torch.testing.assert_close(talker.code_predictor.embed(book, codes[:, book]), expected, atol=1e-12, rtol=0)


def test_tables_made_in_another_dtype_are_in_it() -> None:
    """As a model trained in float32 and spoken in float64 makes them: equal to tables made in float64 at once."""
    talker, expected = tiny_talker().double(), tiny_talker(dtype=torch.float64)
    talker.finalize()
    codes = torch.arange(talker.codebooks)[None]
    with torch.no_grad():
        for found, wanted in (
            (talker.embed_text(codes), expected.embed_text(codes)),
            (talker.embed_frames(codes), expected.embed_frames(codes)),
            (talker.code_predictor.embed(0, codes[0]), expected.code_predictor.embed(0, codes[0])),
        ):
            assert found.dtype == torch.float64
            # A table that kept its float32 rounding would differ by some 1e-8.
            torch.testing.assert_close(found, wanted, atol=1e-14, rtol=0)


def test_a_large_text_table_is_left_out_on_a_cpu_and_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    talker = tiny_talker(dtype=torch.float64)
    ids = torch.arange(9)
    with torch.no_grad():
        expected = 2 * talker.embed_text(ids)
        monkeypatch.setattr(backbone, "LARGEST_CPU_TEXT_TABLE", 8)
        for parameter in talker.text_projection.linear_fc2.parameters():
            parameter.mul_(2.0)
        talker.finalize()
        assert talker.text_table is None
        torch.testing.assert_close(talker.embed_text(ids), expected, atol=1e-12, rtol=0)


def test_tables_are_not_saved_and_can_be_made_again() -> None:
    talker = tiny_talker()
    names = set(talker.state_dict())
    assert names == set(tiny_talker(is_final=False).state_dict())
    codes = torch.zeros(1, talker.codebooks, dtype=torch.int64)
    with torch.no_grad():
        before = talker.embed_frames(codes)
        for parameter in talker.parameters():
            parameter.mul_(2.0)
        talker.finalize()
        torch.testing.assert_close(talker.embed_frames(codes), 2 * before)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_training_reaches_every_weight(topology: str) -> None:
    talker = tiny_talker(topology=topology, is_final=False).requires_grad_(True)
    ids = torch.arange(talker.config.text_vocab_size).remainder(7).repeat(1, 1)[:, :9]
    codes = torch.randint(talker.codes, (1, 9, talker.codebooks))
    output = talker_forward(talker, talker.embed_rows(ids, codes))
    inner = predictor_logits(talker, output.hidden, codes)
    assert output.logits.shape == (1, 9, talker.config.vocab_size)
    assert inner.shape == (1, 9, talker.codebooks - 1, talker.config.code_predictor_config.vocab_size)
    (output.logits.square().mean() + inner.square().mean()).backward()
    for name, parameter in talker.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_prompt_rows_are_sums_of_both_sides_with_the_x_vector() -> None:
    talker = tiny_talker("base", dtype=torch.float64)
    prompt = random_prompt(4, controls(), has_voice=True)
    found = embed_prompt(talker, prompt)
    assert prompt.voice is not None
    for row in range(prompt.positions):
        expected = talker.text_projection(talker.model.text_embedding(prompt.text_rows[row]))
        for book, code in enumerate(prompt.code_rows[row]):
            table = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding][book]
            expected = expected + (table(code) if code >= 0 else 0)
        if row == prompt.x_vector_row:
            expected = expected + prompt.voice.data.x_vector
        torch.testing.assert_close(found[row], expected, atol=1e-12, rtol=0)


def test_a_row_without_text_is_its_codes_alone() -> None:
    talker = tiny_talker()
    codes = torch.tensor([[[3, 1, 4, 1], [-1, -1, -1, -1]]])
    nothing = torch.full((1, 2), -1)
    found = talker.embed_rows(nothing, codes)
    assert torch.equal(found[0, 0], talker.embed_frames(codes[0, 0]))
    assert not found[0, 1].any()


@torch.no_grad()
@pytest.mark.parametrize("is_final", [True, False])
def test_bfloat16_rows_are_rounded_in_the_official_order(is_final: bool) -> None:
    talker = tiny_talker(dtype=torch.bfloat16, is_final=is_final)
    codes = torch.randint(talker.codes, (50, talker.codebooks))
    tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
    wide = torch.stack([table(codes[:, book]).float() for book, table in enumerate(tables)]).sum(0)
    frames = talker.embed_frames(codes)
    assert torch.equal(frames, wide.bfloat16())
    text = torch.randint(talker.config.text_vocab_size, (50,))
    assert torch.equal(talker.embed_rows(text, codes), talker.embed_text(text) + frames)
    assert not torch.equal(talker.embed_rows(text, codes), (talker.embed_text(text).float() + wide).bfloat16())


def test_a_folded_text_embedding_keeps_its_table_its_shape_and_its_first_row() -> None:
    talker, plain = tiny_talker(), tiny_talker()
    weight, ids = talker.model.text_embedding.weight, torch.arange(9)
    first, shape = weight[0].clone(), weight.shape
    talker.fold_text()
    assert weight.untyped_storage().nbytes() == first.nbytes
    assert weight.shape == shape
    assert torch.equal(weight[0], first)
    for is_trained in (False, True):
        with torch.set_grad_enabled(is_trained):
            torch.testing.assert_close(talker.embed_text(ids), plain.embed_text(ids), atol=1e-6, rtol=1e-6)

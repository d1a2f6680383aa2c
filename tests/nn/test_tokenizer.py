"""A stored tokeniser, and the one that stands in where there is none."""

from pathlib import Path

import pytest
import tiny_fish
import tiny_vox

from sonoro.core.errors import CheckpointError, CheckpointNotFound
from sonoro.nn.tokenizer import TextTokenizer


def test_a_stored_tokeniser_merges_and_takes_special_tokens_for_what_they_are(tmp_path: Path) -> None:
    tiny_fish.write_checkpoint(tmp_path)
    tokenizer = TextTokenizer.from_folder(tmp_path)
    special = tiny_fish.special_tokens()
    assert tokenizer.special == special
    assert tokenizer.size == max(special.values()) + 1
    ids = tokenizer.encode("user<|im_end|>user")
    assert ids == [ids[0], special["<|im_end|>"], ids[0]]


def test_the_stand_in_has_a_token_for_every_byte() -> None:
    tokenizer = TextTokenizer.stand_in({"<|a|>": 300, "<|b|>": 256})
    assert tokenizer.special == {"<|a|>": 300, "<|b|>": 256}
    assert tokenizer.size == 301
    ids = tokenizer.encode("aä<|a|><|c|>")
    assert ids[3] == 300
    assert len(ids) == 3 + 1 + 5
    assert len(set(tokenizer.encode("".join(map(chr, range(128)))))) == 128


def test_tokens_of_several_chinese_characters_are_known_by_their_characters(tmp_path: Path) -> None:
    """Without the space before them; a single character keeps its own, and no other script is taken apart."""
    tiny_vox.write_checkpoint(tmp_path)
    tokenizer = TextTokenizer.from_folder(tmp_path)
    known = tokenizer.vocabulary
    found = tokenizer.chinese_characters()
    assert found == {
        known[word]: tuple(known[one] for one in word.removeprefix("▁")) for word in ("你好", "▁你好", "世界", "测试")
    }
    assert not {known["▁请"], known["▁好"], known["▁you"]} & found.keys()


def test_a_file_that_is_missing_or_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"tokenizer\.json does not exist"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokeniser"):
        TextTokenizer.from_folder(tmp_path)

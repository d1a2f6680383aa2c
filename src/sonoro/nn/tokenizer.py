"""A tokenizer.json as it is stored, or a stand-in where there is none. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from sonoro.core.errors import CheckpointError, CheckpointNotFound

__all__ = ["TextTokenizer"]


class TextTokenizer:
    """Text to ids; special tokens written in a text are those tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> TextTokenizer:
        """The tokeniser of a checkpoint folder. Raises `CheckpointNotFound` or `CheckpointError` naming the file."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointNotFound(f"{file} does not exist")
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file} is no tokeniser: {error}") from error

    @classmethod
    def stand_in(cls, special: Mapping[str, int]) -> TextTokenizer:
        """One token a byte, ids 0 to 255, and `special` ones: for random weights, where no text means anything."""
        vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **special}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        return cls(tokenizer)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def special(self) -> dict[str, int]:
        """The special tokens and their ids."""
        return {token.content: index for index, token in self._tokenizer.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

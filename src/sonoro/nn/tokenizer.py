"""The tokeniser in a file of a checkpoint, of either form, or a byte-level stand-in for random weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from sonoro.core.errors import CheckpointError, CheckpointNotFound, border
from sonoro.nn.sentencepiece import read_unigram


def library_border(complaint: str) -> AbstractContextManager[None]:
    """A context that turns the tokenizers library's plain `Exception` into `CheckpointError`, led by `complaint`."""

    def refuse(error: Exception) -> NoReturn:
        raise CheckpointError(f"{complaint}: {error}") from error

    return border(refuse)


class TextTokenizer:
    """Text to token ids; special tokens written in the text are encoded as such."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> TextTokenizer:
        """The tokeniser of a checkpoint folder. Raises `CheckpointNotFound` or `CheckpointError` naming the file."""
        return cls.from_file(folder / "tokenizer.json")

    @classmethod
    def from_file(cls, file: Path) -> TextTokenizer:
        """The tokeniser in `file`: a tokenizer.json, or a SentencePiece `.model`. Raises as `from_folder`."""
        if not file.is_file():
            raise CheckpointNotFound(f"{file} does not exist")
        is_pieces = file.suffix == ".model"
        with library_border(f"{file} is no {'SentencePiece unigram model' if is_pieces else 'tokeniser'}"):
            return cls(read_unigram(str(file)) if is_pieces else Tokenizer.from_file(str(file)))

    @classmethod
    def stand_in(cls, special: Mapping[str, int], *, first: int = 0) -> TextTokenizer:
        """A tokeniser of one token a byte, 256 ids from `first` on, and the `special` tokens: for random weights."""
        vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), first)}
        tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **special}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        return cls(tokenizer)

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens and their ids."""
        return self._tokenizer.get_vocab()

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.vocabulary.values()) + 1

    @property
    def special(self) -> dict[str, int]:
        """The special tokens and their ids."""
        return {token.content: index for index, token in self._tokenizer.get_added_tokens_decoder().items()}

    def chinese_characters(self) -> dict[int, tuple[int, ...]]:
        """Ids of tokens of several Chinese characters, each with the ids of its characters.
        A leading `▁` (space) is dropped; a character without a token of its own becomes `<unk>`."""
        known = self.vocabulary
        chinese = {token for token in known if len(token) > 1 and all("\u4e00" <= one <= "\u9fff" for one in token)}
        found = {index: bare for token, index in known.items() if (bare := token.replace("▁", "")) in chinese}
        unknown = known.get("<unk>", 0)
        return {index: tuple(known.get(one, unknown) for one in bare) for index, bare in found.items()}

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The range (start, end) of characters of `text` that each of its tokens covers."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

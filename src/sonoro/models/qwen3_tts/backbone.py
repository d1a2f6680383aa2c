"""The talker and its code predictor, under the released names, and prompt embeddings; `frame.py` steps them."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sonoro.models.shared.step import Feedback
from sonoro.nn.linear import Linear, lay_out_by_input
from sonoro.nn.transformer import DecoderConfig, DecoderStack, NormedAttention

from .config import SUPPRESSED_IDS, PredictorConfig, TalkerConfig, stack_sizes

LARGEST_CPU_TEXT_TABLE = 16384
"""Largest text vocabulary that a CPU projects at load; a larger one is projected on use."""


class Talker(nn.Module):
    """All modules under `talker.` in a checkpoint.
    `finalize` derives tables for inference from final weights; with gradients enabled they are not used."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        # In codebook 0, control ids follow the codes.
        self.codebooks, self.codes = config.num_code_groups, config.vocab_size - SUPPRESSED_IDS
        self.model = _TalkerModel(config)
        self.text_projection = _TextProjection(config)
        self.codec_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.code_predictor = CodePredictor(config.code_predictor_config, config.hidden_size)
        self.is_text_folded = False
        self.text_table: Tensor | None
        self.code_table: Tensor | None
        self.code_starts: Tensor | None
        for name in ("text_table", "code_table", "code_starts"):
            self.register_buffer(name, None, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.codec_head.weight.device

    @torch.no_grad()
    def finalize(self) -> None:
        """Compute the tables for inference; call it again if the weights change.
        The code embeddings become views of one table, in place."""
        ids = self.config.text_vocab_size
        self.text_table = None
        if self.device.type != "cpu" or ids <= LARGEST_CPU_TEXT_TABLE:
            table = self.model.text_embedding.weight.new_empty(ids, self.config.hidden_size)
            for block, rows in zip(torch.arange(ids, device=self.device).split(8192), table.split(8192), strict=True):
                rows.copy_(self._project_text(block))
            self.text_table = table
        embeddings = self._code_embeddings()
        sizes = [embedding.num_embeddings for embedding in embeddings]
        self.code_starts = torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=self.device)
        self.code_table = torch.cat([embedding.weight for embedding in embeddings])
        for embedding, rows in zip(embeddings, self.code_table.split(sizes), strict=True):
            embedding.weight.data = rows
        self.code_predictor.finalize([embedding.weight for embedding in embeddings], self.codes)
        if self.device.type == "cpu":
            lay_out_by_input(self)

    def embed_text(self, ids: Tensor) -> Tensor:
        """Embed and project text `ids` [...] int64: [..., H]."""
        if self.text_table is None or (torch.is_grad_enabled() and not self.is_text_folded):
            return self._project_text(ids)
        return F.embedding(ids, self.text_table)

    def fold_text(self) -> None:
        """Free the text embedding (622 MB of the 1.7B) if `finalize` has projected it; training is then impossible.
        Its shape and first row stay, for `fingerprint`."""
        self.is_text_folded = self.text_table is not None
        if self.is_text_folded:
            weight = self.model.text_embedding.weight
            weight.data = weight.data[:1].clone().expand_as(weight)

    def embed_frames(self, codes: Tensor) -> Tensor:
        """Embed frames [..., K] int64: the sum of their K embeddings, rounded once, [..., H]."""
        return self.embed_codes(codes).sum(-2)

    @property
    def feedback(self) -> Feedback:
        """How a frame becomes the next input, and which code ends speech; after `finalize`."""
        assert self.code_starts is not None
        end = self.config.codec_eos_token_id
        return Feedback(self.embed_frames, self.code_table, self.code_starts, self.codes, end)

    def embed_rows(self, text_rows: Tensor, code_rows: Tensor, x_vectors: Tensor | None = None) -> Tensor:
        """Embed prompt tokens of ids `text_rows` [...] and `code_rows` [..., K] int64 (-1 for none): [..., H].
        `x_vectors` [..., H] join the code side. Rounds the code side once, then the sum, as the official code does."""
        text = self.embed_text(text_rows.clamp_min(0)).masked_fill((text_rows < 0)[..., None], 0.0)
        codes = self.embed_codes(code_rows.clamp_min(0)).masked_fill((code_rows < 0)[..., None], 0.0).sum(-2)
        return text + (codes if x_vectors is None else codes + x_vectors.to(codes.dtype))

    def _project_text(self, ids: Tensor) -> Tensor:
        assert not self.is_text_folded
        return self.text_projection(self.model.text_embedding(ids))

    def _code_embeddings(self) -> list[nn.Embedding]:
        return [self.model.codec_embedding, *self.code_predictor.model.codec_embedding]

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Embed each code by its codebook's table: [..., K] to [..., K, H]."""
        if self.code_table is None or self.code_starts is None or torch.is_grad_enabled():
            tables = self._code_embeddings()
            return torch.stack([table(codes[..., book]) for book, table in enumerate(tables)], dim=-2)
        return F.embedding(codes + self.code_starts, self.code_table)


class CodePredictor(nn.Module):
    """The depth model: a small transformer that predicts codebooks 1 to K - 1 of a frame in K - 1 passes."""

    def __init__(self, config: PredictorConfig, talker_width: int) -> None:
        super().__init__()
        self.model = _PredictorModel(config, talker_width)
        width, heads = config.hidden_size, config.num_code_groups - 1
        self.lm_head = nn.ModuleList(Linear(width, config.vocab_size, bias=False) for _ in range(heads))
        # Absent from checkpoints in which both widths are equal.
        self.small_to_mtp_projection = nn.Identity() if width == talker_width else Linear(talker_width, width)
        self.input_table: Tensor | None
        self.register_buffer("input_table", None, persistent=False)

    @torch.no_grad()
    def finalize(self, embeddings: list[Tensor], codes: int) -> None:
        """Fold the input projection into the embedding tables of codebooks 0 to K - 2, which are fed back."""
        fed = [embeddings[0][:codes], *embeddings[1:-1]]
        self.input_table = pad_sequence([self.small_to_mtp_projection(table) for table in fed], batch_first=True)

    def inputs(self, book: int) -> Tensor:
        """The input table [V, width] of codebook `book`; after `finalize`, without autograd."""
        assert self.input_table is not None
        return self.input_table[book]

    def embed(self, book: int, codes: Tensor) -> Tensor:
        """The inputs [B, width] of `codes` [B] int64 of codebook `book`; after `finalize`, without autograd."""
        return F.embedding(codes, self.inputs(book))


class _TalkerModel(DecoderStack):
    def __init__(self, config: TalkerConfig) -> None:
        super().__init__(decoder_config(config), NormedAttention)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.codec_embedding = nn.Embedding(config.vocab_size, config.hidden_size)


class _PredictorModel(DecoderStack):
    def __init__(self, config: PredictorConfig, talker_width: int) -> None:
        super().__init__(decoder_config(config), NormedAttention)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, talker_width) for _ in range(config.num_code_groups - 1)
        )


class _TextProjection(nn.Module):
    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.text_hidden_size, config.text_hidden_size)
        self.linear_fc2 = Linear(config.text_hidden_size, config.hidden_size)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(rows)))


def decoder_config(config: TalkerConfig | PredictorConfig) -> DecoderConfig:
    """The `DecoderConfig` of the talker or the code predictor."""
    return DecoderConfig(**stack_sizes(config))

"""Keys and values of many rows, each row as long as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compactionrl.models.policy import Chunk

if TYPE_CHECKING:
    from compactionrl.models.transformer import Decoder

SMALLEST = 64
"""Tokens per row to begin with."""


class KVCache:
    """Per layer, keys and values [rows, kv_heads, tokens, head_dim]: row by row, position by position, rotated.

    Memory grows by doubling with the rows and the tokens in use, up to `max_rows` and `max_tokens`. Who owns a row, and
    what its positions hold, is for the caller to know: a chunk sees all positions before its end.
    """

    cuttable = True

    def __init__(self, decoder: Decoder, max_rows: int, max_tokens: int) -> None:
        self.decoder, config, weight = decoder, decoder.config, decoder.embed_tokens.weight
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.rows, self.tokens = 0, 0
        empty = torch.zeros(0, self.kv_heads, 0, self.head_dim, device=weight.device, dtype=weight.dtype)
        self.keys = [empty for _ in range(config.num_hidden_layers)]
        self.values = [empty for _ in range(config.num_hidden_layers)]

    def forward(self, token_ids: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """See `Cache.forward`."""
        attention = self.extend(chunks)
        return self.decoder(token_ids, attention.positions, attention)

    def extend(self, chunks: Sequence[Chunk]) -> CachedAttention:
        """The attention of one forward over `chunks`, whose tokens are laid end to end: single tokens first, by row."""
        self._reserve(max(c.row for c in chunks) + 1, max(c.start + c.length for c in chunks))
        return CachedAttention(self, chunks)

    def _reserve(self, rows: int, tokens: int) -> None:
        if rows <= self.rows and tokens <= self.tokens:
            return
        if rows > self.rows:
            self.rows = min(max(rows, 2 * self.rows), self.max_rows)
        if tokens > self.tokens:
            self.tokens = min(max(tokens, 2 * self.tokens, SMALLEST), self.max_tokens)
        self.keys = [self._grown(old) for old in self.keys]
        self.values = [self._grown(old) for old in self.values]

    def _grown(self, old: Tensor) -> Tensor:
        # Zeros, not garbage: a masked NaN would still spoil the attention's weighted sum.
        new = old.new_zeros(self.rows, self.kv_heads, self.tokens, self.head_dim)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


class CachedAttention:
    """Writes new keys and values into a cache, then attends to each row's tokens up to and including the query's."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk]) -> None:
        self.cache = cache
        self.device = cache.keys[0].device
        rows, starts, lengths = (np.array(column) for column in zip(*chunks, strict=True))
        within = np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)
        positions = starts.repeat(lengths) + within
        first = (rows.repeat(lengths)[:, None] * cache.kv_heads + np.arange(cache.kv_heads)) * cache.tokens
        self.positions = self._tensor(positions)
        """[N] the position of each new token in its row."""
        self.slots = self._tensor((first + positions[:, None]).reshape(-1))
        self.n_single = int((lengths == 1).sum())
        self.single = _SingleTokens(self, rows[: self.n_single], starts[: self.n_single]) if self.n_single else None
        self.runs = [_Run(self, chunk) for chunk in chunks[self.n_single :]]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, d], key and value [N, kv_heads, d] -> [N, heads, d]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for stored, new in ((keys, key), (values, value)):
            stored.view(-1, self.cache.head_dim).index_copy_(0, self.slots, new.reshape(-1, self.cache.head_dim))
        outputs = [self.single(query[: self.n_single], keys, values)] if self.single else []
        if self.runs:
            parts = query[self.n_single :].split([run.length for run in self.runs])
            outputs += [run(part, keys, values) for run, part in zip(self.runs, parts, strict=True)]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class _SingleTokens:
    """One new token in each of several rows (ascending): one attention call, masked to each row's length.

    Cheapest on a slice of the cache, idle rows between the live ones included; with more idle than live rows in that
    slice, the live ones are gathered instead.
    """

    def __init__(self, step: CachedAttention, rows: np.ndarray, positions: np.ndarray) -> None:
        low, high = int(rows[0]), int(rows[-1]) + 1
        self.length = int(positions.max()) + 1
        self.dense = len(rows) == high - low
        self.sliced = 2 * len(rows) >= high - low
        self.span = slice(low, high)
        self.index = step._tensor(rows - low if self.sliced else rows)
        last = positions
        if self.sliced and not self.dense:
            last = np.zeros(high - low, dtype=np.int64)  # an idle row sees its position 0: finite, and dropped
            last[rows - low] = positions
        hidden = torch.arange(self.length, device=step.device) > step._tensor(last)[:, None]
        mask = torch.zeros(hidden.shape, device=step.device, dtype=step.cache.keys[0].dtype)
        self.mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.sliced:
            keys, values = keys[self.span], values[self.span]
            if not self.dense:
                query = query.new_zeros(len(keys), *query.shape[1:]).index_copy_(0, self.index, query)
        else:
            keys, values = keys.index_select(0, self.index), values.index_select(0, self.index)
        # The query heads that share a key-value head stand where several query positions would.
        grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        mask = self.mask.expand(-1, -1, grouped.shape[2], -1)
        out = scaled_dot_product_attention(
            grouped, keys[:, :, : self.length], values[:, :, : self.length], attn_mask=mask
        ).reshape(query.shape)
        return out.index_select(0, self.index) if self.sliced and not self.dense else out


class _Run:
    """Several new tokens of one row."""

    def __init__(self, step: CachedAttention, chunk: Chunk) -> None:
        self.row, start, self.length = chunk
        self.end = start + self.length
        self.mask = None
        if start > 0:
            mask = torch.full((self.length, self.end), -torch.inf, device=step.device, dtype=step.cache.keys[0].dtype)
            self.mask = mask.triu_(start + 1)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[self.row : self.row + 1, :, : self.end],
            values[self.row : self.row + 1, :, : self.end],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=query.shape[1] != keys.shape[1],
        )[0].transpose(0, 1)

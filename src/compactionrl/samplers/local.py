"""A sampler in this process: continuous batching over rows that rollouts own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from compactionrl.models.transformer import Transformer
from compactionrl.samplers.drawing import draw, uniforms
from compactionrl.samplers.kv_cache import Chunk, KVCache
from compactionrl.samplers.protocol import Sampled

STEP_TOKENS = 4096
"""Most tokens that one forward computes; longer prompts take several steps while other rows go on sampling."""
TURNAROUND = 4
"""Passes of the event loop after a step that answered requests, so that the next ones join the very next step."""


@dataclass
class SamplerStats:
    """Totals since the sampler was made."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    """Tokens that were computed but not sampled in the step before: new prompt tokens, and all tokens after new weights."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were still there."""
    steps: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Request:
    token_ids: list[int]
    max_tokens: int
    stop: frozenset[int]
    temperature: float
    top_p: float
    seed: int
    affinity: str
    future: asyncio.Future[Sampled]
    sampled: Sampled = field(default_factory=lambda: Sampled([], [], "length", []))

    def add(self, token: int, logprob: float, version: int) -> bool:
        """Append a sampled token; True if it was the last."""
        self.sampled.token_ids.append(token)
        self.sampled.logprobs.append(logprob)
        self.sampled.versions.append(version)
        if token in self.stop:
            self.sampled.finish = "stop"
            return True
        return len(self.sampled.token_ids) == self.max_tokens


@dataclass(eq=False)
class Row:
    """A row of the cache: it holds keys and values of `tokens[:cached]`; the rest is computed in the next steps."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    request: Request | None = None
    last_used: int = 0

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.cached

    def begin(self, request: Request) -> int:
        """Take a request on: keep the longest common prefix, but compute the last token, which gives the logits."""
        prompt = request.token_ids
        known = min(self.cached, len(prompt) - 1)
        if self.tokens[:known] != prompt[:known]:
            known = next(i for i in range(known) if self.tokens[i] != prompt[i])
        self.tokens, self.cached, self.request = list(prompt), known, request
        return known


class LocalSampler:
    """Samples from `model` in this process; implements `samplers.protocol.Sampler`.

    Every affinity (rollout) owns a row of the key-value cache from its first request to `release`. A request that extends
    what its row holds only computes the new tokens; after a compaction, the common prefix is kept. Each step is one
    forward over everything that is due: one token of each sampling row and the new tokens of rows that join. With more
    rollouts than `max_rows`, the row that has been idle longest is given up, and requests wait while none is idle.

    Runs inside asyncio, without threads: the same requests in the same order give bit-identical results, and a request's
    tokens depend on its neighbours only by rounding. If a step fails, every open request raises its exception. The model
    is used as it stands: after changing its weights, call `weights_changed`.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_rows: int = 64,
        max_tokens_per_row: int,
        device: torch.device | str | None = None,
    ) -> None:
        self.model = model
        self.device = model.head_weight.device
        if device is not None and torch.device(device).type != self.device.type:
            raise ValueError(f"the model is on {self.device}, not on {device}: move it first")
        if max_rows < 1 or max_tokens_per_row < 2:
            raise ValueError(
                f"max_rows {max_rows} must be at least 1, max_tokens_per_row {max_tokens_per_row} at least 2"
            )
        self.max_rows = max_rows
        self.max_tokens_per_row = max_tokens_per_row
        self.policy_version = 0
        self.stats = SamplerStats()
        self._cache = KVCache(model.config, self.device, model.head_weight.dtype)
        self._rows: dict[str, Row] = {}
        self._free = list(range(max_rows))[::-1]
        self._waiting: list[Request] = []
        self._engine: asyncio.Task[None] | None = None

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        temperature: float,
        top_p: float,
        seed: int,
        affinity: str,
    ) -> Sampled:
        """See `Sampler.sample`. Raises ValueError for a request that does not fit a row or makes no sense.

        `temperature` 0 is greedy, with log-probabilities at temperature 1. `top_p` < 1 restricts what is drawn, not the
        log-probabilities. Requests of one affinity are served one after the other. A cancelled request frees its row.
        """
        self._check(token_ids, max_tokens, temperature, top_p)
        request = Request(
            list(token_ids), max_tokens, frozenset(stop_token_ids), temperature, top_p, seed % 2**64, affinity,
            asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        self._waiting.append(request)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._run())
        try:
            return await request.future
        finally:
            self._withdraw(request)

    async def release(self, affinity: str) -> None:
        """Give up the row of a rollout that has ended. Raises RuntimeError while a request of it is open."""
        row = self._rows.get(affinity)
        if row is not None and row.request is not None:
            raise RuntimeError(f"release of {affinity!r} while it is sampling: cancel or await the request first")
        self._drop(affinity)

    def weights_changed(self, version: int) -> None:
        """The model's weights are now those of `version`: nothing computed with the old ones is used again.

        A request in the middle of sampling goes on with the new weights; `Sampled.versions` says which token had which.
        """
        self.policy_version = version
        for row in self._rows.values():
            row.cached = 0

    def _check(self, token_ids: Sequence[int], max_tokens: int, temperature: float, top_p: float) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if len(token_ids) + max_tokens > self.max_tokens_per_row:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and max_tokens {max_tokens} do not fit a row of "
                f"{self.max_tokens_per_row} tokens: shorten them or raise max_tokens_per_row"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.model.config.vocab_size:
            raise ValueError(f"token ids must lie in [0, {self.model.config.vocab_size})")
        if not temperature >= 0 or not 0 < top_p <= 1:
            raise ValueError(f"temperature {temperature} must be >= 0, top_p {top_p} in (0, 1]")

    # The engine: one task that lives while requests are open.

    async def _run(self) -> None:
        try:
            passes = TURNAROUND
            while True:
                for _ in range(passes):
                    await asyncio.sleep(0)
                if not self._waiting and not any(row.request for row in self._rows.values()):
                    return
                passes = TURNAROUND if self._step() else 1
        except Exception as error:
            self._abandon(error)
        except BaseException:
            self._abandon(None)
            raise

    def _abandon(self, error: Exception | None) -> None:
        """Every open request raises `error` (None: is cancelled). The cache may be half written: nothing of it is kept."""
        requests = self._waiting + [row.request for row in self._rows.values() if row.request]
        self._waiting = []
        for affinity, row in list(self._rows.items()):
            row.request = None
            self._drop(affinity)
        for request in requests:
            if request.future.done():
                continue
            if error is None:
                request.future.cancel()
            else:
                request.future.set_exception(error)

    def _withdraw(self, request: Request) -> None:
        """Take back a request whose caller has gone; nothing to do for one that was answered."""
        if request in self._waiting:
            self._waiting.remove(request)
        row = self._rows.get(request.affinity)
        if row is not None and row.request is request:
            row.request = None

    def _drop(self, affinity: str) -> None:
        row = self._rows.pop(affinity, None)
        if row is not None:
            self._free.append(row.slot)
            self._free.sort(reverse=True)

    # One step: admit, compute, draw.

    @torch.inference_mode()
    def _step(self) -> int:
        """Advance every row that has a request; returns the number of requests that were answered."""
        began = time.perf_counter()
        if self._waiting:
            self._admit()
        due = self._due()
        attention = self._cache.extend([chunk for _, chunk in due])
        ids = [token for row, chunk in due for token in row.tokens[chunk.start : chunk.start + chunk.length]]
        hidden = self.model.model(torch.tensor(ids, device=self.device), attention.positions, attention)
        answered = self._draw(due, hidden)
        self.stats.steps += 1
        self.stats.seconds += time.perf_counter() - began
        return answered

    def _admit(self) -> None:
        """Give waiting requests rows: first those whose rollout has one, then the others, in order of arrival."""
        wanted = {request.affinity for request in self._waiting}
        newcomers = []
        for request in self._waiting:
            row = self._rows.get(request.affinity)
            if row is not None and row.request is None:
                self._begin(row, request)
            else:
                newcomers.append(request)
        self._waiting = []
        for request in newcomers:
            row = None if request.affinity in self._rows else self._new_row(request.affinity, wanted)
            if row is None:
                self._waiting.append(request)
            else:
                self._begin(row, request)

    def _begin(self, row: Row, request: Request) -> None:
        self.stats.reused_tokens += row.begin(request)

    def _new_row(self, affinity: str, wanted: set[str]) -> Row | None:
        """A free row, or the one that has been idle longest and that no waiting request wants."""
        if not self._free:
            idle = [name for name, row in self._rows.items() if row.request is None and name not in wanted]
            if not idle:
                return None
            self._drop(min(idle, key=lambda name: self._rows[name].last_used))
        self._rows[affinity] = Row(self._free.pop())
        return self._rows[affinity]

    def _due(self) -> list[tuple[Row, Chunk]]:
        """What this step computes, at most STEP_TOKENS tokens; rows with a single one come first, in slot order."""
        rows = [row for row in self._rows.values() if row.request]
        rows.sort(key=lambda row: (row.pending > 1, row.slot))
        due, room = [], STEP_TOKENS
        for row in rows:
            count = min(row.pending, room)
            if count > 0:
                due.append((row, Chunk(row.slot, row.cached, count)))
                room -= count
        due.sort(
            key=lambda item: (item[1].length > 1, item[1].row)
        )  # a prompt may have been cut to its last single token
        return due

    def _draw(self, due: list[tuple[Row, Chunk]], hidden: torch.Tensor) -> int:
        """Sample a token in every row that is computed to its end."""
        rows, ends, end = [], [], -1
        for row, chunk in due:
            end += chunk.length
            row.cached += chunk.length
            self.stats.prefilled_tokens += chunk.length
            if row.pending == 0:
                rows.append(row)
                ends.append(end)
        if not rows:
            return 0
        requests = [row.request for row in rows if row.request]
        drawn = self._sampled_tokens(requests, hidden[ends] @ self.model.head_weight.T)
        return sum(self._append(row, *token) for row, token in zip(rows, drawn, strict=True))

    def _sampled_tokens(self, requests: list[Request], logits: torch.Tensor) -> Iterable[tuple[int, float]]:
        uniform = uniforms(
            np.array([request.seed for request in requests], dtype=np.uint64),
            np.array([len(request.sampled.token_ids) for request in requests], dtype=np.uint64),
        )
        tokens, logprobs = draw(
            logits,
            torch.tensor([request.temperature for request in requests], device=self.device),
            torch.tensor([request.top_p for request in requests], device=self.device),
            torch.from_numpy(uniform).to(self.device),
        )
        return zip(tokens.tolist(), logprobs.tolist(), strict=True)

    def _append(self, row: Row, token: int, logprob: float) -> bool:
        """Give a row's request its next token; answer it and return True if that was the last."""
        request = row.request
        assert request is not None
        first = not request.sampled.token_ids
        self.stats.sampled_tokens += 1
        self.stats.prefilled_tokens -= not first  # the token sampled in the step before is no prompt
        row.tokens.append(token)
        if not request.add(token, logprob, self.policy_version):
            return False
        row.request, row.last_used = None, self.stats.steps
        if not request.future.done():
            request.future.set_result(request.sampled)
        return True

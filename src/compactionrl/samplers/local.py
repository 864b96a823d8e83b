"""A sampler in this process: continuous batching over rows that rollouts own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compactionrl.config import COLDEST, NARROWEST
from compactionrl.models.policy import Chunk, Policy
from compactionrl.samplers.drawing import draw, uniforms
from compactionrl.samplers.protocol import Sampled
from compactionrl.samplers.rows import Request, Row, Rows

STEP_TOKENS = 4096
"""Most tokens that one forward computes; longer prompts take several steps while other rows go on sampling."""
TURNAROUND = 4
"""Passes of the event loop after a step that answered requests, so that the next ones join the very next step."""


@dataclass
class SamplerStats:
    """Totals since the sampler was made."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    """Tokens computed other than the one sampled in the step before: new prompt tokens, and all after new weights."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were still there."""
    steps: int = 0
    seconds: float = 0.0


class LocalSampler:
    """Samples from `model` in this process; implements `samplers.protocol.Sampler`.

    Every affinity (rollout) owns a row of the key-value cache from its first request to `release`. A request that extends
    what its row holds only computes the new tokens; after a compaction, the common prefix is kept. Each step is one
    forward over everything that is due: one token of each sampling row and the new tokens of rows that join. With more
    rollouts than `max_rows`, the row that has been idle longest is given up, and requests wait while none is idle.

    Runs inside asyncio, without threads: the same requests in the same order give bit-identical results, and a request's
    tokens depend on its neighbours only by rounding. If a step fails, every open request raises its exception. The model
    is used as it stands, on its own device: after changing its weights, call `weights_changed`.
    """

    def __init__(
        self,
        model: Policy,
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
                f"max_rows {max_rows} must be 1 or more, max_tokens_per_row {max_tokens_per_row} 2 or more"
            )
        self.max_tokens_per_row = max_tokens_per_row
        self.policy_version = 0
        self.stats = SamplerStats()
        self._cache = model.cache(max_rows, max_tokens_per_row)
        self._rows = Rows(max_rows, self._cache.cuttable)
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
            token_ids=list(token_ids),
            max_tokens=max_tokens,
            stop=frozenset(stop_token_ids),
            temperature=temperature,
            top_p=top_p,
            seed=seed % 2**64,
            affinity=affinity,
            future=asyncio.get_running_loop().create_future(),
        )
        self._rows.waiting.append(request)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._run())
            self._engine.add_done_callback(self._ended)
        try:
            return await request.future
        finally:
            self._rows.withdraw(request)

    async def release(self, affinity: str) -> None:
        """Give up the row of a rollout that has ended. Raises RuntimeError while a request of it is running."""
        row = self._rows[affinity]
        if row is not None and row.request is not None:
            raise RuntimeError(f"release of {affinity!r} while it is sampling: cancel or await the request first")
        self._rows.drop(affinity)

    def weights_changed(self, version: int) -> None:
        """The model's weights are now those of `version`: nothing computed with the old ones is used again.

        A request in the middle of sampling goes on with the new weights; `Sampled.versions` says which token had which.
        """
        self.policy_version = version
        self._rows.forget()

    @property
    def open(self) -> int:
        """Requests that have not been answered."""
        return len(self._rows.open)

    def abort(self) -> None:
        """Answer every open request with the tokens that it has; its finish is "abort"."""
        for request in self._rows.open:
            self._rows.withdraw(request)
            request.sampled.finish = "abort"
            if not request.future.done():
                request.future.set_result(request.sampled)

    async def between_steps(self, answered: int) -> None:
        """The event loop's turn before each step, behind one that answered so many requests (1 before the first).

        Subclasses may hold the next step up here.
        """
        for _ in range(TURNAROUND if answered else 1):
            await asyncio.sleep(0)

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
        if temperature != 0 and not temperature >= COLDEST:
            raise ValueError(f"temperature must be 0 (greedy) or at least {COLDEST:g}, got {temperature}")
        if not NARROWEST <= top_p <= 1:
            raise ValueError(f"top_p must lie in [{NARROWEST:g}, 1], got {top_p}")

    async def _run(self) -> None:
        """The engine: a task that lives while requests are open."""
        await self.between_steps(1)
        while self._rows.open:
            await self.between_steps(self._step())

    @property
    def busy_seconds(self) -> float:
        """Time in which nothing else in this event loop could run."""
        return self.stats.seconds

    def _ended(self, engine: asyncio.Task[None]) -> None:
        """If the engine failed, so does every open request. The cache may be half written: nothing of it is kept."""
        error = asyncio.CancelledError() if engine.cancelled() else engine.exception()
        if error is None:
            return
        for request in self._rows.clear():
            if not request.future.done():
                request.future.set_exception(error)

    @torch.inference_mode()
    def _step(self) -> int:
        """One forward for every row that has a request; returns the number of requests that were answered."""
        began = time.perf_counter()
        if self._rows.waiting:
            self.stats.reused_tokens += sum(row.cached for row in self._rows.admit())
        due = self._rows.due(STEP_TOKENS)
        ids = [token for row, chunk in due for token in row.tokens[chunk.start : chunk.start + chunk.length]]
        hidden = self._cache.forward(torch.tensor(ids, device=self.device), [chunk for _, chunk in due])
        answered = self._sample_next(due, hidden)
        self.stats.steps += 1
        self.stats.seconds += time.perf_counter() - began
        return answered

    def _sample_next(self, due: list[tuple[Row, Chunk]], hidden: torch.Tensor) -> int:
        """Sample a token in every row that is now computed to its end."""
        rows, requests, ends, end = [], [], [], -1
        for row, chunk in due:
            end += chunk.length
            row.cached += chunk.length
            self.stats.prefilled_tokens += chunk.length
            if row.pending == 0 and row.request is not None:
                rows.append(row)
                requests.append(row.request)
                ends.append(end)
        if not rows:
            return 0
        drawn = self._draw(requests, hidden[ends] @ self.model.head_weight.T)
        return sum(self._append(*item) for item in zip(rows, requests, drawn, strict=True))

    def _draw(self, requests: list[Request], logits: torch.Tensor) -> Iterable[tuple[int, float]]:
        """The next token of each request and its log-probability."""
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

    def _append(self, row: Row, request: Request, drawn: tuple[int, float]) -> bool:
        """Give a request its next token; answer it and return True if that was the last."""
        self.stats.sampled_tokens += 1
        if request.sampled.token_ids:
            self.stats.prefilled_tokens -= 1  # its token of the step before was no prompt
        row.tokens.append(drawn[0])
        if not request.add(*drawn, self.policy_version):
            return False
        row.request, row.last_used = None, self.stats.steps
        if not request.future.done():
            request.future.set_result(request.sampled)
        return True

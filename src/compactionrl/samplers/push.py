"""Weights from the trainer to the servers, and the proof that they arrived.

A server may answer 200 to a push and go on with the old weights, or with a mixture of both. So after every push it is asked
for the log-probabilities of a fixed probe: of every token of a prompt, and of one token that it samples at the sampling
temperature, as it does in rollouts. They must be the policy's own.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compactionrl.method.logprobs import token_logprobs
from compactionrl.models import save_policy
from compactionrl.samplers.protocol import SamplerRefused

PROBE_TOKENS = 128
KEPT = 2
"""Versions whose weights stay on disk: a server may still be loading the one before."""
PREFIX = "weights-"
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 1.0}
"""Most that a log-probability of the probe may differ: kernels round differently, and a probe has unlikely tokens, too."""
NOISE = {torch.float32: 2e-5, torch.bfloat16: 5e-3}
"""Changes in a log-probability that tell nothing."""
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
"""What rounding puts between two ways to compute a log-probability, on average, also where it happened to be 0 before: adapters
that begin at zero change nothing, and in bfloat16 base and adapters round otherwise than the merged weights that servers get."""


class WeightMismatch(SamplerRefused):
    """A server does not sample from the policy's weights."""


@dataclass(frozen=True)
class Probe:
    """`logprobs[i]` is the policy's of `token_ids[i + 1]`, at temperature 1; `following` [V] of every token that may come next,
    at the sampling temperature."""

    token_ids: list[int]
    logprobs: np.ndarray
    following: np.ndarray


@dataclass(frozen=True)
class Reading:
    """What a server answers to a probe: log-probabilities of its tokens but the first, and a token sampled behind them."""

    logprobs: list[float]
    token_id: int
    logprob: float


@dataclass(frozen=True, eq=False)
class Weights:
    """The policy's weights as of `version`, in a folder of safetensors. `stamp` names them, and no others ever."""

    version: int
    stamp: str
    folder: Path
    probe: Probe


class WeightPush:
    """Writes the weights of `policy` below `folder`, and judges what servers that loaded them answer.

    `tolerance` 0: by the type of the weights. `current`: the weights written last.
    """

    def __init__(self, policy: Any, folder: Path, *, temperature: float = 1.0, tolerance: float = 0.0) -> None:
        self.policy = policy
        self.folder = folder.resolve()
        self.temperature = temperature or 1.0  # greedy sampling comes with log-probabilities at 1
        self.tolerance = tolerance or TOLERANCES[policy.head_weight.dtype]
        self.noise, self.rounding = NOISE[policy.head_weight.dtype], ROUNDING[policy.head_weight.dtype]
        self.token_ids = probe_tokens(policy.config.vocab_size, policy.config.max_position_embeddings - 1)
        self.current: Weights | None = None
        self._first: Weights | None = None
        self._run = uuid.uuid4().hex

    def fit(self, context: int) -> None:
        """Before the first push: probe within `context` tokens, which may be fewer than the policy takes."""
        self.token_ids = self.token_ids[: max(2, context - 1)]

    async def publish(self, version: int) -> None:
        """Write the present weights as `version`. The policy must not be trained meanwhile; the event loop goes on."""
        self.current = await asyncio.to_thread(self._write, version)
        self._first = self._first or self.current

    def judge(self, server: str, weights: Weights, reading: Reading, before: tuple[Weights, Reading] | None) -> None:
        """Raise WeightMismatch unless `server` samples from `weights`. `before`: what it read with those of an earlier push."""
        expected, found = weights.probe.logprobs, np.array(reading.logprobs)
        if found.shape != expected.shape:
            raise WeightMismatch(f"{server} returned {len(found)} log-probabilities for a probe with {len(expected)}")
        worst = int(np.abs(found - expected).argmax())
        sampled = float(weights.probe.following[reading.token_id])
        numbers = f"{found[worst]:.5f} for token {worst + 1} of the probe, the policy {expected[worst]:.5f}"
        if abs(found[worst] - expected[worst]) > self.tolerance:
            self._refuse(server, weights, f"has log-probability {numbers}")
        if abs(reading.logprob - sampled) > self.tolerance:
            self._refuse(
                server,
                weights,
                f"has log-probability {reading.logprob:.5f} for token {reading.token_id}, which it sampled behind the probe, "
                f"the policy {sampled:.5f} at temperature {self.temperature}",
            )
        if before is not None:
            moves = before[1].logprobs, before[0].probe.logprobs, found, expected
            if stale(*moves, self.noise) or lags(*moves, self.rounding):
                self._refuse(server, weights, f"did not follow the change of the weights: it has {numbers}")
        for earlier in (self._first, before[0] if before else None):
            if earlier is not None and stale(
                earlier.probe.logprobs, earlier.probe.logprobs, found, expected, self.noise
            ):
                self._refuse(server, weights, f"still has the weights of version {earlier.version}: {numbers}")

    def _refuse(self, server: str, weights: Weights, what: str) -> None:
        raise WeightMismatch(
            f"{server} {what}: it does not sample from the weights of version {weights.version}, although it said that it had "
            f"loaded them (tolerance {self.tolerance:g}, server.probe_tolerance). Check that it computes in model.dtype, without "
            "quantisation, that it serves this model, and that the push reaches the kernels: vLLM on CPU keeps a packed copy "
            "of the weights unless the worker extension PushedWeights is loaded"
        )

    def _write(self, version: int) -> Weights:
        target = self.folder / f"{PREFIX}{version:08d}"
        partial = self.folder / f".partial-{PREFIX}"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        save_policy(self.policy, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in sorted(self.folder.glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return Weights(version, f"{self._run}-{version}", target, self._probe())

    @torch.inference_mode()
    def _probe(self) -> Probe:
        head = self.policy.head_weight
        token_ids = torch.tensor(self.token_ids, device=head.device)
        hidden = self.policy(token_ids, [len(token_ids)])
        logprobs, _ = token_logprobs(hidden[:-1], head, token_ids[1:])
        following = ((hidden[-1] @ head.T).float() / self.temperature).log_softmax(-1)
        return Probe(self.token_ids, logprobs.double().cpu().numpy(), following.cpu().numpy())


def probe_tokens(vocab_size: int, room: int) -> list[int]:
    """Any tokens, but none from the ends of the vocabulary, where special tokens are."""
    middle = range(vocab_size // 10, vocab_size - vocab_size // 10)
    return random.Random(0).choices(middle, k=max(2, min(PROBE_TOKENS, room)))


def stale(before: Any, before_expected: Any, found: np.ndarray, expected: np.ndarray, noise: float) -> bool:
    """Whether a server stayed where it was when the policy moved: nearer, by far, to its reading before than to that plus the
    policy's change. All [n]; the reading before may stand for itself, as `before_expected`, where it was not taken."""
    change, moved = expected - np.asarray(before_expected), found - np.asarray(before)
    return bool(np.abs(change).max() > noise and np.linalg.norm(moved) < 0.5 * np.linalg.norm(moved - change))


def lags(before: Any, before_expected: Any, found: np.ndarray, expected: np.ndarray, rounding: float) -> bool:
    """Whether a server's log-probabilities followed the policy's change in part only, or went elsewhere. All [n].

    What the kernels' rounding puts between server and policy, at least `rounding`, is nearly the same before and after, and so
    drops out. A part that is missing, a tenth of the change or more, is only seen where it is well above that rounding.
    """
    change, moved = expected - np.asarray(before_expected), found - np.asarray(before)
    apart = np.linalg.norm(np.maximum(rounding, np.abs(np.asarray(before) - before_expected)))
    missing, whole = np.linalg.norm(moved - change), np.linalg.norm(change)
    return bool(missing > 0.5 * whole > 2 * apart or missing > max(0.1 * whole, 4 * apart))

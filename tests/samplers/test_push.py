"""Weights on their way to servers: exact versions of every token, and no server that samples from other weights."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_servers import (
    CONTEXT,
    FakeServer,
    FakeSGLang,
    FakeVLLM,
    disconnect,
    policy_logprobs,
    running,
    tiny_policy,
)
from hypothesis import given
from hypothesis import strategies as st
from test_served import PROMPT, sample, sampler_on

from compactionrl.config import LoraConfig
from compactionrl.models import Transformer, load_policy
from compactionrl.models.lora import add_adapters
from compactionrl.samplers.http import ServerFailed, ServerUnreachable
from compactionrl.samplers.protocol import SamplerRefused
from compactionrl.samplers.push import (
    KEPT,
    PROBE_TOKENS,
    Reading,
    WeightMismatch,
    WeightPush,
    lags,
    probe_tokens,
    stale,
)
from compactionrl.samplers.served import ServedSampler

DEMO = Path(__file__).parents[2] / "src" / "compactionrl" / "bases" / "demo"


@pytest.fixture(params=[FakeVLLM, FakeSGLang])
def fake(request: Any) -> Callable[..., FakeServer]:
    return request.param


def change(policy: Transformer, size: float = 0.1, seed: int = 1) -> None:
    """Another policy: all weights move by about `size`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p += size * torch.randn(p.shape, generator=generator)


def copy(policy: Transformer) -> Transformer:
    other = tiny_policy()
    other.load_state_dict(policy.state_dict())
    return other


def train(
    servers: list[FakeServer], folder: Path, work: Callable[..., Any], *, temperature: float = 1.0, **options: Any
) -> Any:
    """Run `work(sampler, policy)` between start and close; `budget`: what a request has at most."""
    budget = options.pop("budget", CONTEXT)
    policy = tiny_policy()
    push = WeightPush(policy, folder, temperature=temperature, tolerance=options.pop("tolerance", 0.0))
    sampler = sampler_on(*servers, push=push, temperature=temperature, **options)

    async def main() -> Any:
        try:
            await sampler.start(budget)
            return await work(sampler, policy)
        finally:
            await sampler.close()

    with running(*servers):
        return asyncio.run(main())


def test_a_probe_fits_into_a_context_that_is_shorter_than_the_policys(fake: Any, tmp_path: Path) -> None:
    """Servers need no longer context than the longest window."""
    server = fake(context=24)

    async def work(sampler: ServedSampler, policy: Transformer) -> Any:
        for version in range(2):
            change(policy)
            await sampler.weights_changed(version)
            sampled = await sample(sampler, max_tokens=4)
            assert sampled.versions == [version] * 4
        assert sampler.push is not None
        assert len(sampler.push.token_ids) == 23

    train([server], tmp_path, work, budget=24)


def test_versions_are_exact_when_weights_arrive_in_the_middle(fake: Any, tmp_path: Path) -> None:
    """Every token has the log-probability that the policy of its version gives it, and no other version does."""
    servers = [fake(token_seconds=0.004) for _ in range(2)]

    async def work(sampler: ServedSampler, policy: Transformer) -> Any:
        policies = []
        rollouts: list[Any] = []
        for version in range(4):
            if version:
                change(policy, 0.3, version)
            policies.append(copy(policy))
            await sampler.weights_changed(version)
            if not version:
                rollouts = [
                    asyncio.create_task(sample(sampler, affinity=f"r{i}", seed=i, max_tokens=100, temperature=0.8))
                    for i in range(6)
                ]
            await asyncio.sleep(0.08)
        return policies, await asyncio.gather(*rollouts)

    policies, samples = train(servers, tmp_path, work, temperature=0.8)
    for sampled in samples:
        assert len(sampled.token_ids) == len(sampled.versions) == 100
        assert sampled.versions == sorted(sampled.versions)
        assert len(set(sampled.versions)) > 1
        by_version = np.array([policy_logprobs(p, PROMPT, sampled.token_ids, 0.8) for p in policies])
        error = np.abs(by_version - np.array(sampled.logprobs))
        assert error[sampled.versions, np.arange(100)].max() < 1e-4
        others = np.delete(error, sampled.versions[0], axis=0)
        assert np.median(others) > 1e-2
    assert {version for sampled in samples for version in sampled.versions} >= {0, 1, 2}


def test_a_push_reaches_every_server_and_clears_its_cache(fake: Any, tmp_path: Path) -> None:
    servers = [fake() for _ in range(3)]

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        for version in (5, 6):
            change(policy)
            await sampler.weights_changed(version)
            for server in servers:
                for name, tensor in policy.state_dict().items():
                    assert torch.equal(server.policy.state_dict()[name], tensor)
                assert not server.paused
                assert len(set(server.stamp.split("-"))) == 2
            assert (await sample(sampler)).versions == [version] * 8

    train(servers, tmp_path, work)
    clear = "/reset_prefix_cache" if fake is FakeVLLM else "/flush_cache"
    assert [sum(path == clear for path, _ in server.requests) for server in servers] == [2, 2, 2]


@pytest.mark.parametrize("loading", ["ignored", "half"])
@pytest.mark.parametrize("size", [0.3, 3e-3, 1e-4])
def test_a_server_with_other_weights_ends_the_run(fake: Any, loading: str, size: float, tmp_path: Path) -> None:
    """Also where the change is far smaller than the tolerance."""
    good, bad = fake(), fake()

    async def work(sampler: ServedSampler, policy: Transformer) -> str:
        await sampler.weights_changed(0)
        bad.loading = loading
        change(policy, size)
        with pytest.raises(WeightMismatch) as caught:
            await sampler.weights_changed(1)
        with pytest.raises(WeightMismatch):  # from here on nothing is sampled, whichever server it would come from
            await sample(sampler)
        with pytest.raises(WeightMismatch):
            await sampler.weights_changed(2)
        return str(caught.value)

    # 0.3 moves the log-probabilities by far more than any tolerance would allow; for the others it is large, as in bfloat16.
    message = train([good, bad], tmp_path, work, tolerance=0.5 if size < 0.1 else 0.0)
    assert bad.url in message
    assert "version 1" in message
    assert "PushedWeights" in message


def test_a_server_that_never_had_the_weights_is_found_by_the_first_push(fake: Any, tmp_path: Path) -> None:
    """After a resume, say: the servers have the base, and keep it."""
    server = fake(loading="ignored")

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        change(policy)
        with pytest.raises(WeightMismatch, match="log-probability"):
            await sampler.weights_changed(40)

    train([server], tmp_path, work)


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5, 0.0])
def test_right_weights_are_never_called_wrong(fake: Any, size: float, tmp_path: Path) -> None:
    server = fake()

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        for version in range(6):
            change(policy, size, version)
            await sampler.weights_changed(version)

    train([server], tmp_path, work)


def test_a_server_that_was_down_gets_the_weights_before_its_first_request(fake: Any, tmp_path: Path) -> None:
    servers = [fake(), fake()]
    away, there = servers

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        await sampler.weights_changed(0)
        await asyncio.to_thread(away.stop)
        for version in (1, 2):
            change(policy)
            await sampler.weights_changed(version)
            samples = await asyncio.gather(*(sample(sampler, affinity=f"r{i}") for i in range(8)))
            assert {v for s in samples for v in s.versions} == {version}
        away.start()
        before = len(away.samples)
        while len(away.samples) <= before + 2:
            samples = await asyncio.gather(*(sample(sampler, affinity=f"r{i}") for i in range(8)))
            assert {v for s in samples for v in s.versions} == {2}
            for s in samples:
                assert s.logprobs == pytest.approx(policy_logprobs(policy, PROMPT, s.token_ids), abs=1e-4)
        assert away.stamp == there.stamp

    train(servers, tmp_path, work)


def test_a_restart_that_nobody_noticed_is_noticed(fake: Any, tmp_path: Path) -> None:
    """Between two requests: no connection breaks in our hands, and the new process answers, with its initial weights."""
    server = fake()

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        change(policy)
        await sampler.weights_changed(1)
        for _ in range(3):
            await asyncio.to_thread(server.restart)
            one, two = await asyncio.gather(sample(sampler, affinity="a"), sample(sampler, affinity="b", seed=9))
            for s in (one, two):
                assert s.versions == [1] * 8
                assert s.logprobs == pytest.approx(policy_logprobs(policy, PROMPT, s.token_ids), abs=1e-4)
            assert server.stamp.endswith("-1")

    train([server], tmp_path, work)


def test_a_broken_connection_alone_loads_nothing_again(fake: Any, tmp_path: Path) -> None:
    server = fake()

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        await sampler.weights_changed(0)
        server.faults.append(disconnect)
        assert (await sample(sampler)).versions == [0] * 8

    train([server], tmp_path, work)
    loads = [body for path, body in server.requests if path in ("/update_weights_from_disk",) or body.get("args")]
    assert len(loads) == 1


def test_loading_that_fails_is_named_and_the_server_is_not_left_paused(fake: Any, tmp_path: Path) -> None:
    server = fake(loading="failing")

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        kind = ServerFailed if fake is FakeVLLM else SamplerRefused
        with pytest.raises(kind, match="no such folder"):
            await sampler.weights_changed(0)
        assert not server.paused

    train([server], tmp_path, work, retries=1)


@pytest.mark.parametrize("where", ["clear", "resume"])
@pytest.mark.parametrize("done", [False, True], ids=["refused", "done, but not said"])
def test_a_push_that_stops_half_way_is_done_again(fake: Any, where: str, done: bool, tmp_path: Path) -> None:
    """The weights are there, and the server says so; but what it cached with others may be, too, or it may be paused."""
    vllm = fake is FakeVLLM
    clear = "/reset_prefix_cache" if vllm else "/flush_cache"
    fails = {"clear": clear, "resume": "/resume" if vllm else "/continue_generation"}[where]

    class Failing(fake):  # type: ignore[misc, valid-type]
        broken = False
        stale_cache = False

        def load(self, folder: str, stamp: str) -> None:
            super().load(folder, stamp)
            self.stale_cache = True

        def answer(self, method: str, path: str, *rest: Any) -> tuple[int, Any]:
            fail = self.broken and path == fails and self.stamp.endswith("-1")
            if fail:
                self.broken = False
            if not fail or done:
                if path == clear:
                    self.stale_cache = False
                answer = super().answer(method, path, *rest)
            return (500, {"error": {"message": "not now"}}) if fail else answer

    server = Failing()

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        await sampler.weights_changed(0)
        change(policy)
        server.broken = True
        await asyncio.wait_for(sampler.weights_changed(1), 10)
        assert not server.broken, "it did fail"
        assert not server.paused
        assert not server.stale_cache
        sampled = await asyncio.wait_for(sample(sampler), 10)
        assert sampled.versions == [1] * 8

    train([server], tmp_path, work)


def test_a_vllm_server_that_cannot_take_weights_says_what_to_start_it_with(tmp_path: Path) -> None:
    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        with pytest.raises(SamplerRefused, match="--worker-extension-cls"):
            await sampler.weights_changed(0)

    train([FakeVLLM(loading="missing")], tmp_path, work)


def test_a_vllm_server_outside_of_development_mode_is_refused(tmp_path: Path) -> None:
    class Production(FakeVLLM):
        def answer(self, method: str, path: str, *rest: Any) -> tuple[int, Any]:
            known = path in ("/v1/models", "/v1/completions")
            return super().answer(method, path, *rest) if known else (404, {"detail": "Not Found"})

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        raise AssertionError("must not start")

    with pytest.raises(SamplerRefused, match="VLLM_SERVER_DEV_MODE=1"):
        train([Production()], tmp_path, work)


def test_a_server_that_was_left_paused_is_woken(fake: Any, tmp_path: Path) -> None:
    server = fake()
    server.pause()

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        await sampler.weights_changed(0)
        assert len((await sample(sampler)).token_ids) == 8

    train([server], tmp_path, work)


def test_requests_that_a_paused_server_holds_back_are_asked_again(fake: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """One that does not end what it samples: it is cut off after a while, and nothing of it is taken."""
    monkeypatch.setattr("compactionrl.samplers.served.DRAIN_SECONDS", 0.1)

    class Stubborn(fake):  # type: ignore[misc, valid-type]
        def pause(self) -> None:
            self.paused = True

    server = Stubborn(token_seconds=0.02)

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        await sampler.weights_changed(0)
        rollout = asyncio.create_task(sample(sampler, max_tokens=40))
        await asyncio.sleep(0.1)
        change(policy)
        await sampler.weights_changed(1)
        sampled = await rollout
        assert sampled.versions == [1] * 40
        assert sampled.logprobs == pytest.approx(policy_logprobs(policy, PROMPT, sampled.token_ids), abs=1e-4)

    # While it still samples, it does not clear its cache; the push waits for that.
    train([server], tmp_path, work, retries=8)


def test_nothing_is_sampled_before_the_first_push(fake: Any, tmp_path: Path) -> None:
    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        with pytest.raises(SamplerRefused, match="weights_changed"):
            await sample(sampler)

    train([fake()], tmp_path, work)


def test_a_push_with_every_server_down_is_unreachable(fake: Any, tmp_path: Path) -> None:
    servers = [fake(), fake()]

    async def work(sampler: ServedSampler, policy: Transformer) -> None:
        for server in servers:
            await asyncio.to_thread(server.stop)
        try:
            with pytest.raises(ServerUnreachable):
                await sampler.weights_changed(0)
        finally:
            for server in servers:
                server.start()

    train(servers, tmp_path, work, retries=1)


def test_every_number_of_a_reading_is_judged(tmp_path: Path) -> None:
    push = WeightPush(tiny_policy(), tmp_path, temperature=0.5)
    asyncio.run(push.publish(0))
    weights = push.current
    assert weights is not None
    probe = weights.probe
    truth = Reading(probe.logprobs.tolist(), 9, policy_logprobs(tiny_policy(), probe.token_ids, [9], 0.5)[0])
    push.judge("here", weights, truth, None)
    for i in (0, 31, 125):
        logprobs = list(truth.logprobs)
        logprobs[i] -= 1.5 * push.tolerance
        with pytest.raises(WeightMismatch, match=f"here has log-probability .* for token {i + 1} of the probe"):
            push.judge("here", weights, replace(truth, logprobs=logprobs), None)
    at_one = policy_logprobs(tiny_policy(), probe.token_ids, [9], 1.0)[0]
    with pytest.raises(WeightMismatch, match=r"at temperature 0\.5"):
        push.judge("here", weights, replace(truth, logprob=at_one), None)
    with pytest.raises(WeightMismatch, match="125 log-probabilities for a probe with 126"):
        push.judge("here", weights, replace(truth, logprobs=truth.logprobs[:-1]), None)


def test_a_server_that_went_back_to_the_first_weights_is_found(tmp_path: Path) -> None:
    """Also where the change since then is far smaller than the tolerance, and there is no earlier reading to compare with."""
    policy = tiny_policy()
    push = WeightPush(policy, tmp_path, tolerance=0.5)
    asyncio.run(push.publish(0))
    first = push.current
    change(policy, 1e-3)
    asyncio.run(push.publish(1))
    assert first is not None
    assert push.current is not None
    old = Reading(first.probe.logprobs.tolist(), 9, float(first.probe.following[9]))
    with pytest.raises(WeightMismatch, match="still has the weights of version 0"):
        push.judge("here", push.current, old, None)


def test_folders_are_whole_and_two_are_kept(tmp_path: Path) -> None:
    policy = tiny_policy()
    push = WeightPush(policy, tmp_path / "deep" / "weights")
    (tmp_path / "deep" / "weights").mkdir(parents=True)
    kept = tmp_path / "deep" / "weights" / "notes.txt"
    kept.write_text("mine")
    for version in (0, 1, 2, 2):
        change(policy)
        asyncio.run(push.publish(version))
        assert push.current is not None
        loaded = load_policy(push.current.folder)
        assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), loaded.parameters(), strict=True))
    assert sorted(path.name for path in push.folder.iterdir()) == ["notes.txt", "weights-00000001", "weights-00000002"]
    assert KEPT == 2


def test_two_runs_never_share_a_stamp(tmp_path: Path) -> None:
    pushes = [WeightPush(tiny_policy(), tmp_path / name) for name in "ab"]
    stamps = set()
    for push in pushes:
        asyncio.run(push.publish(3))
        assert push.current is not None
        stamps.add(push.current.stamp)
    assert len(stamps) == 2


@pytest.mark.parametrize(("vocab_size", "room"), [(40, 5), (406, 511), (151_936, 40_959)])
def test_probes_have_ordinary_tokens_and_fit(vocab_size: int, room: int) -> None:
    tokens = probe_tokens(vocab_size, room)
    assert len(tokens) == min(PROBE_TOKENS, room)
    assert min(tokens) >= vocab_size // 10
    assert max(tokens) < vocab_size * 0.91
    assert tokens == probe_tokens(vocab_size, room)


VECTORS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@given(VECTORS, st.floats(1e-4, 1.0), st.floats(0, 0.1), st.floats(0, 0.5))
def test_who_follows_is_never_blamed(rng: Any, size: float, bias: float, jitter: float) -> None:
    """Whatever lies between server and policy, as long as it does not move by more than itself."""
    old = rng.normal(-10, 3, 63)
    new = old + size * rng.normal(size=63)
    constant = bias * rng.normal(size=63)
    rounding = np.abs(constant).max() * jitter * rng.uniform(-1, 1, 63)
    assert not lags(old + constant, old, new + constant + rounding, new, 1e-5)


@given(VECTORS, st.floats(1e-4, 1.0), st.floats(0, 1.0))
def test_who_stays_is_always_found(rng: Any, size: float, bias: float) -> None:
    old = rng.normal(-10, 3, 63)
    new = old + size * rng.normal(size=63)
    before = old + bias * rng.normal(size=63)
    assert stale(before, old, before, new, 1e-5)
    assert stale(before, old, before + 0.2 * size * rng.normal(size=63), new, 1e-5)


@given(VECTORS, st.floats(1e-2, 1.0), st.floats(0.0, 0.85))
def test_who_follows_in_part_is_found_where_the_rounding_is_small(rng: Any, size: float, share: float) -> None:
    old = rng.normal(-10, 3, 63)
    change = size * rng.normal(size=63)
    before = old + 1e-3 * size * rng.normal(size=63)
    assert lags(before, old, before + share * change, old + change, 1e-5)


def test_merged_adapters_are_the_policy_in_bfloat16_too(tmp_path: Path) -> None:
    """The first push is of the base, on which a server of the same kernels agrees to the last bit; from then on both round."""
    policy = load_policy(DEMO, dtype=torch.bfloat16)
    add_adapters(policy, LoraConfig(rank=16))
    push = WeightPush(policy, tmp_path)
    generator, before = torch.Generator().manual_seed(0), None
    for version in range(4):
        asyncio.run(push.publish(version))
        weights = push.current
        assert weights is not None
        read = WeightPush(load_policy(weights.folder, dtype=torch.bfloat16), tmp_path)._probe()
        reading = Reading(read.logprobs.tolist(), 5, float(read.following[5]))
        push.judge("server", weights, reading, before)
        before = weights, reading
        with torch.no_grad():
            for p in policy.parameters():
                if p.requires_grad:
                    p += 1e-4 * torch.randn(p.shape, generator=generator).sign().bfloat16()


def test_no_change_says_nothing() -> None:
    same = np.zeros(63)
    assert not stale(same, same, same, same, 1e-5)
    assert not lags(same, same, same + 1e-6, same + 2e-6, 1e-5)

"""Continuous batching over rows: right log-probabilities, whatever is cached and whoever the neighbours are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from compactionrl.models import ModelConfig, Transformer, save_policy
from compactionrl.samplers import local
from compactionrl.samplers.drawing import uniforms
from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled

VOCAB = 61
CONFIG = ModelConfig("Qwen3ForCausalLM", VOCAB, 32, 48, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.15)
CAPACITY = 128


def new_model(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(CONFIG)


MODEL = new_model()


def new_sampler(model: Transformer = MODEL, max_rows: int = 8) -> LocalSampler:
    return LocalSampler(model, max_rows=max_rows, max_tokens_per_row=CAPACITY)


def ask(
    sampler: LocalSampler, prompt: list[int], max_tokens: int = 8, seed: int = 0, affinity: str = "a", **changes: object
) -> Awaitable[Sampled]:
    settings = {"stop_token_ids": [], "temperature": 1.0, "top_p": 1.0} | changes
    return sampler.sample(prompt, max_tokens=max_tokens, seed=seed, affinity=affinity, **settings)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


async def play(
    sampler: LocalSampler, number: int, turns: int = 4, temperature: float = 1.0, top_p: float = 1.0
) -> list:
    """A rollout: turns of different lengths, halfway a compaction to a new window that shares the first tokens.

    Returns (the whole sequence, number of sampled tokens at its end, log-probabilities) of every turn.
    """
    rng = random.Random(number)
    window = prompt_of(rng.randint(3, 30), number)
    head = window[:3]
    record = []
    for turn in range(turns):
        if turn == turns // 2:
            window = head + rng.choices(range(VOCAB), k=rng.randint(1, 20))
        sampled = await ask(
            sampler, window, rng.randint(1, 9), 1000 * number + turn, str(number), temperature=temperature, top_p=top_p
        )
        window = window + sampled.token_ids
        record.append((window, len(sampled.token_ids), sampled.logprobs))
        window = window + rng.choices(range(VOCAB), k=rng.randint(0, 6))
    await sampler.release(str(number))
    return record


async def play_all(sampler: LocalSampler, numbers: range, **settings: float) -> list:
    return await asyncio.gather(*(play(sampler, number, **settings) for number in numbers))


def reference_logprobs(model: Callable, window: list[int], n: int, temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([window])).logits[0, -n - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(window[-n:])[:, None])[:, 0]


def assert_same(records: list, others: list) -> None:
    for (window, n, logprobs), (other_window, other_n, other_logprobs) in zip(records, others, strict=True):
        assert (window, n) == (other_window, other_n)
        assert logprobs == pytest.approx(other_logprobs, abs=1e-5)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.3, 0.7)])
@pytest.mark.parametrize("max_rows", [16, 3])
def test_logprobs_are_those_of_a_plain_forward(temperature: float, top_p: float, max_rows: int, tmp_path: Path) -> None:
    save_policy(MODEL, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    records = asyncio.run(play_all(new_sampler(max_rows=max_rows), range(12), temperature=temperature, top_p=top_p))
    for window, n, logprobs in chain.from_iterable(records):
        expected = reference_logprobs(hf, window, n, temperature)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


def test_a_rollout_does_not_depend_on_its_neighbours() -> None:
    together = asyncio.run(play_all(new_sampler(max_rows=32), range(31)))
    for number in (0, 13, 30):
        assert_same(asyncio.run(play(new_sampler(), number)), together[number])


def test_few_rows_change_nothing_but_the_order() -> None:
    together = asyncio.run(play_all(new_sampler(max_rows=16), range(12)))
    crowded = asyncio.run(play_all(new_sampler(max_rows=2), range(12)))
    for one, other in zip(together, crowded, strict=True):
        assert_same(one, other)


def test_the_same_requests_give_bit_identical_results() -> None:
    assert asyncio.run(play_all(new_sampler(max_rows=5), range(12))) == asyncio.run(
        play_all(new_sampler(max_rows=5), range(12))
    )


def test_seeds_give_different_samples() -> None:
    async def run() -> list[Sampled]:
        sampler = new_sampler()
        return [await ask(sampler, [1, 2, 3], 20, seed) for seed in (1, 2, 1, -1, 2**64 + 1)]

    one, two, again, negative, wrapped = [sampled.token_ids for sampled in asyncio.run(run())]
    assert one == again == wrapped
    assert len({tuple(ids) for ids in (one, two, negative)}) == 3


def test_token_i_of_a_response_uses_draw_i_of_its_seed() -> None:
    model = new_model()
    torch.nn.init.zeros_(model.head_weight)  # every token equally likely: the draw alone decides
    sampled = asyncio.run(ask(new_sampler(model), [1, 2], 50, seed=7))
    draws = uniforms(np.full(50, 7, dtype=np.uint64), np.arange(50, dtype=np.uint64))
    assert sampled.token_ids == [int(draw * VOCAB) for draw in draws]


def test_greedy_takes_the_most_likely_token() -> None:
    sampled = asyncio.run(ask(new_sampler(), [5, 6, 7], 10, temperature=0.0))
    window = [5, 6, 7]
    for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
        logprobs = (MODEL(torch.tensor(window), [len(window)])[-1] @ MODEL.head_weight.T).log_softmax(-1).detach()
        assert token == int(logprobs.argmax())
        assert logprob == pytest.approx(float(logprobs[token]), abs=1e-5)
        window.append(token)


def test_stop_token_is_the_last_one_and_length_ends_the_rest() -> None:
    async def run() -> tuple[Sampled, Sampled]:
        free = await ask(new_sampler(), [1, 2, 3], 20)
        return free, await ask(new_sampler(), [1, 2, 3], 20, stop_token_ids=[free.token_ids[6], VOCAB + 5])

    free, stopped = asyncio.run(run())
    assert (free.finish, len(free.token_ids)) == ("length", 20)
    first = free.token_ids.index(free.token_ids[6])
    assert stopped.finish == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1


def test_extension_reuses_the_row_and_compaction_its_common_prefix() -> None:
    async def run() -> None:
        sampler = new_sampler()
        first = await ask(sampler, prompt_of(20, 0), 5)
        assert (sampler.stats.prefilled_tokens, sampler.stats.reused_tokens) == (20, 0)
        window = prompt_of(20, 0) + first.token_ids + [9, 9, 9]
        await ask(sampler, window, 5)
        # Of 28 tokens the row holds 24: the last sampled one was never computed.
        assert (sampler.stats.prefilled_tokens, sampler.stats.reused_tokens) == (24, 24)
        compacted = [*window[:7], (window[7] + 1) % VOCAB, 3, 4, 5]
        await ask(sampler, compacted, 5)
        assert (sampler.stats.prefilled_tokens, sampler.stats.reused_tokens) == (28, 31)
        await ask(sampler, compacted, 5)  # nothing new: the last token is computed again for its logits
        assert (sampler.stats.prefilled_tokens, sampler.stats.reused_tokens) == (29, 41)
        assert sampler.stats.sampled_tokens == 20
        assert sampler.stats.steps == 20

    asyncio.run(run())


def test_released_and_evicted_rows_are_not_reused() -> None:
    async def run() -> None:
        sampler = new_sampler(max_rows=2)
        for affinity in "abc":  # c evicts a, which has been idle longest
            await ask(sampler, [1, 2, 3, 4], 2, affinity=affinity)
        await ask(sampler, [1, 2, 3, 4], 2, affinity="b")
        assert sampler.stats.reused_tokens == 3
        await ask(sampler, [1, 2, 3, 4], 2, affinity="a")
        assert sampler.stats.reused_tokens == 3
        await sampler.release("a")
        await ask(sampler, [1, 2, 3, 4], 2, affinity="a")
        assert sampler.stats.reused_tokens == 3
        await sampler.release("never seen")

    asyncio.run(run())


def test_a_newcomer_does_not_take_the_row_of_a_rollout_that_goes_on() -> None:
    async def run() -> None:
        sampler = new_sampler(max_rows=2)
        for affinity in "ab":
            await ask(sampler, [1, 2, 3, 4], 2, affinity=affinity)
        await asyncio.gather(*(ask(sampler, [1, 2, 3, 4, 5], 2, affinity=affinity) for affinity in "ca"))
        assert sampler.stats.reused_tokens == 4

    asyncio.run(run())


def test_new_weights_make_every_cached_key_stale() -> None:
    async def turns(sampler: LocalSampler, model: Transformer, change: bool) -> Sampled:
        window = prompt_of(20, 1)
        if change:
            await ask(sampler, window, 5)
            model.load_state_dict(new_model(1).state_dict())
            sampler.weights_changed(3)
        return await ask(sampler, window, 10, seed=9)

    model = new_model(0)
    changed = asyncio.run(turns(new_sampler(model), model, change=True))
    fresh = asyncio.run(turns(new_sampler(new_model(1)), model, change=False))
    assert changed.token_ids == fresh.token_ids
    assert changed.logprobs == fresh.logprobs
    assert set(changed.versions) == {3}


def test_weights_that_change_in_the_middle_of_a_response() -> None:
    """Tokens after the change are those of the new weights over the whole sequence, and say so."""
    model, other = new_model(0), new_model(1)

    async def run() -> Sampled:
        sampler = new_sampler(model)
        request = asyncio.create_task(ask(sampler, prompt_of(10, 2), 12))
        while sampler.stats.sampled_tokens < 5:
            await asyncio.sleep(0)
        model.load_state_dict(other.state_dict())
        sampler.weights_changed(1)
        sampled = await request
        assert (sampler.stats.prefilled_tokens, sampler.stats.sampled_tokens) == (10 + 14, 12)
        return sampled

    sampled = asyncio.run(run())
    assert sampled.versions == [0] * 5 + [1] * 7
    window = prompt_of(10, 2) + sampled.token_ids
    for start, end, weights in [(0, 5, new_model(0)), (5, 12, other)]:
        logits = weights(torch.tensor(window), [len(window)]) @ weights.head_weight.T
        expected = logits[9:-1].log_softmax(-1).gather(-1, torch.tensor(sampled.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sampled.logprobs)[start:end], expected[start:end], rtol=0, atol=1e-5)


def test_long_prompts_are_computed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = asyncio.run(play_all(new_sampler(), range(8)))
    for budget in (1, 7, 16):
        monkeypatch.setattr(local, "STEP_TOKENS", budget)
        for one, other in zip(whole, asyncio.run(play_all(new_sampler(), range(8))), strict=True):
            assert_same(one, other)


def test_requests_of_one_rollout_are_served_one_after_the_other() -> None:
    async def run() -> list[Sampled]:
        sampler = new_sampler()
        return await asyncio.gather(*(ask(sampler, [1, 2, 3 + i], 6, seed=i) for i in range(4)))

    for i, sampled in enumerate(asyncio.run(run())):
        assert sampled.token_ids == asyncio.run(ask(new_sampler(), [1, 2, 3 + i], 6, seed=i)).token_ids


def test_rollouts_that_come_while_others_sample_join_the_next_step() -> None:
    async def run() -> None:
        sampler = new_sampler()
        early = asyncio.create_task(ask(sampler, [1, 2], 20, affinity="early"))
        while sampler.stats.steps < 10:
            await asyncio.sleep(0)
        await ask(sampler, [3, 4], 5, affinity="late")
        assert sampler.stats.steps == 15
        assert not early.done()
        await early
        assert sampler.stats.steps == 20

    asyncio.run(run())


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_cancelled_request_frees_its_row(steps_before: int) -> None:
    async def run() -> None:
        sampler = new_sampler(max_rows=1)
        doomed = asyncio.create_task(ask(sampler, prompt_of(5, 0), 100, affinity="doomed"))
        queued = asyncio.create_task(ask(sampler, prompt_of(5, 0), 100, affinity="queued"))
        other = asyncio.create_task(ask(sampler, prompt_of(6, 1), 4, affinity="other"))
        await asyncio.sleep(0)
        while sampler.stats.steps < steps_before:
            await asyncio.sleep(0)
        doomed.cancel()
        queued.cancel()
        sampled = await other
        assert sampler.stats.steps <= steps_before + 5
        assert sampled == await ask(new_sampler(), prompt_of(6, 1), 4)
        await sampler.release("doomed")
        for task in (doomed, queued):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_a_failing_step_reaches_every_waiting_request_and_the_sampler_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        sampler = new_sampler(max_rows=2)
        before = await ask(sampler, prompt_of(10, 0), 5, affinity="0")
        with monkeypatch.context() as patch:
            patch.setattr(local, "draw", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
            asked = [ask(sampler, prompt_of(10, 0), 5, affinity=str(i)) for i in range(5)]
            results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        assert [str(result) for result in results] == ["no room"] * 5
        assert await ask(sampler, prompt_of(10, 0), 5, affinity="0") == before

    asyncio.run(run())


def test_requests_end_with_the_engine_when_it_is_cancelled() -> None:
    async def run() -> None:
        request = asyncio.create_task(ask(new_sampler(), [1, 2], 100))
        await asyncio.sleep(0)
        for engine in asyncio.all_tasks() - {request, asyncio.current_task()}:
            engine.cancel()
        done, _ = await asyncio.wait([request], timeout=10)
        assert done
        assert request.cancelled()

    asyncio.run(run())


def test_release_while_sampling_is_refused() -> None:
    async def run() -> None:
        sampler = new_sampler()
        request = asyncio.create_task(ask(sampler, [1, 2], 50))
        while not sampler.stats.steps:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="while it is sampling"):
            await sampler.release("a")
        await request

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "empty"),
        ([1] * CAPACITY, {"max_tokens": 1}, "do not fit"),
        ([1], {"max_tokens": CAPACITY}, "do not fit"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([VOCAB], {}, "token ids"),
        ([-1], {}, "token ids"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": 1e-46}, "temperature must be 0 .* or at least 0.001"),  # 0 in float32: greedy unasked
        ([1], {"temperature": 1e-40}, "temperature must be 0 .* or at least 0.001"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1e-46}, "top_p must lie in .1e-06, 1"),  # 0 in float32: a nucleus of no token
        ([1], {"top_p": float("nan")}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(ask(new_sampler(), prompt, **changes))


def test_a_row_can_be_filled_to_the_last_token() -> None:
    sampled = asyncio.run(ask(new_sampler(), prompt_of(28, 0), CAPACITY - 28))
    assert len(sampled.token_ids) == 100


def test_one_sampler_serves_several_event_loops() -> None:
    sampler = new_sampler()
    assert asyncio.run(ask(sampler, [1, 2, 3])) == asyncio.run(ask(sampler, [1, 2, 3]))

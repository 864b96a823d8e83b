"""The token route: what a LocalSampler in this process would have given, token for token, in vLLM's shape."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving_harness import LENGTH, PROMPT, Running, all_logprobs, in_process, running, stream

from compactionrl.build import DEMO
from compactionrl.config import ServerConfig
from compactionrl.models import load_policy
from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled, SamplerRefused
from compactionrl.samplers.vllm import VLLMSampler


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.7, "top_p": 0.8},
        {"temperature": 0.3, "seed": 2**63 + 5, "max_tokens": 40},
        {"temperature": 2.0, "seed": -3},
    ],
)
def test_tokens_and_logprobs_are_the_local_sampler_s(demo: Running, options: dict[str, Any]) -> None:
    options = {"seed": 11, "max_tokens": 24, "ignore_eos": True} | options
    [choice] = demo.complete(**options)["choices"]
    options.pop("ignore_eos")
    expected = in_process(**options, stop_token_ids=[])
    assert choice["token_ids"] == expected.token_ids
    assert choice["logprobs"]["token_logprobs"] == expected.logprobs
    assert choice["finish_reason"] == "length"
    assert choice["prompt_token_ids"] == PROMPT


def test_many_at_a_time_are_what_each_alone_would_be(demo: Running) -> None:
    prompts = [[398, 300 + i, 20 + i, 44, 398] * (1 + i % 3) for i in range(12)]

    def ask(i: int) -> Any:
        options = {"seed": i, "temperature": 1.5, "max_tokens": 30 + i, "ignore_eos": True}
        headers = {"X-Session-ID": f"rollout {i}"}
        body = {"prompt": prompts[i], "logprobs": 0, "return_token_ids": True, **options}
        return demo.post("/v1/completions", body, headers=headers).json()["choices"][0]

    before = demo.model.engine.stats.steps
    with ThreadPoolExecutor(12) as pool:
        choices = list(pool.map(ask, range(12)))
    for i, choice in enumerate(choices):
        expected = in_process(prompts[i], seed=i, temperature=1.5, max_tokens=30 + i, stop_token_ids=[])
        assert choice["token_ids"] == expected.token_ids
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert demo.model.engine.stats.steps - before < sum(30 + i for i in range(12)) / 2  # they were batched


def test_sessions_keep_what_they_have_computed(demo: Running) -> None:
    first = demo.complete(seed=1, max_tokens=8, ignore_eos=True, session_id="window")["choices"][0]["token_ids"]
    reused = demo.model.engine.stats.reused_tokens
    longer = [*PROMPT, *first, 398, 301]
    second = demo.complete(longer, seed=2, max_tokens=4, ignore_eos=True, session_id="window")["choices"][0]
    assert demo.model.engine.stats.reused_tokens - reused == len(PROMPT) + 7  # the last token had no successor yet
    assert second["token_ids"] == in_process(longer, seed=2, max_tokens=4, stop_token_ids=[]).token_ids


def test_a_stop_token_is_returned_but_not_spoken(demo: Running) -> None:
    """As in vLLM: `token_ids` has it, with its log-probability; `text` only if include_stop_str_in_output is true."""
    free = in_process(seed=4, temperature=2.0, max_tokens=60, stop_token_ids=[])
    stop = free.token_ids[9]
    length = free.token_ids.index(stop) + 1
    options = {"seed": 4, "temperature": 2.0, "max_tokens": 60, "stop_token_ids": [stop], "ignore_eos": True}
    [choice] = demo.complete(**options)["choices"]
    assert choice["token_ids"] == free.token_ids[:length]
    assert choice["logprobs"]["token_logprobs"] == free.logprobs[:length]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    spell = demo.model.chat.tokenizer.base.decode
    assert choice["text"] == spell(free.token_ids[: length - 1], skip_special_tokens=True)
    [loud] = demo.complete(**options, include_stop_str_in_output=True, skip_special_tokens=False)["choices"]
    assert loud["text"] == spell(free.token_ids[:length])


def test_the_model_s_own_end_ends_a_response(demo: Running) -> None:
    chat = demo.model.chat
    prompt = [i for span in chat.prompt([{"role": "user", "content": "next"}]) for i in span.ids]
    reply = demo.complete(prompt, temperature=0, max_tokens=40)
    [choice] = reply["choices"]
    assert choice["token_ids"][-1] == 399
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    n = len(choice["token_ids"])
    assert reply["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": n,
        "total_tokens": len(prompt) + n,
    }
    [on] = demo.complete(prompt, temperature=0, max_tokens=40, ignore_eos=True)["choices"]
    assert len(on["token_ids"]) == 40


def test_echo_gives_the_logprobs_of_the_prompt(demo: Running) -> None:
    prompt = [398, 5, 280, 44, 301, 17, 220, 398, 11, 390]
    [choice] = demo.complete(prompt, echo=True, max_tokens=5, seed=2, ignore_eos=True)["choices"]
    ids = [*prompt, *choice["token_ids"]]
    assert len(choice["token_ids"]) == 5
    expected = all_logprobs(ids)
    first, *found = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert found == pytest.approx([expected[i, token].item() for i, token in enumerate(ids[1:])], abs=2e-5)
    assert choice["text"] == demo.model.chat.tokenizer.base.decode(ids, skip_special_tokens=True)


def test_a_prompt_alone_can_be_scored(demo: Running) -> None:
    [choice] = demo.complete(echo=True, max_tokens=0)["choices"]
    assert choice["token_ids"] == []
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT)
    full = [7] * LENGTH
    [choice] = demo.complete(full, echo=True, max_tokens=0)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == LENGTH


def test_prompt_logprobs_by_token_id(demo: Running) -> None:
    prompt = [398, 5, 280, 44]
    [choice] = demo.complete(prompt, prompt_logprobs=3, max_tokens=1, temperature=0.5)["choices"]
    first, *positions = choice["prompt_logprobs"]
    assert first is None
    expected = all_logprobs(prompt)  # of the prompt, whatever the temperature
    for i, entries in enumerate(positions):
        order = expected[i].argsort(descending=True).tolist()
        assert set(entries) == {str(token) for token in {*order[:3], prompt[i + 1]}}
        for token, entry in entries.items():
            assert entry["logprob"] == pytest.approx(expected[i, int(token)].item(), abs=2e-5)
            assert entry["rank"] == order.index(int(token)) + 1
            assert entry["decoded_token"] == demo.model.chat.tokenizer.base.decode([int(token)])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_alternatives_are_at_the_sampling_temperature(demo: Running, temperature: float) -> None:
    options = {"logprobs": 3, "temperature": temperature, "return_tokens_as_token_ids": True, "ignore_eos": True}
    [choice] = demo.complete(**options, max_tokens=4, seed=5)["choices"]
    ids = [*PROMPT, *choice["token_ids"]]
    expected = all_logprobs(ids, temperature=temperature or 1.0)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for i, alternatives in enumerate(choice["logprobs"]["top_logprobs"]):
        row = expected[len(PROMPT) - 1 + i]
        best = row.topk(3).indices.tolist()
        assert set(alternatives) == {f"token_id:{token}" for token in {*best, choice["token_ids"][i]}}
        assert alternatives == pytest.approx({k: row[int(k[9:])].item() for k in alternatives}, abs=2e-5)


def test_texts_and_batches_and_several_responses(demo: Running) -> None:
    base = demo.model.chat.tokenizer.base
    texts = ["open n7 next", "found hat5<|im_end|>"]
    options = {"max_tokens": 6, "temperature": 2.0, "ignore_eos": True}
    reply = demo.complete(texts, n=2, seed=40, **options)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    prompts = [base.encode(text) for text in texts]
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [p for p in prompts for _ in range(2)]
    assert prompts[1][-1] == 399  # a text may spell special tokens, as in vLLM
    for choice, seed in zip(reply["choices"], [40, 41, 40, 41], strict=True):
        [alone] = demo.complete(choice["prompt_token_ids"], seed=seed, **options)["choices"]
        assert choice["token_ids"] == alone["token_ids"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert reply["usage"]["completion_tokens"] == 24


def test_what_is_not_said_is_as_in_vllm(demo: Running) -> None:
    reply = demo.post("/v1/completions", {"prompt": PROMPT, "ignore_eos": True}).json()
    [choice] = reply["choices"]
    assert reply["usage"]["completion_tokens"] == 16
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    assert demo.complete([7] * 500, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 12
    seeds = [demo.complete(temperature=2.0, ignore_eos=True)["choices"][0]["token_ids"] for _ in range(2)]
    assert seeds[0] != seeds[1]  # no seed: another stream each time


def test_a_stream_says_the_same(demo: Running) -> None:
    body = {"prompt": PROMPT, "seed": 3, "n": 2, "logprobs": 0, "return_token_ids": True}
    whole = demo.post("/v1/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = stream(demo.post("/v1/completions", body | options))
    assert [chunk["choices"] for chunk in chunks] == [[choice] for choice in whole["choices"]]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert len(stream(demo.post("/v1/completions", body | {"stream": True}))) == 2


def test_a_session_that_is_busy_lends_no_row(demo: Running) -> None:
    """Two requests of one user at the same time both run, and nothing is left behind."""

    def ask(seed: int) -> list[int]:
        return demo.complete(seed=seed, temperature=2.0, max_tokens=60, ignore_eos=True, user="u")["choices"][0][
            "token_ids"
        ]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, range(6)))
    assert found == [in_process(seed=i, temperature=2.0, max_tokens=60, stop_token_ids=[]).token_ids for i in range(6)]
    assert not demo.model.sessions.busy
    assert "session u" in demo.model.sessions.idle


async def through(url: str, *requests: dict[str, Any], budget: int = 128, temperature: float = 1.0) -> list[Sampled]:
    sampler = VLLMSampler(ServerConfig(urls=[url]), vocab_size=406, temperature=temperature)
    try:
        await sampler.start(budget)
        return [await sampler.sample(**request) for request in requests]
    finally:
        await sampler.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_our_vllm_sampler_takes_it_for_vllm(demo: Running, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "top_p": 1.0, "max_tokens": 30, "stop_token_ids": [399, 300]}
    prompts = [PROMPT, [*PROMPT, 301, 44, 45]]
    requests = [{"token_ids": p, "seed": 6, "affinity": "r", **options} for p in prompts]
    found = asyncio.run(through(demo.url, *requests, temperature=temperature))
    local = LocalSampler(load_policy(DEMO), max_tokens_per_row=LENGTH)

    async def expected() -> list[Sampled]:
        return [await local.sample(**request) for request in requests]

    assert found == asyncio.run(expected())


def test_a_budget_that_does_not_fit_is_refused_by_our_vllm_sampler(demo: Running) -> None:
    with pytest.raises(SamplerRefused, match=f"{LENGTH} tokens, but {LENGTH + 1} are needed"):
        asyncio.run(through(demo.url, budget=LENGTH + 1))

"""The contract of samplers on servers, the same for vLLM and SGLang: exact tokens, exact log-probabilities, named errors."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_servers import (
    CONTEXT,
    VOCAB,
    FakeServer,
    FakeSGLang,
    FakeVLLM,
    Fault,
    Handler,
    disconnect,
    policy_logprobs,
    running,
    settings,
    status,
    tiny_policy,
)

from compactionrl.build import build_sampler
from compactionrl.config import ConfigError, load_config
from compactionrl.samplers.http import MalformedReply, ServerUnreachable
from compactionrl.samplers.protocol import Sampled, SamplerError, SamplerRefused
from compactionrl.samplers.push import WeightPush
from compactionrl.samplers.served import ServedSampler, stream_seed
from compactionrl.samplers.sglang import SGLangSampler
from compactionrl.samplers.vllm import VLLMSampler

KINDS: dict[str, tuple[type[FakeServer], type[ServedSampler]]] = {
    "vllm": (FakeVLLM, VLLMSampler),
    "sglang": (FakeSGLang, SGLangSampler),
}
PROMPT = [7, 3, 9, 30]


@pytest.fixture(params=KINDS)
def kind(request: Any) -> str:
    return request.param


def sampler_on(
    *servers: FakeServer, push: WeightPush | None = None, temperature: float = 1.0, **options: Any
) -> ServedSampler:
    kind = VLLMSampler if isinstance(servers[0], FakeVLLM) else SGLangSampler
    return kind(settings(*servers, **options), vocab_size=VOCAB, temperature=temperature, push=push, first_pause=0.01)


async def sample(sampler: ServedSampler, prompt: list[int] = PROMPT, **changes: Any) -> Sampled:
    options = {
        "max_tokens": 8,
        "stop_token_ids": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 4,
        "affinity": "rollout",
    }
    return await sampler.sample(prompt, **(options | changes))


def play(sampler: ServedSampler, *requests: dict[str, Any], budget: int = CONTEXT) -> list[Sampled]:
    """Start, sample one after the other, close."""

    async def main() -> list[Sampled]:
        try:
            await sampler.start(budget)
            return [await sample(sampler, **request) for request in requests]
        finally:
            await sampler.close()

    return asyncio.run(main())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_tokens_and_logprobs_are_the_policy_s(kind: str, temperature: float) -> None:
    fake, _ = KINDS[kind]
    server = fake()
    with running(server):
        [sampled] = play(sampler_on(server), {"temperature": temperature, "max_tokens": 20})
    assert sampled.finish == "length"
    assert len(sampled.token_ids) == 20
    assert sampled.logprobs == pytest.approx(
        policy_logprobs(tiny_policy(), PROMPT, sampled.token_ids, temperature), abs=1e-5
    )
    assert sampled.versions == [0] * 20


def test_the_seed_decides(kind: str) -> None:
    fake, _ = KINDS[kind]
    server = fake()
    with running(server):
        first, again, other = play(sampler_on(server), {"seed": 2**63 - 1}, {"seed": 2**63 - 1}, {"seed": 5})
    assert first == again
    assert first.token_ids != other.token_ids


def test_a_stop_token_is_the_last_token_and_has_a_logprob(kind: str) -> None:
    fake, _ = KINDS[kind]
    server = fake()
    with running(server):
        [whole] = play(sampler_on(server), {"max_tokens": 12})
        where = next(i for i in range(2, 12) if whole.token_ids.index(whole.token_ids[i]) == i)
        stops = [whole.token_ids[where], 63 if whole.token_ids[where] != 63 else 62]
        stops = [stop for stop in stops if stop not in whole.token_ids[:where]]
        # Also where the limit is reached in the same moment.
        stopped, at_limit = play(
            sampler_on(server),
            {"max_tokens": 12, "stop_token_ids": stops},
            {"max_tokens": where + 1, "stop_token_ids": stops},
        )
    assert stopped == at_limit
    assert stopped.finish == "stop"
    assert stopped.token_ids == whole.token_ids[: where + 1]
    assert stopped.logprobs == whole.logprobs[: where + 1]


def test_only_our_stop_tokens_stop(kind: str) -> None:
    """Models have ends of their own (token 0 here), and servers go by them unless told otherwise."""
    fake, _ = KINDS[kind]
    server = fake()
    with running(server):
        samples = play(sampler_on(server), *({"max_tokens": 60, "seed": seed} for seed in range(8)))
    assert all(sampled.finish == "length" for sampled in samples)
    assert any(0 in sampled.token_ids for sampled in samples)


def test_the_model_s_own_sampling_defaults_do_not_apply(kind: str) -> None:
    """Servers read generation_config.json, of which Qwen3's says top_k 20: every parameter is sent."""
    fake, _ = KINDS[kind]
    server = fake()
    with running(server):
        play(sampler_on(server), {"top_p": 0.9})
    body = server.samples[-1]
    sent = body.get("sampling_params", body)
    assert sent["top_p"] == 0.9
    assert sent["top_k"] == (0 if kind == "vllm" else -1)
    assert (sent["min_p"], sent["repetition_penalty"], sent["presence_penalty"], sent["frequency_penalty"]) == (
        0,
        1,
        0,
        0,
    )


def change(kind: str, **to: Any) -> Fault:
    """A reply with other token_ids, logprobs, finish, or prompt (a list of ids); None: that field is missing."""

    def fault(_: Handler, reply: dict[str, Any]) -> dict[str, Any]:
        if kind == "vllm":
            choice = reply["choices"][0]
            names = {"token_ids": choice, "finish": choice, "prompt": choice, "logprobs": choice["logprobs"]}
            keys = {"finish": "finish_reason", "logprobs": "token_logprobs", "prompt": "prompt_token_ids"}
            for name, value in to.items():
                names[name][keys.get(name, name)] = value
            return reply
        about = reply["meta_info"]
        pairs = about["output_token_logprobs"]
        ids, logprobs = to.get("token_ids", [p[1] for p in pairs]), to.get("logprobs", [p[0] for p in pairs])
        about["output_token_logprobs"] = None
        if ids is not None and logprobs is not None:
            about["output_token_logprobs"] = [[*pair, None] for pair in zip(logprobs, ids, strict=False)]
        if "finish" in to:
            about["finish_reason"] = {"type": to["finish"]} if to["finish"] else None
        if "prompt" in to:
            about["prompt_tokens"] = len(to["prompt"])
        return reply

    return fault


IDS, LOGPROBS = [1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0]
BAD: dict[str, dict[str, Any]] = {
    "an id outside of the vocabulary": {"token_ids": [1, 2, VOCAB, 4]},
    "a negative id": {"token_ids": [1, -2, 3, 4]},
    "an id that is a float": {"token_ids": [1, 2.0, 3, 4]},
    "an id that is a truth value": {"token_ids": [1, True, 3, 4]},
    "an id that is text": {"token_ids": [1, "2", 3, 4]},
    "too many tokens": {"token_ids": [*IDS, 5], "logprobs": [*LOGPROBS, -1.0]},
    "no tokens": {"token_ids": [], "logprobs": []},
    "a NaN": {"logprobs": [-1.0, float("nan"), -3.0, -4.0]},
    "minus infinity": {"logprobs": [-1.0, float("-inf"), -3.0, -4.0]},
    "what stands for minus infinity": {"logprobs": [-1.0, -9999.0, -3.0, -4.0]},
    "a positive log-probability": {"logprobs": [-1.0, 0.5, -3.0, -4.0]},
    "a null": {"logprobs": [-1.0, None, -3.0, -4.0]},
    "a text": {"logprobs": [-1.0, "-2", -3.0, -4.0]},
    "behind a stop token": {"token_ids": [1, 63, 3, 4]},
    "an unknown end": {"finish": "tool_calls"},
    "an end that is missing": {"finish": None},
    "another prompt": {"prompt": [*PROMPT, 1]},
}
ONLY_VLLM = {
    "too few log-probabilities": {"logprobs": LOGPROBS[:3]},
    "too many log-probabilities": {"logprobs": [*LOGPROBS, -1.0]},
    "another prompt of the same length": {"prompt": PROMPT[::-1]},
}


@pytest.mark.parametrize("name", [*BAD, *ONLY_VLLM])
def test_a_reply_that_breaks_the_contract_is_never_taken(kind: str, name: str) -> None:
    if kind != "vllm" and name in ONLY_VLLM:
        pytest.skip("ids and log-probabilities come in pairs, and the prompt is not echoed")
    fake, _ = KINDS[kind]
    server = fake()
    bad = {"token_ids": IDS, "logprobs": LOGPROBS} | (BAD | ONLY_VLLM)[name]
    request = {"max_tokens": 4, "stop_token_ids": [63]}
    with running(server):
        sampler = sampler_on(server, retries=1)

        async def main() -> Sampled:
            await sampler.start(CONTEXT)
            server.faults.append(change(kind, **bad))
            good = await sample(sampler, **request)  # once is overcome
            server.faults.extend([change(kind, **bad)] * 2)
            try:
                with pytest.raises(MalformedReply, match=server.url):
                    await sample(sampler, **request)
            finally:
                await sampler.close()
            return good

        good = asyncio.run(main())
    assert good.logprobs == pytest.approx(policy_logprobs(tiny_policy(), PROMPT, good.token_ids), abs=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"token_ids": None}, "returns no"),
    "no log-probabilities": ({"logprobs": None}, "returns no"),
    "a stop token that is cut away": ({"finish": "stop"}, "stop token"),
    "cut by the server's own limit": (
        {"token_ids": IDS[:3], "logprobs": LOGPROBS[:3], "finish": "length"},
        "longer context",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_server_always_does_is_refused_not_tried_again(kind: str, name: str) -> None:
    bad, message = REFUSED[name]
    fake, _ = KINDS[kind]
    server = fake()
    with running(server):
        sampler = sampler_on(server)

        async def main() -> int:
            await sampler.start(CONTEXT)
            before = len(server.samples)
            server.faults.extend([change(kind, **{"token_ids": IDS, "logprobs": LOGPROBS} | bad)] * 5)
            try:
                with pytest.raises(SamplerRefused, match=message):
                    await sample(sampler, max_tokens=4, stop_token_ids=[63])
            finally:
                await sampler.close()
            return len(server.samples) - before

        assert asyncio.run(main()) == 1


START: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another model": ({"names": ("llama", "glm")}, {"model": "tiny"}, "serves glm, llama, not tiny"),
    "a choice of models": ({"names": ("llama", "glm")}, {}, "choose one with server.model"),
    "a short context": ({"context": 100}, {}, "contexts of 100 tokens, but 128 are needed"),
    "no key": ({"key": "secret"}, {}, "server.key_variable"),
}


@pytest.mark.parametrize("name", START)
def test_servers_that_cannot_work_are_refused_at_the_start(kind: str, name: str) -> None:
    of_server, options, message = START[name]
    server = KINDS[kind][0](**of_server)
    with running(server), pytest.raises(SamplerRefused, match=message):
        play(sampler_on(server, **options))


@pytest.mark.parametrize("missing", ["token_ids", "logprobs"])
def test_a_server_without_ids_or_logprobs_is_refused_at_the_start(kind: str, missing: str) -> None:
    server = KINDS[kind][0]()
    with running(server):
        server.faults.append(change(kind, **{missing: None}))
        with pytest.raises(SamplerRefused, match="returns no"):
            play(sampler_on(server))


def test_no_server_at_the_start_is_unreachable(kind: str) -> None:
    server = KINDS[kind][0]()
    server.stop()
    with pytest.raises(ServerUnreachable):
        play(sampler_on(server, retries=1))


def test_one_server_of_two_is_enough_and_the_other_joins_after_its_check(kind: str, caplog: Any) -> None:
    fake, _ = KINDS[kind]
    late, early = fake(names=("another",)), fake()
    late.stop()
    with running(late, early):
        sampler = sampler_on(late, early, model="tiny")

        async def main() -> list[Sampled]:
            await sampler.start(CONTEXT)
            late.start()
            await asyncio.sleep(0.05)
            done = await asyncio.gather(*(sample(sampler, affinity=f"r{i}") for i in range(16)), return_exceptions=True)
            await sampler.close()
            return [d for d in done if not isinstance(d, SamplerRefused)]

        assert len(asyncio.run(main())) < 16  # those whose server is the late one, which serves the wrong model
    assert late.samples == []
    assert late.url in caplog.text


def test_a_context_that_overflows_later_is_refused(kind: str) -> None:
    server = KINDS[kind][0]()
    with running(server), pytest.raises(SamplerRefused, match="context"):
        play(sampler_on(server), {"max_tokens": CONTEXT})


def test_a_server_that_dies_in_mid_rollout_is_replaced(kind: str) -> None:
    fake, _ = KINDS[kind]
    servers = [fake(token_seconds=0.01) for _ in range(2)]
    with running(*servers):
        sampler = sampler_on(*servers)

        async def main() -> list[Sampled]:
            await sampler.start(CONTEXT)
            rollouts = [asyncio.create_task(sample(sampler, affinity=f"r{i}", max_tokens=30)) for i in range(8)]
            await asyncio.sleep(0.15)
            await asyncio.to_thread(servers[0].stop)
            samples = await asyncio.gather(*rollouts)
            await sampler.close()
            return samples

        samples = asyncio.run(main())
        servers[0].start()
    assert len({tuple(s.token_ids) for s in samples}) == 1  # one seed: who sampled, and how often, is not to be seen
    assert all(s.finish == "length" for s in samples)


def test_a_failure_leaves_nothing_in_flight(kind: str) -> None:
    server = KINDS[kind][0](token_seconds=0.02)
    with running(server):
        sampler = sampler_on(server, retries=0)

        async def main() -> None:
            await sampler.start(CONTEXT)
            server.faults.append(disconnect)
            with pytest.raises(SamplerError):
                await sample(sampler, max_tokens=1)
            given_up = asyncio.create_task(sample(sampler, max_tokens=60))
            await asyncio.sleep(0.1)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            [one] = sampler.pool.servers
            assert not one._cuts
            assert not one.lock.locked()
            assert not one.slots.locked()
            assert len(asyncio.all_tasks()) == 1
            await sampler.close()

        asyncio.run(main())


def test_an_interruption_by_others_goes_on_behind_what_there_is(kind: str) -> None:
    server = KINDS[kind][0](token_seconds=0.01)
    with running(server):
        sampler = sampler_on(server)

        async def main() -> Sampled:
            await sampler.start(CONTEXT)
            rollout = asyncio.create_task(sample(sampler, max_tokens=30))
            await asyncio.sleep(0.12)
            await asyncio.to_thread(server.pause)
            await asyncio.sleep(0.02)
            server.resume()
            sampled = await rollout
            await sampler.close()
            return sampled

        sampled = asyncio.run(main())
    first, second = server.samples[-2:]
    prompts = [body.get("prompt", body.get("input_ids")) for body in (first, second)]
    assert prompts[0] == PROMPT
    assert prompts[1] == PROMPT + sampled.token_ids[: len(prompts[1]) - len(PROMPT)]
    assert 0 < len(prompts[1]) - len(PROMPT) < 30
    seeds = [body.get("sampling_params", {}).get("sampling_seed", body.get("seed")) for body in (first, second)]
    assert seeds == [stream_seed(4, 0), stream_seed(4, 1)]
    assert len(sampled.token_ids) == 30
    assert sampled.finish == "length"
    assert sampled.logprobs == pytest.approx(policy_logprobs(tiny_policy(), PROMPT, sampled.token_ids), abs=1e-5)


def test_a_part_that_follows_has_a_random_stream_of_its_own() -> None:
    assert stream_seed(11, 0) == 11
    seeds = {stream_seed(seed, number) for seed in (0, 1, 2**63 - 1) for number in range(4)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_abort_behind_the_last_token_cuts_nothing(kind: str) -> None:
    """There is nothing left to ask for: a request of no tokens would be refused, and end the run."""
    server = KINDS[kind][0]()
    with running(server):
        sampler = sampler_on(server)

        async def main() -> Sampled:
            await sampler.start(CONTEXT)
            server.faults.append(change(kind, finish="abort"))
            sampled = await sample(sampler, max_tokens=5)
            await sampler.close()
            return sampled

        sampled = asyncio.run(main())
    assert (len(sampled.token_ids), sampled.finish) == (5, "length")


def test_aborts_without_a_token_do_not_go_on_for_ever(kind: str) -> None:
    server = KINDS[kind][0]()
    with running(server):
        sampler = sampler_on(server, retries=2)

        async def main() -> int:
            await sampler.start(CONTEXT)
            before = len(server.samples)
            server.faults.extend([change(kind, token_ids=[], logprobs=[], finish="abort")] * 9)
            with pytest.raises(SamplerError, match="aborted"):
                await sample(sampler)
            await sampler.close()
            return len(server.samples) - before

        assert asyncio.run(main()) == 3


def test_a_temperature_that_is_left_out_is_refused_where_it_is_trained(kind: str, tmp_path: Path) -> None:
    """vLLM's default, raw_logprobs, does so."""
    fake, _ = KINDS[kind]
    server = fake(raw=True)
    push = WeightPush(tiny_policy(), tmp_path, temperature=0.7)
    with running(server):
        remedy = "processed_logprobs" if kind == "vllm" else "SGLANG_RETURN_ORIGINAL_LOGPROB"
        with pytest.raises(SamplerRefused, match=remedy):
            play(sampler_on(server, push=push, temperature=0.7))
        play(sampler_on(server, push=WeightPush(tiny_policy(), tmp_path)))  # at temperature 1 it is the same
        play(sampler_on(server, temperature=0.7))  # evaluation only
        server.raw = False
        play(sampler_on(server, push=push, temperature=0.7))


def test_evaluation_pushes_nothing(kind: str) -> None:
    server = KINDS[kind][0](loading="missing")
    with running(server):
        sampler = sampler_on(server)
        play(sampler, {})
        with pytest.raises(SamplerRefused, match="policy"):
            asyncio.run(sampler.weights_changed(1))
    assert {path for path, _ in server.requests} == {"/v1/models", server.route}


@pytest.mark.parametrize("trained", [True, False])
def test_the_configuration_builds_it(kind: str, trained: bool, tmp_path: Path) -> None:
    server = KINDS[kind][0]()
    keys = {
        "sampling.sampler": kind,
        "server.urls": [server.url],
        "run.folder": str(tmp_path),
        "server.probe_tolerance": 0.01,
        "sampling.temperature": 0.5,
    }
    with running(server):
        config = load_config(None, keys)
        sampler = build_sampler(config, tiny_policy() if trained else None)
        assert type(sampler) is KINDS[kind][1]
        assert sampler.temperature == 0.5
        if trained:
            assert sampler.vocab_size == VOCAB
            assert sampler.push.tolerance == 0.01
            assert sampler.push.folder == tmp_path / "weights"
            assert sampler.push.temperature == 0.5
        else:
            assert sampler.push is None
            assert sampler.vocab_size == 406  # of the packaged base
        asyncio.run(sampler.start(CONTEXT))


def test_without_addresses_or_a_policy_nothing_is_built() -> None:
    with pytest.raises(ConfigError, match=r"server\.urls"):
        build_sampler(load_config(None, {"sampling.sampler": "vllm"}), None)
    with pytest.raises(ConfigError, match=r"sampling\.sampler"):
        build_sampler(load_config(None, {}), None)


@pytest.mark.parametrize(("fault", "message"), [(status(500), "500"), (disconnect, "no answer")])
def test_a_server_is_checked_again_after_a_broken_connection(
    kind: str, fault: Callable[..., Any], message: str
) -> None:
    server = KINDS[kind][0]()
    with running(server):
        sampler = sampler_on(server)

        async def main() -> int:
            await sampler.start(CONTEXT)
            server.faults.append(fault)
            await sample(sampler)
            await sampler.close()
            return sum(path == "/v1/models" for path, _ in server.requests)

        assert asyncio.run(main()) == (2 if message == "no answer" else 1)

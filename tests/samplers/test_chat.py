"""ChatEndpoint over real HTTP: what endpoints answer, what they do not take, what is refused, and faults."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from fake_chat import FakeChat, completion, tool_call, usage
from fake_servers import disconnect, half, hang, raw, running, settings, status
from strict_endpoint import mistakes

from compactionrl.environments.protocol import Response, ToolCall
from compactionrl.rollout.chat_sampler import ChatSampler
from compactionrl.rollout.conversation import conversation
from compactionrl.rollout.spoken import said as spoken_message
from compactionrl.rollout.text_chat import TextFormat
from compactionrl.samplers.chat import ChatEndpoint
from compactionrl.samplers.http import MalformedReply
from compactionrl.samplers.protocol import Completer, Reply, Reported, Sampled, SamplerError, SamplerRefused, SpokenCall

ASK = [{"role": "user", "content": "say something please"}]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def complete(*servers: FakeChat, messages: Any = ASK, **options: Any) -> Reply:
    asked = {"max_tokens": 50, "temperature": 1.0, "top_p": 1.0, "seed": 7, "affinity": "r"}
    mine = {key: options.pop(key) for key in [*options] if key in (*asked, "tools")}

    async def main() -> Reply:
        sampler = ChatEndpoint(settings(*servers, **options), first_pause=0.01)
        try:
            return await sampler.complete(messages, **(asked | mine))
        finally:
            await sampler.close()

    return asyncio.run(main())


def answered(message: Any, finish: str | None = "stop", used: Any = None, **options: Any) -> Reply:
    server = FakeChat(lambda _: completion(message, finish, used))
    with running(server):
        return complete(server, **options)


def start(server: FakeChat, budget: int = 100, **options: Any) -> None:
    async def main() -> None:
        sampler = ChatEndpoint(settings(server, **options), first_pause=0.01)
        try:
            await sampler.start(budget)
        finally:
            await sampler.close()

    asyncio.run(main())


# ---------------------------------------------------------------- what endpoints answer

SPOKEN: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "a string": ({"content": "hi"}, ("hi", "")),
    "nothing": ({"content": None}, ("", "")),
    "no content": ({}, ("", "")),
    "a refusal": ({"content": None, "refusal": "I will not"}, ("I will not", "")),
    "parts": ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, ("ab", "")),
    "thinking parts": (
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "b"},
            ]
        },
        ("b", "hm"),
    ),
    "other parts": ({"content": [{"type": "image", "url": "x"}, {"type": "text", "text": "b"}]}, ("b", "")),
    "reasoning_content": ({"content": "b", "reasoning_content": "hm"}, ("b", "hm")),
    "reasoning": ({"content": "b", "reasoning": "hm"}, ("b", "hm")),
    "thinking in the text": ({"content": "<think>\nhm\n</think>\n\nb"}, ("b", "hm")),
    "thinking that the template opened": ({"content": "hm\n</think>\n\nb"}, ("b", "hm")),
    "thinking without an end": ({"content": "<think>hm"}, ("", "hm")),
    "null bytes and odd characters": ({"content": "a\0b\ud83dc\u2028\ufdd0"}, ("a\0b\ud83dc\u2028\ufdd0", "")),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_what_was_said(name: str) -> None:
    message, (text, thinking) = SPOKEN[name]
    reply = answered({"role": "assistant", **message})
    assert (reply.text, reply.thinking, reply.calls, reply.finish) == (text, thinking, [], "stop")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), (None, "{}"), ("", "{}"), ('{"a": ', '{"a": '), ([1], "[1]")],
)
def test_calls(arguments: Any, expected: str) -> None:
    reply = answered({"content": None, "tool_calls": [tool_call(arguments)]}, "tool_calls", tools=TOOLS)
    assert reply.calls == [SpokenCall("call_a", "run", expected)]
    assert reply.finish == "stop"


def test_a_call_of_old() -> None:
    reply = answered({"content": None, "function_call": {"name": "run", "arguments": "{}"}}, "function_call")
    assert reply.calls == [SpokenCall("", "run", "{}")]


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        *(("stop", "stop"), ("tool_calls", "stop"), ("eos", "stop"), (None, "stop")),
        *(("length", "length"), ("max_tokens", "length"), ("content_filter", "length"), ("sensitive", "length")),
    ],
)
def test_how_it_ended(finish: str | None, expected: str) -> None:
    assert answered("hi", finish).finish == expected


@pytest.mark.parametrize(
    "reply", [{}, [], {"choices": []}, {"error": "busy"}, completion(None), completion({"content": 3}), 7]
)
def test_a_reply_that_says_nothing_is_asked_for_again_and_named(reply: Any) -> None:
    server = FakeChat()
    with running(server):
        server.faults.extend([lambda _, good: good, lambda *_: reply])  # the probe's, then one bad one
        assert complete(server).text == "hello"
        server.faults.extend([lambda _, good: good, *[lambda *_: reply] * 9])
        with pytest.raises(MalformedReply, match=server.url):
            complete(server, retries=1)


@pytest.mark.parametrize("finish", ["abort", "error", "network_error"])
def test_a_reply_that_broke_off_is_asked_for_again(finish: str) -> None:
    server = FakeChat()
    with running(server):
        server.faults.extend([lambda _, good: good, lambda *_: completion("hel", finish)])
        assert complete(server).text == "hello"


def test_a_reply_for_which_the_server_has_no_room_is_refused() -> None:
    with pytest.raises(SamplerRefused, match=r"below context\.budget.*it says: model_context_window_exceeded"):
        answered("hel", "model_context_window_exceeded")


def test_halves_of_surrogate_pairs_are_sent_as_question_marks() -> None:
    """Names of files that are no UTF-8 are in what an environment tells, and a summariser is told it as it is."""
    server = FakeChat()
    with running(server):
        complete(server, messages=[{"role": "user", "content": "ls: \udcff.txt, 漢"}])
    assert server.bodies[0]["messages"][0]["content"] == "ls: ?.txt, 漢"


# ---------------------------------------------------------------- what they count


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (usage(10, 5), Reported(10, 5)),
        (usage(10, 900, reasoning_tokens=895), Reported(10, 900, 895)),
        (usage(10, 5, reasoning_tokens=99), Reported(10, 5, 5)),
        (None, None),
        ({}, None),
        (usage(0, 0), None),
        (usage(10, 0), None),
        (usage(0, 5), None),
        (usage(-3, 5), None),
        ({"prompt_tokens": "10", "completion_tokens": "5"}, None),
        ({"prompt_tokens": True, "completion_tokens": True}, None),
        ({"prompt_tokens": 10.5, "completion_tokens": math.inf}, None),
        ({"prompt_tokens": 10**30, "completion_tokens": 5}, None),
        ([], None),
    ],
)
def test_what_is_reported(used: Any, expected: Reported | None) -> None:
    assert answered("hello there, you", "stop", used).reported == expected


def test_thinking_that_is_shown_is_not_hidden() -> None:
    message = {"content": "b", "reasoning_content": "hm"}
    assert answered(message, "stop", usage(10, 5, reasoning_tokens=3)).reported == Reported(10, 5)


def test_counts_that_leave_out_what_was_cached_are_not_believed() -> None:
    long = [{"role": "user", "content": "words and words " * 200}]
    assert answered("hello", "stop", usage(12, 5), messages=long).reported is None
    assert answered("hello", "stop", usage(800, 5), messages=long).reported == Reported(800, 5)
    assert answered("hello " * 500, "stop", usage(12, 5)).reported is None


# ---------------------------------------------------------------- what they do not take

OPENAI = {"max_tokens": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}
OBJECTIONS: dict[str, dict[str, str]] = {
    "max_tokens": OPENAI,
    "seed": {"seed": "Unrecognized request argument supplied: seed"},
    "temperature": {"temperature": "Unsupported value: 'temperature' does not support 1 with this model"},
    "reasoning_content": {"reasoning_content": "property 'reasoning_content' is unsupported"},
    "all": {
        **OPENAI,
        "seed": "seed?",
        "temperature": "temperature?",
        "top_p": "top_p?",
        "reasoning_content": "reasoning_content?",
    },
}
THOUGHT = [*ASK, {"role": "assistant", "content": "hi", "reasoning_content": "hm"}, *ASK]


@pytest.mark.parametrize("name", OBJECTIONS)
def test_a_parameter_that_changes_nothing_is_left_out(name: str) -> None:
    server = FakeChat(rejects=OBJECTIONS[name])
    with running(server):
        assert complete(server, messages=THOUGHT).text == "hello"
    sent = server.bodies[-1]
    assert sent.get("max_completion_tokens", sent.get("max_tokens")) == 50
    if name != "all":
        assert sent.keys() >= {"model", "messages", "top_p"}
        assert ("seed" in sent) == (name != "seed")
    assert len(server.bodies) <= 1 + len(OBJECTIONS[name])


def test_many_at_once_learn_it_together_and_once() -> None:
    server = FakeChat(rejects=OPENAI)

    async def main() -> list[Reply]:
        sampler = ChatEndpoint(settings(server))
        asked = {"max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "seed": 1}
        replies = await asyncio.gather(*(sampler.complete(ASK, affinity=str(i), **asked) for i in range(20)))
        await sampler.close()
        return replies

    with running(server):
        assert {reply.text for reply in asyncio.run(main())} == {"hello"}
        assert len(server.samples) == 22  # the probe twice, then each request once


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_a_parameter_that_changes_what_is_measured_is_never_left_out(name: str) -> None:
    server = FakeChat(rejects={name: f"{name} is not supported"})
    with running(server), pytest.raises(SamplerRefused, match=f"{name} is not supported"):
        complete(server, **{name: 0.5})


def test_a_limit_of_the_response_is_named() -> None:
    server = FakeChat(rejects={"max_tokens": "Invalid max_tokens value, the valid range of max_tokens is [1, 8]"})
    with running(server), pytest.raises(SamplerRefused, match=r"valid range.*lower context\.response_tokens"):
        complete(server)


# ---------------------------------------------------------------- what is refused


def test_a_wrong_model_is_refused() -> None:
    for lists in (True, False):
        server = FakeChat(lists=lists)
        with running(server), pytest.raises(SamplerRefused, match=r"server\.model"):
            start(server, model="other")


def test_an_endpoint_that_lists_no_models_needs_a_name() -> None:
    server = FakeChat(lists=False)
    with running(server):
        start(server, model="tiny")
        with pytest.raises(SamplerRefused, match=r"server\.model"):
            start(server)


def test_a_wrong_key_is_refused_and_said_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_KEY", "secret-42")
    server = FakeChat(key="another")
    with running(server), pytest.raises(SamplerRefused, match=r"server\.key_variable") as refused:
        start(server, key_variable="CHAT_KEY")
    assert "secret-42" not in str(refused.value)


def test_a_context_below_the_budget_is_refused_before_anything_is_sampled() -> None:
    server = FakeChat(context=128)
    with running(server):
        start(server, 128)
        with pytest.raises(SamplerRefused, match=r"context\.budget"):
            start(server, 129)


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 64 tokens. However, you requested 70 tokens",
        "'max_tokens' or 'max_completion_tokens' is too large: 50. This model's maximum context length is 64 tokens",
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 70 tokens > 64 maximum",
        "Please reduce the length of the messages or completion",
    ],
)
def test_a_context_that_turns_out_shorter_is_refused_by_name(words: str) -> None:
    server = FakeChat()
    with running(server):
        server.faults.extend([lambda _, good: good, status(400, words)])
        with pytest.raises(SamplerRefused, match=r"context limit of the server is below context\.budget") as refused:
            complete(server)
        assert words[:30] in str(refused.value)
        assert len(server.bodies) == 1


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", [status(500), status(429), disconnect, half, hang, raw(b"\x00garbage"), raw(b"{")])
def test_faults_are_overcome_and_named_if_they_stay(fault: Any) -> None:
    server = FakeChat()
    with running(server):
        server.faults.extend([fault] * 2)
        assert complete(server, request_seconds=0.5).text == "hello"
        server.faults.extend([fault] * 9)
        with pytest.raises(SamplerError) as caught:
            complete(server, retries=1, request_seconds=0.5)
        assert caught.value.retryable


def test_another_server_takes_over() -> None:
    down, living = FakeChat(), FakeChat("from the other one")
    with running(living):
        down.stop()
        assert complete(down, living).text == "from the other one"


def test_a_reply_of_megabytes_is_not_read_to_its_end() -> None:
    server = FakeChat()
    with running(server):
        server.faults.extend([lambda _, good: good, *[raw(json.dumps(completion("x" * 2_000_000)).encode())] * 9])
        with pytest.raises(MalformedReply, match="longer than"):
            complete(server, retries=1)


# ---------------------------------------------------------------- as a sampler


def sample(server: FakeChat, max_tokens: int = 50, prompt: list[int] | None = None) -> Sampled:
    chat = TextFormat()
    ids = prompt or [i for span in chat.prompt(ASK) for i in span.ids]  # type: ignore[arg-type]

    async def main() -> Sampled:
        endpoint = ChatEndpoint(settings(server), first_pause=0.01)
        assert isinstance(endpoint, Completer)
        sampler = ChatSampler(endpoint)
        options: Any = {"stop_token_ids": chat.stop_token_ids, "temperature": 1.0, "top_p": 1.0, "seed": 2**63 - 1}
        try:
            return await sampler.sample(ids, max_tokens=max_tokens, affinity="r", **options)
        finally:
            await sampler.close()

    return asyncio.run(main())


def test_a_window_is_sent_as_its_messages() -> None:
    chat = TextFormat()
    messages: Any = [{"role": "system", "content": "be good"}, *ASK]
    server = FakeChat("hi")
    with running(server):
        sampled = sample(server, prompt=[i for span in chat.prompt(messages, TOOLS) for i in span.ids])
    body = server.bodies[-1]
    assert (body["messages"], body["tools"], body["max_tokens"], body["model"]) == (messages, TOOLS, 50, "tiny")
    assert 0 <= body["seed"] < 2**31
    assert server.headers[-1]["X-Session-ID"]
    assert sampled.token_ids == [*chat.encode("hi"), *chat.stop_token_ids]
    assert (sampled.finish, sampled.tokens) == ("stop", 2)


@pytest.mark.parametrize(
    ("used", "kept", "finish", "tokens"),
    [
        (None, 10, "length", 10),  # by our count it is longer: cut
        (usage(10, 9), 26, "stop", 9),  # the server knows better
        (usage(10, 10), 26, "stop", 10),
        (usage(10, 11), 10, "length", 10),  # it did not keep to the limit
        (usage(10, 500, reasoning_tokens=491), 26, "stop", 9),
        (usage(10, 1), 10, "length", 10),  # nobody says all this in one token
    ],
)
def test_a_response_keeps_to_its_limit_by_the_best_count_there_is(
    used: Any, kept: int, finish: str, tokens: int
) -> None:
    text = "one two three four " * 4  # pieces: one| two| thr|ee| fou|r, four times, a blank, and the stop token
    server = FakeChat(lambda _: completion(text, "stop", used))
    with running(server):
        sampled = sample(server, max_tokens=10)
    assert (len(sampled.token_ids), sampled.finish, sampled.tokens) == (kept, finish, tokens)
    assert len(sampled.logprobs) == len(sampled.versions) == kept


# ---------------------------------------------------------------- conversations


def said(*calls: Any, text: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def tool(text: str, id: str = "call_a") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": id}


def test_a_call_with_its_answer_goes_as_it_is() -> None:
    messages = [*ASK, said(tool_call(), text="let me see"), tool("done")]
    assert conversation(messages) == messages


def test_a_malformed_call_is_text_and_its_answer_comes_from_the_user_behind_the_others() -> None:
    broken = tool_call('{"a": ', id="call_b")
    sent = conversation([*ASK, said(broken, tool_call()), tool("bad", "call_b"), tool("done"), *ASK])
    assert mistakes({"messages": sent}) == ""
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "user"]
    assert '{"a": ' in sent[1]["content"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["call_a"]
    assert sent[3]["content"] == "bad\n\nsay something please"


def test_calls_that_nothing_answers_are_text() -> None:
    sent = conversation(
        [*ASK, said(*(tool_call(id=f"c{i}") for i in range(9))), {"role": "user", "content": "too many"}]
    )
    assert mistakes({"messages": sent}) == ""
    assert "tool_calls" not in sent[1]
    assert sent[1]["content"].count("<tool_call>") == 9


def test_neighbouring_messages_of_the_user_are_one() -> None:
    assert conversation([*ASK, *ASK]) == [{"role": "user", "content": "say something please\n\nsay something please"}]


def test_a_malformed_call_of_a_policy_of_tokens_is_shown_with_what_is_wrong() -> None:
    """Its text is gone; an endpoint must not take it for a good call without arguments."""
    malformed = ToolCall("call_a", "run", {}, "Malformed call: it is not closed")
    sent = conversation([*ASK, spoken_message(Response("", "", [malformed])), tool("Nothing was done.")])
    assert mistakes({"messages": sent}) == ""
    assert "tool_calls" not in sent[1]
    assert "it is not closed" in sent[1]["content"]

"""Chat formats over real tokenizers and stand-ins: whatever the policy samples and whatever the environment answers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_stubs import TOOLS, chat_format, context
from stand_in_tokenizers import glm_stand_in

from compactionrl.config import ConfigError
from compactionrl.environments.protocol import Message
from compactionrl.rollout.budget import ContextBudget, requests
from compactionrl.rollout.chat import MAX_NAME, ChatFormat, Span, length
from compactionrl.rollout.template import STATEMENT, TemplateRenderer

pytest_plugins = ["chat_formats"]
USER: Message = {"role": "user", "content": "List the files, please: 3 + 45 = 48?"}
SYSTEM: Message = {"role": "system", "content": "Be brief , please !"}
MARKUP = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "\n\n",
        "é",
        "\U0001f600",
    ),
    *(
        '{"name": "run", "arguments": {"command": "ls"}}',
        '{"name": "run", "parameters": {}}',
        '[{"name": 3}, 4]',
        "[" * 2000,
    ),
    *("run\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>", "<arg_key>", "<arg_value>", "text, more text."),
    '{"name": "' + "w1" * 40 + '", "arguments": [1]}',
]


def flat(spans: list[Span]) -> list[int]:
    return [i for span in spans for i in span.ids]


@st.composite
def responses(draw: st.DrawFn, chat: ChatFormat) -> list[int]:
    """Ids from the whole vocabulary, markup whole, cut or broken, with a stop token at the end or without."""
    base, stops = chat.tokenizer.base, set(chat.stop_token_ids)
    piece = st.one_of(
        st.lists(st.integers(0, len(base) - 1), min_size=1, max_size=6),
        st.sampled_from(sorted(chat.tokenizer.special_ids)).map(lambda token: [token]),
        st.sampled_from(MARKUP).map(lambda text: base.encode(text, add_special_tokens=False)),
        st.sampled_from(MARKUP).flatmap(
            lambda text: st.integers(0, len(text)).map(lambda n: base.encode(text[:n], add_special_tokens=False))
        ),
    )
    ids = [i for part in draw(st.lists(piece, max_size=6)) for i in part if i not in stops]
    stop = draw(st.sampled_from([None, *chat.stop_token_ids]))
    return ids + ([] if stop is None and ids else [chat.stop_token_ids[0] if stop is None else stop])


@st.composite
def hostile(draw: st.DrawFn, chat: ChatFormat) -> str:
    names = st.sampled_from(sorted(chat.tokenizer.special_tokens))
    part = st.one_of(
        names,
        names.flatmap(lambda name: st.integers(0, len(name)).map(lambda n: name[:n])),
        names.flatmap(lambda name: st.integers(0, len(name)).map(lambda n: name[n:])),
        st.text(max_size=4),
        st.sampled_from(["\ufdd0", "user\n", "assistant", "<", "|", "/", "\udce9"]),
    )
    return "".join(draw(st.lists(part, max_size=6)))


def answers(calls: int, text: str) -> list[Message]:
    if not calls:
        return [{"role": "user", "content": text}]
    return [{"role": "tool", "content": text, "tool_call_id": text, "name": text}] * calls  # type: ignore[typeddict-unknown-key]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_response_is_parsed_and_followed(chat: ChatFormat, data: st.DataObject) -> None:
    """What follows depends on the messages, and on the response only as to what closes it; all spans in the messages' order."""
    response = data.draw(responses(chat))
    texts = [data.draw(hostile(chat)) for _ in range(2)]
    opening = flat(chat.prompt([USER], TOOLS))
    parsed = chat.parse(opening, response, False, TOOLS)
    assert isinstance(parsed.text, str)
    assert isinstance(parsed.thinking, str)
    for call in parsed.calls:
        assert isinstance(call.arguments, dict)
        assert max(len(call.name), len(call.id)) <= MAX_NAME
        assert call.error or call.name
    messages = [*answers(min(len(parsed.calls), 3), texts[0]), {"role": "user", "content": texts[1]}]
    spans = chat.extend(opening, response, messages, TOOLS)
    assert [span.role for span in spans] == [message["role"] for message in messages]
    closed = flat(
        chat.extend(opening, [*chat.tokenizer.base.encode("</think>a"), chat.stop_token_ids[0]], messages, TOOLS)
    )
    added = flat(spans)
    if response[-1] in chat.stop_token_ids:
        # GLM's stop tokens are the next turn's opening, which then does not follow once more.
        assert added in (closed, closed[1:])
    else:
        assert added[len(added) - len(closed) :] == closed
        assert 1 <= len(added) - len(closed) <= 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_hostile_text_opens_no_turn(chat: ChatFormat, data: st.DataObject) -> None:
    """In system prompts, tasks, observations, answers to calls, and in the description of tools."""
    text = data.draw(hostile(chat))
    response = data.draw(responses(chat))

    def special(text: str) -> list[int]:
        described = [{"type": "function", "function": {"name": "run", "description": text, "parameters": {text: text}}}]
        prompt = chat.prompt([{"role": "system", "content": text}, {"role": "user", "content": text}], described)
        spans = [*prompt]
        for calls in (0, 1, 2):
            spans += chat.extend(prompt[-1].ids, response, [*answers(calls, text), *answers(0, text)], described)
        return [i for i in flat(spans) if i in chat.tokenizer.special_ids]

    assert special(text) == special("w0")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_reserve_suffices_behind_any_response(chat: ChatFormat, data: st.DataObject) -> None:
    tools = data.draw(st.sampled_from([None, TOOLS]))
    settings = context(budget=10**6, threshold=10**5, max_calls=3)
    reserve = ContextBudget.measure(settings, chat, tools).reserve - settings.summary_tokens
    opening = flat(chat.prompt([USER], tools))
    response = data.draw(responses(chat))
    calls = data.draw(st.integers(0, 3)) if tools else 0
    name = data.draw(st.text(st.characters(max_codepoint=127), max_size=MAX_NAME))
    placeholders: list[Any] = [
        {**message, "tool_call_id": name, "name": name} for message in answers(calls, settings.placeholder)
    ]
    for request in requests(settings):
        assert length(chat.extend(opening, response, [*placeholders, request], tools)) <= reserve


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_text_becomes_ids_and_text_again(chat: ChatFormat, text: str) -> None:
    """Up to what a tokenizer normalises (Qwen's composes accents) or has no token for (SmolLM2 lacks some bytes)."""
    again = chat.decode(chat.encode(text))
    assert chat.decode(chat.encode(again)) == again
    if text.isascii() and text.isprintable():
        assert again == text


@pytest.mark.parametrize("text", ["a , b . c ! don 't", "  x\n\n y\t", "1234 56"])
def test_decoding_tidies_nothing(chat: ChatFormat, text: str) -> None:
    assert chat.decode(chat.encode(text)) == text


def test_decoding_tidies_nothing_even_where_the_tokenizer_is_told_to(llama3_tokenizer: Any) -> None:
    tidy = copy.deepcopy(llama3_tokenizer)
    tidy.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tidy.decode(tidy.encode("a , b", add_special_tokens=False)) == "a, b"
    chat = ChatFormat(tidy, "llama-3")
    assert chat.decode(chat.encode("a , b")) == "a , b"


def test_a_message_that_adds_no_token_is_a_turn_all_the_same() -> None:
    """GLM-5: the policy's stop token was the opening of the user's turn, in which nothing stands."""
    chat = ChatFormat(glm_stand_in(), "glm-5")
    user, assistant, think = (chat.tokenizer.special_tokens[name] for name in ("<|user|>", "<|assistant|>", "<think>"))
    empty: Message = {"role": "user", "content": ""}
    response = [*chat.encode("a"), chat.tokenizer.special_tokens["</think>"], user]
    opening = flat(chat.prompt([USER]))
    assert chat.extend(opening, response, [empty]) == [Span("user", [assistant, think])]
    both = chat.extend(opening, response, [empty, empty])
    assert both == [Span("user", []), Span("user", [user, assistant, think])]


def window(chat: ChatFormat, turns: list[Any], tools: Any) -> list[int]:
    """The ids of a window that grew turn by turn. A string is a response, its special tokens included."""
    ids = flat(chat.prompt([USER], tools))
    opening = ids
    for response, messages in turns:
        sampled = chat.tokenizer.base.encode(response, add_special_tokens=False)
        spans = chat.extend(opening, sampled, messages, tools)
        ids = [*ids, *sampled, *flat(spans)]
        opening = spans[-1].ids
    return ids


LATER: Message = {"role": "user", "content": "And now, with 12 more?"}


@pytest.mark.parametrize("name", ["qwen3_chat", "smollm2_chat"])
def test_a_window_that_grew_is_the_template_rendered_at_once(name: str, request: pytest.FixtureRequest) -> None:
    chat = request.getfixturevalue(name)
    turns = [(f"Answer {i}: é!<|im_end|>", [LATER, LATER]) for i in range(2)]
    said = [{"role": "assistant", "content": f"Answer {i}: é!"} for i in range(2)]
    messages = [USER, said[0], LATER, LATER, said[1], LATER, LATER]
    expected = chat.tokenizer.base.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert window(chat, turns, None) == expected


def test_a_window_with_calls_is_qwens_template_rendered_at_once(qwen3_chat: ChatFormat) -> None:
    call = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
    answers: list[Any] = [{"role": "tool", "content": f"file {i}\n"} for i in range(2)]
    calls = [{"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}] * 2
    messages = [USER, {"role": "assistant", "content": "Hm.", "tool_calls": calls}, *answers]
    template = qwen3_chat.tokenizer.base.apply_chat_template
    expected = template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert window(qwen3_chat, [(f"Hm.\n{call}\n{call}<|im_end|>", answers)], TOOLS) == expected


def test_smollm2_gets_the_system_prompt_of_its_template_unless_there_is_another(smollm2_chat: ChatFormat) -> None:
    own = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    asked: Message = {"role": "user", "content": "Hi"}
    decode = smollm2_chat.decode
    assert decode(flat(smollm2_chat.prompt([asked]))) == own + user
    assert (
        decode(flat(smollm2_chat.prompt([SYSTEM, asked])))
        == "<|im_start|>system\nBe brief , please !<|im_end|>\n" + user
    )
    with_tools = decode(flat(smollm2_chat.prompt([SYSTEM, asked], TOOLS)))
    assert with_tools.startswith("<|im_start|>system\nBe brief , please !\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in with_tools
    assert with_tools.endswith("</tool_call><|im_end|>\n" + user)


def test_chatml_over_a_template_that_takes_tools_is_that_template(qwen3_tokenizer: Any) -> None:
    chat = ChatFormat(qwen3_tokenizer, "chatml")
    template = qwen3_tokenizer.apply_chat_template
    for tools in (None, TOOLS):
        expected = template([SYSTEM, USER], tools=tools, add_generation_prompt=True, return_dict=False)
        assert flat(chat.prompt([SYSTEM, USER], tools)) == expected


def test_chatml_writes_the_answers_to_one_response_into_one_turn(smollm2_chat: ChatFormat) -> None:
    opening = flat(smollm2_chat.prompt([USER], TOOLS))
    messages: list[Any] = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, LATER]
    spans = smollm2_chat.extend(opening, smollm2_chat.encode("a"), messages, TOOLS)
    assert [smollm2_chat.decode(span.ids) for span in spans] == [
        "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n",
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n",
        f"<|im_start|>user\n{LATER['content']}<|im_end|>\n<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize(
    ("response", "text", "thinking", "calls"),
    [
        ("Hello.", "Hello.", "", []),
        ("\n<think>\nhm\n</think>\n\nHello.", "Hello.", "hm", []),
        ("<think>hm", "", "hm", []),
        ("Not <think>first</think>", "Not <think>first</think>", "", []),
        ('a <tool_call>\n{"name": "run", "arguments": {"x": 1}}\n</tool_call>', "a", "", [("run", {"x": 1}, False)]),
        (
            '<tool_call>[{"name": "run"}, {"name": "say", "arguments": {}}]</tool_call>',
            "",
            "",
            [("run", {}, False), ("say", {}, False)],
        ),
        ("<tool_call>[]</tool_call>nothing to do", "nothing to do", "", []),
        (
            '<think><tool_call>{"name": "run"}</tool_call></think>done',
            "done",
            '<tool_call>{"name": "run"}</tool_call>',
            [],
        ),
        ("<tool_call>{</tool_call>", "", "", [("", {}, True)]),
        ("<tool_call>[1]</tool_call>", "", "", [("", {}, True)]),
        ('<tool_call>{"arguments": {}}</tool_call>', "", "", [("", {}, True)]),
        ('<tool_call>{"name": "run", "arguments": {}}', "", "", [("", {}, True)]),
        ('<tool_call>{"name": "run", "arguments": "x"}</tool_call>', "", "", [("run", {}, True)]),
    ],
)
def test_chatml_reads_thinking_and_calls(
    smollm2_chat: ChatFormat, response: str, text: str, thinking: str, calls: list[Any]
) -> None:
    ids = [*smollm2_chat.encode(response), smollm2_chat.stop_token_ids[0]]
    parsed = smollm2_chat.parse(flat(smollm2_chat.prompt([USER], TOOLS)), ids, False, TOOLS)
    assert (parsed.text, parsed.thinking) == (text, thinking)
    assert [(call.name, call.arguments, bool(call.error)) for call in parsed.calls] == calls


PLAIN = st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=20).map(str.strip)
NAMES = st.from_regex("[a-z_]{1,20}", fullmatch=True)
ARGUMENTS = st.dictionaries(
    PLAIN, PLAIN | st.integers() | st.sampled_from(["</tool_call>", "<think>", "é\n"]), max_size=3
)


@settings(max_examples=100, deadline=None)
@given(
    text=PLAIN,
    thinking=PLAIN,
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3),
    spelled=st.booleans(),
)
def test_chatml_writes_what_an_assistant_said_as_it_reads_it(
    smollm2_chat: ChatFormat, text: str, thinking: str, calls: list[Any], spelled: bool
) -> None:
    """A client sends back what it was given: the model sees what it had said. Arguments come as JSON or as a string of it."""
    written = [(name, json.dumps(arguments) if spelled else arguments) for name, arguments in calls]
    message: Any = {
        "role": "assistant",
        "content": text,
        "reasoning_content": thinking,
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in written],
    }
    spans = smollm2_chat.prompt([USER, message, USER])
    said = smollm2_chat.decode(spans[1].ids)
    assert said.startswith("<|im_start|>assistant\n")
    ids = smollm2_chat.encode(said.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n"))
    parsed = smollm2_chat.parse(flat(spans[:1]), [*ids, smollm2_chat.stop_token_ids[0]], False, TOOLS)
    assert (parsed.text, parsed.thinking) == (text, thinking)
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == [(n, a, None) for n, a in calls]


def test_chatml_writes_calls_as_the_tools_ask_for_them(smollm2_chat: ChatFormat) -> None:
    function = {"name": "run", "arguments": {"command": "é"}}
    message: Any = {
        "role": "assistant",
        "content": "Hm.",
        "reasoning_content": "why",
        "tool_calls": [{"type": "function", "function": function}] * 2,
    }
    call = '<tool_call>\n{"name": "run", "arguments": {"command": "é"}}\n</tool_call>'
    spans = smollm2_chat.prompt([USER, message, USER], TOOLS)
    assert smollm2_chat.decode(spans[1].ids) == (
        f"<|im_start|>assistant\n<think>\nwhy\n</think>\n\nHm.\n{call}\n{call}<|im_end|>\n"
    )


def test_chatml_over_qwens_template_writes_calls_as_it_does(qwen3_tokenizer: Any) -> None:
    """Up to the thinking of earlier turns, which that template leaves out, and which windows keep."""
    chat = ChatFormat(qwen3_tokenizer, "chatml")
    calls = [{"type": "function", "function": {"name": "run", "arguments": {"command": c}}} for c in "xé"]
    answers: list[Any] = [{"role": "tool", "content": f"file {i}"} for i in range(2)]
    for said in ({"content": ""}, {"content": "Hm."}, {"content": "Hm.", "reasoning_content": "why"}):
        messages: list[Any] = [USER, {"role": "assistant", "tool_calls": calls, **said}, *answers]
        expected = qwen3_tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        assert flat(chat.prompt(messages, TOOLS)) == expected


def test_chatml_refuses_other_templates(llama3_tokenizer: Any, qwen3_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="needs the special tokens"):
        ChatFormat(llama3_tokenizer, "chatml")
    other = copy.deepcopy(qwen3_tokenizer)
    other.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="no plain ChatML"):
        ChatFormat(other, "chatml")


@pytest.mark.parametrize("chat", [ChatFormat(glm_stand_in(), "glm-4.5"), chat_format()], ids=["glm-4.5", "qwen3"])
def test_a_response_without_marks_of_thinking_is_text(chat: ChatFormat) -> None:
    opening = flat(chat.prompt([USER]))
    response = [*chat.encode("Hello."), chat.stop_token_ids[0]]
    parsed = chat.parse(opening, response, False)
    assert (parsed.text, parsed.thinking) == ("Hello.", "")


def test_glm_reads_thinking_and_calls() -> None:
    for name, start in (("glm-4.5", "\n<think>"), ("glm-5", "")):
        chat = ChatFormat(glm_stand_in(), name)
        argument = "<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
        text = (
            f"{start}hm</think>\nfirst<tool_call>run\n{argument}</tool_call><tool_call>fly</tool_call><|observation|>"
        )
        ids = chat.tokenizer.base.encode(text, add_special_tokens=False)
        parsed = chat.parse(flat(chat.prompt([USER], TOOLS)), ids, False, TOOLS)
        assert (parsed.thinking, parsed.text) == ("hm", "first")
        assert [(call.name, call.arguments) for call in parsed.calls] == [("run", {"command": "ls"}), ("fly", {})]
        assert parsed.calls[0].error is None


def test_the_default_format_says_what_it_cannot_guarantee_and_is_the_template(llama3_tokenizer: Any) -> None:
    with pytest.warns(UserWarning, match="not guaranteed") as caught:
        chat = ChatFormat(llama3_tokenizer, "default")
    assert str(caught[0].message) == STATEMENT
    said = {"role": "assistant", "content": "Answer , 1!"}
    expected = llama3_tokenizer.apply_chat_template(
        [USER, said, LATER, LATER, said, LATER], add_generation_prompt=True, return_dict=False
    )
    turns = [("Answer , 1!<|eot_id|>", [LATER, LATER]), ("Answer , 1!<|eot_id|>", [LATER])]
    assert window(chat, turns, None) == expected
    cut = [("Answer , 1!", [LATER, LATER]), ("Answer , 1!", [LATER])]
    assert window(chat, cut, None) == expected
    parsed = chat.parse([], [*chat.encode('<think>a</think>b {"name": "run"}'), chat.stop_token_ids[0]], False, TOOLS)
    assert (parsed.thinking, parsed.text, parsed.calls) == ("a", 'b {"name": "run"}', [])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_default_format_is_append_only_and_blind_to_special_tokens(
    default_chat: ChatFormat, data: st.DataObject
) -> None:
    text, response = data.draw(hostile(default_chat)), data.draw(responses(default_chat))
    opening = flat(default_chat.prompt([USER]))
    found, harmless = (
        [
            i
            for i in flat(default_chat.extend(opening, response, answers(0, x)))
            if i in default_chat.tokenizer.special_ids
        ]
        for x in (text, "w0")
    )
    assert found == harmless


@pytest.fixture(scope="module")
def default_chat(llama3_tokenizer: Any) -> ChatFormat:
    with pytest.warns(UserWarning, match="not guaranteed"):
        return ChatFormat(llama3_tokenizer, "default")


TURN = "{{ m.content }}<|eot_id|>"
ALTERNATING = (
    "{% if not loop.first and loop.previtem.role == m.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}", "no special token ends a turn"),
        ("{% for m in messages %}" + ALTERNATING + TURN + "{% endfor %}", "roles must alternate"),
        ("{% for m in messages %}{% if m.role == 'user' %}" + TURN + "{% endif %}{% endfor %}", "leaves out"),
    ],
)
def test_the_default_format_refuses_what_it_cannot_read(llama3_tokenizer: Any, template: Any, message: str) -> None:
    tokenizer = copy.deepcopy(llama3_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        ChatFormat(tokenizer, "default")


def test_auto_finds_the_format_that_renders_as_the_template_does(
    qwen3_chat: ChatFormat, smollm2_chat: ChatFormat, llama3_tokenizer: Any
) -> None:
    for chat in (qwen3_chat, smollm2_chat):
        found = ChatFormat(chat.tokenizer.base, "auto")
        assert type(found._renderer) is type(chat._renderer)
    with pytest.raises(ConfigError, match="none does; name the format"):
        ChatFormat(llama3_tokenizer, "auto")


def test_auto_does_not_take_a_template_that_was_changed(qwen3_tokenizer: Any) -> None:
    changed = copy.deepcopy(qwen3_tokenizer)
    changed.chat_template = changed.chat_template.replace("# Tools", "# Functions")
    with pytest.raises(ConfigError, match="none does; name the format"):
        ChatFormat(changed, "auto")


def test_a_renderer_of_ones_own_is_named_by_its_import_path(llama3_tokenizer: Any) -> None:
    path = f"{TemplateRenderer.__module__}:{TemplateRenderer.__name__}"
    with pytest.warns(UserWarning, match="not guaranteed"):
        assert isinstance(ChatFormat(llama3_tokenizer, path)._renderer, TemplateRenderer)
    with pytest.raises(ConfigError, match=r"model\.renderer"):
        ChatFormat(llama3_tokenizer, "no_such_module:Renderer")

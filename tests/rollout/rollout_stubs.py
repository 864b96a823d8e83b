"""What the tests of rollouts share: a tokenizer in which a word is a token, scripted and random samplers and environments.

With the "qwen3" format a user message of n words takes n + 4 tokens (<|im_start|>, "user\\n", words, <|im_end|>, "\\n"), the
opening of the policy's turn 2, and what follows a closed response one more: its line break.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from compactionrl.config import ContextConfig, LimitsConfig
from compactionrl.environments.protocol import Message, Observation, Response, Verdict
from compactionrl.rollout.chat import CUT_MARK, ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, run_rollout
from compactionrl.samplers.protocol import Sampled
from compactionrl.training.tokenizer import build_tokenizer

TOOLS = [{"type": "function", "function": {"name": "run", "description": "run", "parameters": {"type": "object"}}}]
PROMPTS = {
    "summary_request": "summarise",
    "retry_request": "again please",
    "resume_template": "resume {summary}",
    "placeholder": "later",
}
WORDS = " ".join(f"w{i}" for i in range(100))
GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|begin_of_image|>")
GLM_TOKENS += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
LLAMA_TOKENS += ("<|python_tag|>",)


@cache
def tokenizer() -> Any:
    """Every word that the tests and the formats use is one token; the special tokens of several families."""
    texts = [WORDS, "system task done", CUT_MARK, *PROMPTS.values(), '{"name": "run", "arguments": {}}']
    framed = ChatFormat(build_tokenizer(texts)).prompt([{"role": "user", "content": "task"}], TOOLS)
    built = build_tokenizer([*texts, *(ChatFormat(build_tokenizer(texts)).decode(span.ids) for span in framed)])
    known = built.get_vocab()
    built.add_tokens(
        [token for token in (*GLM_TOKENS, *QWEN_TOKENS, *LLAMA_TOKENS) if token not in known], special_tokens=True
    )
    return built


@cache
def chat_format(renderer: str = "qwen3", **options: Any) -> ChatFormat:
    return ChatFormat(tokenizer(), renderer, options)


def context(**changes: Any) -> ContextConfig:
    return ContextConfig(
        **{
            **PROMPTS,
            "budget": 200,
            "threshold": 60,
            "response_tokens": 20,
            "min_response": 4,
            "summary_tokens": 20,
            "max_compactions": 3,
            "tail_steps": 2,
            **changes,
        }
    )


def words(n: int, start: int = 0) -> str:
    return " ".join(f"w{(start + i) % 100}" for i in range(n))


def token(name: str) -> int:
    return tokenizer().convert_tokens_to_ids(name)


def ids_of(text: str) -> list[int]:
    """Ids of `text`, special tokens included: what a policy may sample."""
    return tokenizer().encode(text, add_special_tokens=False)


def call(arguments: str = "{}", name: str = "run") -> str:
    return '<tool_call>{"name": "' + name + '", "arguments": ' + arguments + "}</tool_call>"


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    seed: int
    sampled: list[int]
    affinity: str


@dataclass
class Cut:
    """A response that fills its limit: `text`, then its last word again and again."""

    text: str


Entry = str | Cut | list[int] | Sampled | Exception


@dataclass
class ScriptedSampler:
    """Answers requests with the entries of a script, in order; the last one for ever. A string is closed by a stop token."""

    script: Sequence[Entry]
    requests: list[Request] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    seconds: float = 0.0

    async def sample(self, token_ids: Sequence[int], *, max_tokens: int, seed: int, affinity: str, **_: Any) -> Sampled:
        entry = self.script[min(len(self.requests), len(self.script) - 1)]
        request = Request(list(token_ids), max_tokens, seed, [], affinity)
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        if isinstance(entry, Exception):
            raise entry
        sampled = entry if isinstance(entry, Sampled) else reply(entry, max_tokens)
        request.sampled = list(sampled.token_ids)
        return sampled

    async def release(self, affinity: str) -> None:
        self.released.append(affinity)


def reply(entry: str | Cut | list[int], max_tokens: int) -> Sampled:
    if isinstance(entry, Cut):
        ids = ids_of(entry.text)
        ids = (ids + ids[-1:] * max_tokens)[:max_tokens]
    else:
        ids = [*ids_of(entry), token("<|im_end|>")] if isinstance(entry, str) else list(entry)
    return sampled(ids, "length" if isinstance(entry, Cut) else "stop")


def sampled(ids: list[int], finish: Any = "stop") -> Sampled:
    """Log-probabilities that tell the tokens apart, so that a shifted copy is seen."""
    return Sampled(ids, [-0.5 - i / 1024 for i in range(len(ids))], finish, [7] * len(ids))


@dataclass
class ScriptedEnvironment:
    """Answers steps with the observations in order, the last one for ever; done after `steps` steps."""

    observations: Sequence[str | list[str] | BaseException | Callable[[Response], Any]] = ("w1",)
    steps: int = 10**9
    tools: Any = None
    reward: float = 1.0
    messages: Sequence[Message] = ({"role": "system", "content": "system"}, {"role": "user", "content": "task"})
    seconds: float = 0.0
    verdict: Verdict | Exception | None = None
    details: dict[str, Any] = field(default_factory=dict)
    responses: list[Response] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    closed: int = 0

    async def start(self) -> list[Message]:
        return list(self.messages)

    async def step(self, response: Response) -> Observation:
        self.responses.append(response)
        await asyncio.sleep(self.seconds)
        observation = self.observations[min(len(self.responses), len(self.observations)) - 1]
        if callable(observation):
            observation = observation(response)
        if isinstance(observation, BaseException):
            raise observation
        self.given.append(observation)
        return Observation(observation, done=len(self.responses) >= self.steps)

    async def verify(self) -> Verdict:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict or Verdict(self.reward, dict(self.details))

    async def close(self) -> None:
        self.closed += 1


def play(
    environment: Any,
    sampler: Any,
    config: ContextConfig | None = None,
    *,
    chat: ChatFormat | None = None,
    turns: int = 50,
    seconds: float = 60.0,
    **options: Any,
) -> Rollout:
    settings = RolloutSettings(config or context(), LimitsConfig(turns=turns, environment_seconds=seconds))
    options = {"rollout_id": "r", "task_id": "t", "seed": 0, **options}
    return asyncio.run(run_rollout(environment, sampler, chat or chat_format(), settings, **options))


def text_of(rollout: Rollout, window: int) -> str:
    return tokenizer().decode(rollout.windows[window].token_ids)

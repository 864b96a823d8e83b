"""Who acts and who writes the summaries: a policy in this process, servers, any chat endpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from compactionrl import build
from compactionrl.config import Config, ConfigError, ServerConfig
from compactionrl.endpoint import has_tokenizer, identify
from compactionrl.evaluation.evaluate import OWN
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.chat_sampler import ChatSampler
from compactionrl.rollout.text_chat import TextFormat
from compactionrl.samplers.chat import ChatEndpoint
from compactionrl.samplers.http import Server, hide_login
from compactionrl.samplers.protocol import Sampler, Summariser

SERVED = ("vllm", "sglang")


class SummariserConfig(ServerConfig):
    """The server of another summariser. Its keys are those of the evaluation."""

    named: ClassVar[dict[str, str]] = {
        "urls": "evaluation.summarisers",
        "model": "evaluation.summariser_model",
        "key_variable": "evaluation.summariser_key_variable",
    }


URL = re.compile(r"https?://.+")


@dataclass(frozen=True)
class Agent:
    """A chat format and a sampler that go together. `exact`: whether tokens are counted, or estimated from text."""

    chat: ChatFormat
    sampler: Sampler
    description: str
    exact: bool = True


async def resolve(config: Config) -> Config:
    """The configuration with what only the servers know: their protocol (for 'auto') and the name of their model.

    Raises SamplerError if none answers, or if it refuses the key or the model.
    """
    named = config.sampling.sampler == "chat" and config.server.model  # some endpoints do not list their models
    if named or config.sampling.sampler not in (*SERVED, "chat", "auto"):
        return config
    found = await identify(config.server)
    sampler = found.api if config.sampling.sampler == "auto" else config.sampling.sampler
    return replace(config, {"sampling": {"sampler": sampler}, "server": {"model": found.model}})


async def open_agent(config: Config, modes: Sequence[str]) -> Agent:
    """The agent of `model.path` and `sampling.sampler`, resolved."""
    kind = config.sampling.sampler
    if kind == "chat":
        endpoint = ChatSampler(ChatEndpoint(config.server))
        return Agent(endpoint.chat, endpoint, f"{config.server.model} at {names(config)}, text in and out", exact=False)
    if kind not in SERVED:
        folder = policy_folder(build.model_folder(config))
        return Agent(*open_policy(config, folder, modes), f"{folder} in this process")
    if "path" not in config.model.model_fields_set:
        raise ConfigError(
            f"model.path: '{kind}' needs the model's tokenizer: give its folder with --tokenizer, or measure text with "
            "--api chat"
        )
    chat = build.build_chat(config, build.model_folder(config))
    checked = await has_tokenizer(config.server, chat)
    if checked is False:
        raise ConfigError(
            f"model.path: {config.model.path} holds another tokenizer than {config.server.model} at {names(config)}"
        )
    unchecked = "" if checked else "; it does not say whether its tokenizer is ours"
    return Agent(
        chat, build.build_sampler(config, None), f"{config.server.model} at {names(config)}, {kind}{unchecked}"
    )


def open_chat(config: Config) -> ChatFormat:
    """The agent's chat format alone; no server is asked and no weights are loaded."""
    if config.sampling.sampler == "chat":
        return TextFormat()
    return build.build_chat(config, policy_folder(build.model_folder(config)))


def open_policy(config: Config, folder: Path, modes: Sequence[str] | None = None) -> tuple[ChatFormat, Sampler]:
    """The chat format and a sampler of the policy in `folder`: a model folder, or a checkpoint that training wrote."""
    import torch

    folder = policy_folder(folder)
    if isinstance(config.run.threads, int):
        torch.set_num_threads(config.run.threads)
    policy = build.build_policy(config, folder)
    return build.build_chat(config, folder), build.build_sampler(config, policy, modes)


async def open_summariser(config: Config, source: str, agent: Agent) -> tuple[Summariser, str]:
    """Another writer of the summaries, and what it is: a model folder or a URL."""
    if URL.match(source):
        return await open_served_summariser(config, source, agent)
    if not agent.exact:
        raise ConfigError(
            f"--summariser {source}: a chat endpoint's summaries come from text alone; serve the folder with "
            "`compactionrl serve` and give its URL"
        )
    other, sampler = open_policy(config, Path(source))
    if other.tokenizer.base.get_vocab() != agent.chat.tokenizer.base.get_vocab():
        raise ConfigError(
            f"the summariser in {source} has another tokenizer than the policy: tokens go from one to the other"
        )
    return sampler, f"{source} in this process"


async def open_served_summariser(config: Config, url: str, agent: Agent) -> tuple[Summariser, str]:
    """Token ids go to a server that has the agent's tokenizer, text to any other."""
    settings = config.evaluation
    where = {"urls": [url], "model": settings.summariser_model, "key_variable": settings.summariser_key_variable}
    server = SummariserConfig(**(config.server.model_dump() | where))
    found = await identify(server)
    other = replace(
        config.model_copy(update={"server": server}),
        {"server": {"model": found.model}, "sampling": {"sampler": found.api}},
    )
    if agent.exact and found.api in SERVED and await has_tokenizer(other.server, agent.chat):
        return build.build_sampler(other, None), f"{found.model}, {found.api}, token ids"
    return ChatEndpoint(other.server), f"{found.model}, from text"


def summariser_names(sources: Sequence[str], model: str = "") -> dict[str, str]:
    """Short names of summarisers, for tables: name -> source. An address goes by `model`, the name of the model there."""
    named: dict[str, str] = {}
    for source in dict.fromkeys(sources):
        short = (model or Server(source).name.partition("://")[2]) if URL.match(source) else Path(source).name
        if source == OWN:
            named[OWN] = OWN
        elif short in named or short == OWN:
            named[hide_login(source)] = source
        else:
            named[short] = source
    return named


def names(config: Config) -> str:
    """The servers', without their logins."""
    return ", ".join(Server(url).name for url in config.server.urls)


def replace(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    """The configuration with other values in some sections."""
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def policy_folder(folder: Path) -> Path:
    """Of a checkpoint that training wrote: its policy."""
    return folder / "policy" if (folder / "policy").is_dir() else folder

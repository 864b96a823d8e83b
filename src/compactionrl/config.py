"""The configuration: one tree of pydantic models, read from TOML, every key overridable on the command line.

Importing this module imports nothing heavy, so a bad configuration is refused before torch is loaded. What only the
tokenizer and the task can tell (does this task fit?) is checked later, by `rollout.budget`, before anything is sampled.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

SUMMARY_REQUEST = (
    "Your context window is almost full. Write a summary from which you can go on without anything above. Keep: the "
    "original goal and its constraints; what has been done; important observations, values and names, exactly; errors "
    "that are not resolved; the current state; plausible next steps. Write the summary only. Do not call tools."
)
RETRY_REQUEST = (
    "Your context window is almost full and nothing above will be kept. Write the summary now, as plain text: goal, "
    "what is done, exact values, open errors, state, next steps. Think briefly. No tool calls. Be complete but short."
)
RESUME_TEMPLATE = (
    "Your earlier context was replaced by the summary that you wrote. Go on from it.\n\n"
    "<summary>\n{summary}\n</summary>"
)
PLACEHOLDER = "[The output did not fit into this context window. It follows after the summary.]"
HANDOFF_REQUEST = (
    "Your context window is almost full. Another agent, who sees nothing of it, takes over. The task is:\n\n"
    "<task>\n{task}\n</task>\n\n"
    "Hand your work over, under four headings:\n"
    "1. Major actions: what was done, how, and what came of it.\n"
    "2. What was learned: names, values, files and outputs that matter, exactly.\n"
    "3. Problems: errors and obstacles, what was tried against them, what is still open.\n"
    "4. Current status: what is finished, what is left, what to do next.\n\n"
    "Write these four sections only. Do not call tools."
)
QUESTIONS_REQUEST = (
    "You take this task over from an agent whose context window is full. Of its work you see its summary and the latest "
    "observation.\n\n<summary>\n{summary}\n</summary>\n\n<observation>\n{observation}\n</observation>\n\n"
    "Before you go on, you may ask that agent once. Ask at least five questions, numbered, about what the summary leaves open "
    "and the task needs. Write the questions only. Do not call tools."
)
ANSWERS_REQUEST = (
    "The agent who takes over has read your summary and asks:\n\n<questions>\n{questions}\n</questions>\n\n"
    "Answer every question from what stands above, exactly; where it does not say, say so. Do not call tools."
)
HANDOFF_TEMPLATE = (
    "Your earlier context was replaced by the summary below, by questions about it, and by the answers that were given from "
    "that context. Go on from them.\n\n<summary>\n{summary}\n</summary>\n\n<questions>\n{questions}\n</questions>\n\n"
    "<answers>\n{answers}\n</answers>"
)
PLACES = {
    "resume_template": ("summary",),
    "handoff_request": ("task",),
    "questions_request": ("summary", "observation"),
    "answers_request": ("questions",),
    "handoff_template": ("summary", "questions", "answers"),
}
"""What the prompts have a place for, in braces."""

MODE = re.compile(r"x(?P<windows>[1-9]\d?)|(?P<length>[1-9]\d?)C|long")
"""A mode: up to so many windows of C, or one window of so many C; see `evaluation.modes`."""


def check_mode(mode: str) -> str:
    if not MODE.fullmatch(mode):
        raise ValueError("unknown mode: choose x1, x4 (x and the number of windows), long, 2C (one window of 2C)")
    return mode


Mode = Annotated[str, AfterValidator(check_mode)]

COLDEST, NARROWEST = 1e-3, 1e-6
"""The smallest temperature but 0, and the smallest top_p: float32 takes less for 0, or overflows where it divides by it."""


def check_temperature(value: float) -> float:
    if 0 < value < COLDEST:
        raise ValueError(f"must be 0 (greedy) or at least {COLDEST:g}")
    return value


Temperature = Annotated[float, AfterValidator(check_temperature)]


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the key and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=False, frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = Field(
        "demo",
        description="Folder of a Hugging Face checkpoint; 'demo': the packaged base; 'warm-start': train one first.",
    )
    renderer: str = Field(
        "qwen3",
        description="Chat format: a name known to the `renderers` package, 'chatml', 'default' (any chat template), 'auto' "
        "(the one that renders as the template does), or 'module:Class' of your own.",
    )
    renderer_options: dict[str, Any] = Field(default_factory=dict, description="Options of that chat format.")
    device: str = Field("auto", description="'auto' (cuda if there is one, else cpu), 'cpu', 'cuda', 'cuda:1', 'mps'.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the weights that compute; with bfloat16 the optimiser keeps float32 masters."
    )
    implementation: Literal["auto", "packed", "transformers"] = Field(
        "auto",
        description="'packed': our decoder for Qwen3 and Llama; 'transformers': any causal language model, slower.",
    )


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021) for policy and critic, through peft; the weights of the base stay frozen."""

    rank: int = Field(0, ge=0, description="Rank of the adapters; 0: all weights are trained.")
    alpha: float = Field(32.0, gt=0, description="The adapters are scaled by alpha / rank.")
    targets: list[str] = Field(
        [], description="Names of the linear layers that get one, such as q_proj; none: all inside the blocks."
    )


class ContextConfig(Section):
    """The context budget and compaction (E7 to E9). All sizes in tokens."""

    budget: int = Field(65536, gt=0, description="C: hard bound of every request, prompt and response together.")
    threshold: int = Field(10240, gt=0, description="T_comp: compaction triggers when C - |h| < T_comp (E7).")
    response_tokens: int = Field(10240, gt=0, description="Limit of one response.")
    min_response: int = Field(256, gt=0, description="A response must be given at least this much room.")
    strategy: Literal["summary", "handoff"] = Field(
        "summary",
        description="What a compaction writes. 'summary': the paper's, one summary. 'handoff': Terminus-2's, a summary, "
        "questions about it and answers to them; for evaluation only.",
    )
    summary_tokens: int = Field(8192, gt=0, description="Limit of one summary, and of each other text of a hand-off.")
    max_compactions: int = Field(3, ge=0, description="Compactions a rollout may do; 0 switches compaction off (x1).")
    tail_steps: int = Field(
        2, ge=0, description="k: latest steps kept behind the summary, lowered until they fit (E9)."
    )
    keep_task: bool = Field(
        False, description="Keep the task text next to the summary (E9: no; a hand-off always does)."
    )
    summary_attempts: int = Field(
        3, ge=1, description="Summaries sampled at most per compaction; the last one is used as it is."
    )
    summary_request: str = Field(SUMMARY_REQUEST, min_length=1, description="q_sum (E8).")
    retry_request: str = Field(RETRY_REQUEST, min_length=1, description="The request after a summary that was no good.")
    resume_template: str = Field(RESUME_TEMPLATE, description="u_resume (E9); must contain {summary}.")
    handoff_request: str = Field(
        HANDOFF_REQUEST, description="Asks for the summary of a hand-off; must contain {task}."
    )
    questions_request: str = Field(
        QUESTIONS_REQUEST,
        description="Asks, in a fresh context, for questions about it; must contain {summary} and {observation}.",
    )
    answers_request: str = Field(
        ANSWERS_REQUEST, description="Asks the full window for the answers; must contain {questions}."
    )
    handoff_template: str = Field(
        HANDOFF_TEMPLATE,
        description="What the next window opens with; must contain {summary}, {questions} and {answers}.",
    )
    placeholder: str = Field(PLACEHOLDER, min_length=1, description="Answers a call whose real output did not fit.")
    max_calls: int = Field(
        8, ge=1, description="Native tool calls answered per response; more are refused as malformed."
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        for key, names in PLACES.items():
            for name in names:
                if f"{{{name}}}" not in getattr(self, key):
                    raise ValueError(f"context.{key} must contain {{{name}}}: the place where the {name} goes")
        if self.min_response > self.response_tokens:
            raise ValueError(
                "context.min_response is above context.response_tokens: lower the first or raise the second"
            )
        if self.threshold + self.min_response >= self.budget and self.max_compactions:
            raise ValueError(
                f"context.threshold ({self.threshold}) + context.min_response ({self.min_response}) reach context.budget "
                f"({self.budget}): every window would compact at once; lower the threshold or raise the budget"
            )
        if self.max_compactions and self.threshold <= self.written + self.min_response:
            raise ValueError(
                f"context.threshold ({self.threshold}) leaves no room for a summary of {self.written_sum}, its request and "
                f"a response of context.min_response ({self.min_response}): raise the threshold or lower summary_tokens"
            )
        if self.max_compactions and self.written + self.threshold + self.min_response >= self.budget:
            raise ValueError(
                f"{self.written_sum} + context.threshold ({self.threshold}) + "
                f"context.min_response ({self.min_response}) reach context.budget ({self.budget}): a window that opens "
                "with a full summary would be above the trigger; lower summary_tokens or threshold, or raise the budget"
            )
        return self

    @property
    def texts(self) -> int:
        """How many texts, each of summary_tokens at most, a compaction writes."""
        return {"summary": 1, "handoff": 3}[self.strategy]

    @property
    def written(self) -> int:
        """Tokens of a compaction's texts at most."""
        return self.texts * self.summary_tokens

    @property
    def written_sum(self) -> str:
        """The same for people."""
        times = f"{self.texts} x " if self.texts > 1 else ""
        return f"{times}context.summary_tokens ({self.summary_tokens})"

    @property
    def prompts_hash(self) -> str:
        """Identifies what the strategy says (q_sum, its retry, u_resume, the placeholder); part of every result."""
        prompts = [self.summary_request, self.retry_request, self.resume_template, self.placeholder]
        if self.strategy == "handoff":
            asked = [self.handoff_request, self.retry_request, self.questions_request, self.answers_request]
            prompts = [*asked, self.handoff_template, self.placeholder]
        return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


class LimitsConfig(Section):
    turns: int = Field(250, ge=1, description="Responses a rollout may take.")
    environment_seconds: float = Field(
        3600.0, gt=0, allow_inf_nan=True, description="Time of the environment itself, never of the model; inf: any."
    )


class SamplingConfig(Section):
    sampler: str = Field(
        "local",
        description="'local' (in process), 'vllm' or 'sglang' (servers, see [server]), or 'module:Class' of your own. Only in "
        "`eval` and `rollout`: 'chat' (any OpenAI-style endpoint; budgets are approximate), 'auto' (asks the servers).",
    )
    sampler_options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of your own Sampler.")
    temperature: Temperature = Field(1.0, ge=0, description="Softmax temperature; 0 is greedy (evaluation only).")
    top_p: float = Field(1.0, ge=NARROWEST, le=1, description="Nucleus; training refuses anything below 1.")
    concurrency: int = Field(64, ge=1, description="Rollouts in flight at a time.")


class ServerConfig(Section):
    """Servers that sample (`sampling.sampler` 'vllm', 'sglang', 'chat'): all serve the same model and stand in for each other."""

    named: ClassVar[dict[str, str]] = {key: f"server.{key}" for key in ("urls", "model", "key_variable")}
    """What the keys are called where the servers' errors name them."""

    urls: list[str] = Field([], description="Base addresses, such as http://127.0.0.1:8000.")
    model: str = Field("", description="The name under which they serve it; '': their only one.")
    key_variable: str = Field("", description="Environment variable with the API key; the key itself is never stored.")
    connect_seconds: float = Field(10.0, gt=0, description="Most seconds until a server takes a connection.")
    request_seconds: float = Field(1200.0, gt=0, description="Most seconds of one request, its answer included.")
    retries: int = Field(5, ge=0, description="Times a request that failed is tried again, with growing pauses.")
    in_flight: int = Field(64, ge=1, description="Requests at a time to one server.")
    weights: str = Field(
        "",
        description="Folder, seen by the servers too, for the weights that training pushes; '': in the run's folder.",
    )
    probe_tolerance: float = Field(
        0.0,
        ge=0,
        description="After a push: most a probe's log-probability may differ from the trainer's; 0: by model.dtype.",
    )


class EnvironmentConfig(Section):
    tasks: str = Field(
        "compactionrl.environments.notes:NotesTasks", description="'module:Class' of the task family (a TaskSet)."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of that class.")


class TrainConfig(Section):
    steps: int = Field(60, ge=0, description="Policy updates.")
    rollouts_per_step: int = Field(96, ge=1, description="N: rollouts per update.")
    group_size: int = Field(1, ge=1, description="Rollouts per task in a batch (1: the paper; more for 'group').")
    modes: list[Mode] = Field(
        [],
        description="Modes of which each task's rollouts draw one; none: the context as it stands. ['x1']: compaction "
        "off, ['2C']: one window of 2C, ['x1', 'x4']: compaction off or on.",
    )
    estimator: Literal["cross_trajectory", "segment", "concatenated", "group"] = Field(
        "cross_trajectory",
        description="Advantages: E13+E14, E13 alone, exact GAE over the joined rollout, group-relative.",
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount.")
    lambda_length: Literal["rollout", "window", "segment"] = Field(
        "rollout", description="Whose optimised tokens count as l in lambda = max(0, 1 - 1/(alpha l))."
    )
    alpha: float = Field(1.5, gt=0, description="alpha of the length-adaptive lambda.")
    critic_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["policy"] = Field(
        1.0, description="lambda of the critic's targets; 'policy': the same as the policy's."
    )
    policy_loss: Literal["clip", "truncated", "masked"] = Field(
        "clip",
        description="'clip': E12. 'truncated': importance weights cut at ratio_cap (TIS). 'masked': no gradient where the "
        "ratio leaves the clip range on either side (SAO).",
    )
    ratio_cap: float = Field(2.0, gt=0, description="Cap of the importance weights of 'truncated'.")
    staleness: int = Field(
        0,
        ge=0,
        description="Policy versions by which a trained token may be behind: rollouts run ahead of the updates; 0: none.",
    )
    clip_low: float = Field(0.2, gt=0, description="Ratio clipped below at 1 - clip_low (E12).")
    clip_high: float = Field(0.2, gt=0, description="Ratio clipped above at 1 + clip_high (E12).")
    value_clip: float | None = Field(None, gt=0, description="Clip of the value update; none by default.")
    normalisation: Literal["token", "segment"] = Field(
        "token", description="E12's token mean, or the mean of segment means."
    )
    whiten: bool = Field(False, description="Divide advantages by their RMS before E14's factor.")
    summaries: bool = Field(True, description="Train summary tokens; false: they leave M (the paper's ablation).")
    train_timed_out: bool = Field(False, description="Train rollouts that ended by 'time'.")
    entropy_bonus: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    policy_lr: float = Field(5e-4, gt=0, description="Adam learning rate of the policy.")
    critic_lr: float = Field(2e-3, gt=0, description="Adam learning rate of the critic.")
    critic_trunk: Literal["own", "frozen", "shared"] = Field(
        "own",
        description="'own': a whole model from the same checkpoint (the paper); 'frozen': only its value head is trained; "
        "'shared': a value head on the policy's hidden states, which it does not train.",
    )
    critic_updates: int = Field(2, ge=1, description="Critic updates per batch.")
    policy_updates: int = Field(1, ge=1, description="Policy updates per batch.")
    value_pretraining_steps: int = Field(
        6, ge=0, description="Batches that train only the critic, before the first policy update."
    )
    micro_batch_tokens: int = Field(8192, ge=1, description="Tokens of one micro-batch; longer windows go alone.")
    gradient_checkpointing: bool = Field(
        False,
        description="Compute each block's activations again in the backward pass: less memory, a third more work.",
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm clip, policy and critic each.")
    max_bad_updates: int = Field(3, ge=1, description="Non-finite updates in a row that stop the run.")
    retries: int = Field(
        2, ge=0, description="Times a rollout that broke down is tried again before its task is dropped."
    )
    checkpoint_every: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Latest checkpoints kept (the best is kept besides).")
    save_rollouts: bool = Field(True, description="Write every batch's rollouts to parquet.")

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.rollouts_per_step % self.group_size:
            raise ValueError("train.rollouts_per_step must be a multiple of train.group_size")
        if self.estimator == "group" and self.group_size < 2:
            raise ValueError("train.estimator 'group' needs train.group_size of at least 2: raise group_size")
        return self


class WarmStartConfig(Section):
    """Supervised training of a small policy from nothing, on scripted demonstrations (`model.path = "warm-start"`)."""

    demonstrator: str = Field(
        "compactionrl.environments.demonstrator:Demonstrator",
        description="'module:Class' of the scripted sampler that plays the tasks.",
    )
    forget: float = Field(0.25, ge=0, le=1, description="Probability that a demonstrated summary drops a known fact.")
    hurry: float = Field(0.0, ge=0, le=1, description="Probability, per turn, that it answers before the end.")
    demonstrations: int = Field(8192, ge=1, description="Rollouts demonstrated on the train split.")
    long_share: float = Field(
        0.15, ge=0, le=1, description="Share of them in one long window (4C at least), compaction off."
    )
    epochs: int = Field(3, ge=1, description="Passes over the demonstrations.")
    batch_tokens: int = Field(8192, ge=1, description="Tokens of one update.")
    lr: float = Field(3e-3, gt=0, description="Peak learning rate of AdamW; warmed up, then cosine to a tenth.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW.")
    seed: int = Field(0, ge=0, description="Seed of the initial weights, the demonstrations and their order.")
    hidden_size: int = Field(96, ge=1, description="Width of the policy.")
    layers: int = Field(2, ge=1, description="Decoder layers.")
    heads: int = Field(4, ge=1, description="Attention heads.")
    kv_heads: int = Field(2, ge=1, description="Key-value heads.")
    head_dim: int = Field(32, ge=2, multiple_of=2, description="Size of one head.")
    intermediate_size: int = Field(256, ge=1, description="Width of the MLP.")

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError("warm_start.heads must be a multiple of warm_start.kv_heads")
        return self


class EvaluationConfig(Section):
    every: int = Field(10, ge=0, description="Training steps between held-out evaluations; 0: only at the end.")
    tasks: int = Field(128, ge=1, description="Held-out tasks of an evaluation during training.")
    final_tasks: int = Field(512, ge=1, description="Held-out tasks of `eval` and of the table at the end.")
    modes: list[Mode] = Field(
        ["x1", "x4", "long"],
        min_length=1,
        description="x1: compaction off. x4: up to three compactions (xN: N - 1). long: one window of 4C (2C: of 2C).",
    )
    runs: int = Field(1, ge=1, description="Rollouts per task and mode in `eval`, each with its own random stream.")
    summarisers: list[str] = Field(
        ["own"],
        min_length=1,
        description="Who writes the summaries in `eval`, each measured for itself: 'own' (the policy), a model folder, a URL.",
    )
    summariser_model: str = Field(
        "", description="The name under which a summariser's URL serves it; '': its only one."
    )
    summariser_key_variable: str = Field("", description="As server.key_variable, for a summariser's URL.")
    prompt_price: float = Field(0.0, ge=0, description="Price of a million prompt tokens; 0: unknown.")
    completion_price: float = Field(0.0, ge=0, description="Price of a million sampled tokens; 0: unknown.")
    seed: int = Field(12345, ge=0, description="Seed of the sampling in evaluations.")


class RunConfig(Section):
    folder: str = Field("runs/run", description="Where the run is written.")
    seed: int = Field(0, ge=0, description="Seed of the run: sampling, task order, initial critic.")
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1,
        description="torch threads; 'auto' measures and takes the fastest.",
    )


class Config(Section):
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    context: ContextConfig = Field(default_factory=ContextConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    def check_trainable(self) -> None:
        """Raise ConfigError when log-probabilities as sampled could not be trained."""
        if self.sampling.top_p < 1:
            raise ConfigError(
                "sampling.top_p below 1 cannot be trained (the log-probabilities would be of another policy): set it to 1"
            )
        if self.sampling.temperature == 0:
            raise ConfigError("sampling.temperature 0 cannot be trained: set it to 1")
        if self.context.strategy == "handoff":
            raise ConfigError("context.strategy 'handoff' is for evaluation only: training needs 'summary'")
        if self.sampling.sampler in ("chat", "auto"):
            raise ConfigError(
                f"sampling.sampler {self.sampling.sampler!r} is for evaluation only: training needs token ids and their "
                "log-probabilities, from 'local', 'vllm', 'sglang' or a sampler of your own"
            )


def load_config(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Read a TOML file (or the defaults) and apply dotted overrides such as {"train.steps": 10}.

    Raises ConfigError that names every wrong key and what to do.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"no configuration file at {path}") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for key, value in (overrides or {}).items():
        put(data, key, value)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(item) for item in error.errors())) from None


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dictionaries."""
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{key}: {parent} is a value, not a section")
    data[last] = value


def keys() -> list[str]:
    """All dotted keys."""
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    return [f"{name}.{key}" for name, section in sections.items() for key in getattr(section, "model_fields", {})]


def explain(item: Any) -> str:
    """One readable line for one pydantic error."""
    key = ".".join(str(part) for part in item["loc"][:2])  # further parts are pydantic's own
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, keys(), 1)
        hint = f"did you mean {near[0]}?" if near else "`compactionrl config` lists all keys"
        return f"{key}: unknown key; {hint}"
    message = item["msg"].removeprefix("Value error, ")
    whole_section = item["type"] == "value_error" and len(item["loc"]) < 2  # such a message names its keys itself
    return message if whole_section else f"{key}: {message} (got {item['input']!r})"

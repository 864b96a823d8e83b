"""The three ways to measure a policy: x1, x4 and long. Each is a context configuration derived from the trained one."""

from __future__ import annotations

from typing import Any, Literal, get_args

from compactionrl.config import Config, ConfigError, ContextConfig, parse_config

Mode = Literal["x1", "x4", "long"]
MODES: tuple[Mode, ...] = get_args(Mode)

CHANGES: dict[Mode, Any] = {
    # One window of C, compaction off.
    "x1": lambda context: {"max_compactions": 0},
    # Up to three compactions: four windows of C. The same for every policy, however it was trained.
    "x4": lambda context: {"max_compactions": 3},
    # One window of 4C, compaction off: what the four windows of x4 hold together, never forgotten.
    "long": lambda context: {"max_compactions": 0, "budget": 4 * context.budget},
}


def for_mode(config: Config, mode: str) -> ContextConfig:
    """The context configuration of `mode`. Raises ConfigError for an unknown mode, or one that this budget cannot do."""
    if mode not in MODES:
        raise ConfigError(f"evaluation.modes: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    data = config.model_dump()
    data["context"].update(CHANGES[mode](config.context))
    try:
        return parse_config(data).context
    except ConfigError as error:
        raise ConfigError(f"evaluation.modes: {mode} is impossible with this context: {error}") from None

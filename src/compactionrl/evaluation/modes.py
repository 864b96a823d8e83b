"""The ways to run a policy: with compaction (xN) or in one window (NC). Each is a context derived from the configured one.

x1: one window of C, compaction off. x4: up to three compactions, four windows of C. xN likewise.
4C: one window of 4C, compaction off: what the four windows of x4 hold together, never forgotten. NC likewise; long: 4C.
"""

from __future__ import annotations

from collections.abc import Sequence

from compactionrl.config import MODE, Config, ConfigError, ContextConfig, parse_config


def for_mode(config: Config, mode: str) -> ContextConfig:
    """The context configuration of `mode`: the same for every policy, however it was trained.

    Raises ConfigError for an unknown mode, or one that this budget cannot do.
    """
    match = MODE.fullmatch("4C" if mode == "long" else mode)
    if match is None:
        raise ConfigError(f"unknown mode {mode!r}; choose x1, x4 (x and the number of windows), long, 2C (one window)")
    data = config.model_dump()
    windows, length = match["windows"], match["length"]
    data["context"]["max_compactions"] = int(windows) - 1 if windows else 0
    data["context"]["budget"] *= int(length or 1)
    try:
        return parse_config(data).context
    except ConfigError as error:
        raise ConfigError(f"mode {mode} is impossible with this context: {error}") from None


def training_contexts(config: Config) -> list[ContextConfig]:
    """The contexts of which a rollout in training draws one."""
    return [for_mode(config, mode) for mode in config.train.modes] or [config.context]


def longest_window(config: Config, modes: Sequence[str] | None = None) -> int:
    """Tokens of the longest window in training or in `modes` (default: those of the evaluation)."""
    modes = config.evaluation.modes if modes is None else modes
    contexts = [config.context, *training_contexts(config), *(for_mode(config, mode) for mode in modes)]
    return max(context.budget for context in contexts)

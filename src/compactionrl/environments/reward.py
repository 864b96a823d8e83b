"""What a verifier wrote -> rewards. Nothing that is missing or malformed is ever a 0."""

from __future__ import annotations

import json
import math

Rewards = dict[str, float]


class VerifierError(RuntimeError):
    """The verifier gave no reward: the task or its sandbox is at fault, so the rollout is never scored."""


def read_rewards(json_text: str | None, text: str | None) -> Rewards:
    """The rewards in `reward.json` (an object of finite numbers), else in `reward.txt` (one number, named "reward").

    None: there is no such file. Raises VerifierError if there is neither, or if the one that counts is empty or malformed.
    """
    if json_text is not None:
        return _object(json_text)
    if text is not None:
        return {"reward": _number("reward.txt", text.strip())}
    raise VerifierError("the verifier wrote neither /logs/verifier/reward.json nor /logs/verifier/reward.txt")


def reward_of(rewards: Rewards, key: str) -> float:
    """The one that is trained on. Raises VerifierError if there is none of that name."""
    if key not in rewards:
        raise VerifierError(f"the verifier gave no reward named {key!r}, but {', '.join(rewards) or 'none at all'}")
    return rewards[key]


def _object(text: str) -> Rewards:
    if not text.strip():
        raise VerifierError("reward.json is empty")
    try:
        rewards = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"reward.json is no JSON: {error}") from None
    if not isinstance(rewards, dict):
        raise VerifierError(f"reward.json must be an object of numbers, not {text[:80]!r}")
    return {name: _finite("reward.json", name, value) for name, value in rewards.items()}


def _number(file: str, text: str) -> float:
    if not text:
        raise VerifierError(f"{file} is empty")
    try:
        return _finite(file, "reward", float(text))
    except ValueError:
        raise VerifierError(f"{file} must hold one number, not {text[:80]!r}") from None


def _finite(file: str, name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise VerifierError(f"{file}: {name} must be a finite number, not {str(value)[:80]}")
    return number

"""New weights for the model that is served, from folders that the operator allowed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import torch

from compactionrl.models import load_policy
from compactionrl.models.lora import ADAPTER_CONFIG
from compactionrl.serving.errors import ApiError
from compactionrl.serving.model import ServedModel


class Weights:
    """The served policy's weights. `allowed`: new ones may come from below this folder; None: never.

    `version` names those that were pushed last; "" if none were.
    """

    def __init__(self, model: ServedModel, allowed: Path | None) -> None:
        self.model, self.allowed = model, allowed.resolve() if allowed else None
        self.version = ""
        self._lock = asyncio.Lock()

    async def load(self, folder: str, version: str) -> str:
        """Replace the weights by those in `folder`, all of them or none. Raises ApiError."""
        path = self._permitted(folder)
        policy = self.model.policy
        async with self._lock:
            try:
                new = await asyncio.to_thread(
                    load_policy, path, dtype=policy.head_weight.dtype, implementation=policy.implementation
                )
            except (OSError, ValueError) as error:
                raise ApiError(400, f"no weights can be loaded: {error}") from None
            state = new.state_dict()
            if new.config != policy.config or state.keys() != policy.state_dict().keys():
                raise ApiError(400, f"{path.name} holds another model than the one that is served")
            with torch.no_grad():
                policy.load_state_dict(state)
            self.model.engine.weights_changed(self.model.engine.policy_version + 1)
            self.version = version
        return version

    def _permitted(self, folder: str) -> Path:
        """Nothing outside of the allowed folder is looked at, and nothing is told about it."""
        if self.allowed is None:
            raise ApiError(400, "this server takes no weights: start it with --allow-weights-from FOLDER")
        try:
            path = Path(folder).resolve()
        except (OSError, ValueError, RuntimeError):
            path = Path("/")
        if not path.is_relative_to(self.allowed):
            raise ApiError(400, "this server takes weights from below its --allow-weights-from FOLDER only")
        if os.path.exists(path / ADAPTER_CONFIG):  # False also for a path that cannot be
            raise ApiError(400, "adapters are no weights: merge them first (compactionrl merge)")
        return path

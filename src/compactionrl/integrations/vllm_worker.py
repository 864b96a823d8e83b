"""With this class a vLLM server takes the weights that training pushes:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls compactionrl.integrations.vllm_worker.PushedWeights

It runs inside vLLM's workers and is called through `POST /collective_rpc`; nothing else of this package is imported there.
"""

from __future__ import annotations

from typing import Any

from vllm import _custom_ops
from vllm.platforms import current_platform

if current_platform.is_cpu():
    # With oneDNN, vLLM packs the linear layers' weights away when it loads them, and later loads never reach that copy: the
    # server would go on with the old weights there, and say nothing.
    _custom_ops._supports_onednn = False


class PushedWeights:
    """Mixed into vLLM's worker (0.20 or later), whose methods it uses."""

    pushed_version = ""

    def load_pushed_weights(self: Any, folder: str, version: str) -> str:
        """Load the safetensors in `folder`, a path on this machine, in place of the present weights; returns `version`.

        Until that has succeeded, the weights have no version.
        """
        self.pushed_version = ""
        self.reload_weights(weights_path=folder)
        self.pushed_version = version
        return version

    def pushed_weights_version(self) -> str:
        """The version loaded last; empty since the server's start, or when loading has failed."""
        return self.pushed_version

"""What `vllm_cpu.py` must catch: the worker extension on a server whose linear layers keep a packed copy of their weights."""

from vllm import _custom_ops

from compactionrl.integrations.vllm_worker import PushedWeights

__all__ = ["PushedWeights"]

_custom_ops._supports_onednn = True

"""CompactionRL: reinforcement learning for agents that outlive their context window.

Three layers that never reach up: `compactionrl.method` knows tensors only, `compactionrl.rollout` knows tokens,
samplers and environments but no torch, `compactionrl.training` joins them. Importing this package imports none of them.
"""

__version__ = "0.1.0"

"""Policy and critic: our own decoder or any of Hugging Face's, with which checkpoints are exchanged."""

from compactionrl.models.checkpoint import load_critic, load_policy, save_critic, save_policy
from compactionrl.models.config import ModelConfig
from compactionrl.models.critic import Critic
from compactionrl.models.policy import Policy
from compactionrl.models.transformer import Transformer

__all__ = ["Critic", "ModelConfig", "Policy", "Transformer", "load_critic", "load_policy", "save_critic", "save_policy"]

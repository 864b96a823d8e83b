"""Policy and critic: a dense decoder that exchanges checkpoints with Hugging Face."""

from compactionrl.models.checkpoint import load_critic, load_policy, save_critic, save_policy
from compactionrl.models.config import ModelConfig
from compactionrl.models.critic import Critic
from compactionrl.models.transformer import Transformer

__all__ = ["Critic", "ModelConfig", "Transformer", "load_critic", "load_policy", "save_critic", "save_policy"]

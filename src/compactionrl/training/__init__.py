"""From rollouts to a trained policy: batches, learner, the loop, checkpoints, warm start."""

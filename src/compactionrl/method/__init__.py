"""The paper's equations E11 to E15 as pure functions on tensors: credit, losses, log-probabilities, diagnostics."""

from compactionrl.method.advantages import ESTIMATORS, Estimate, Estimator, adaptive_lambda, estimate
from compactionrl.method.diagnostics import credit_diagnostics, critic_diagnostics, policy_diagnostics
from compactionrl.method.importance import clipped, kl_to_sampler, masked, ratio, truncated
from compactionrl.method.layout import SPANS, Layout, Span
from compactionrl.method.logprobs import token_logprobs
from compactionrl.method.losses import (
    NORMALISATIONS,
    POLICY_LOSSES,
    Normalisation,
    PolicyLoss,
    entropy_bonus,
    policy_loss,
    token_weights,
    value_loss,
    weight_total,
)
from compactionrl.method.scan import reverse_scan

__all__ = [
    "ESTIMATORS",
    "NORMALISATIONS",
    "POLICY_LOSSES",
    "SPANS",
    "Estimate",
    "Estimator",
    "Layout",
    "Normalisation",
    "PolicyLoss",
    "Span",
    "adaptive_lambda",
    "clipped",
    "credit_diagnostics",
    "critic_diagnostics",
    "entropy_bonus",
    "estimate",
    "kl_to_sampler",
    "masked",
    "policy_diagnostics",
    "policy_loss",
    "ratio",
    "reverse_scan",
    "token_logprobs",
    "token_weights",
    "truncated",
    "value_loss",
    "weight_total",
]

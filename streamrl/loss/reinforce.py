"""The plain policy gradient, without a ratio (Williams 1992; RLOO, arXiv 2402.14740; GPG, arXiv 2504.02546)."""

from __future__ import annotations

import torch

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ratios import possible
from streamrl.objective_params import Plain


def reinforce(batch: LossBatch, params: Plain) -> TokenLoss:
    """``−A·log π``: gradient ``−A·∇log π``, what every other loss has on policy."""
    loss = -batch.advantages * possible(batch.current)
    return token_loss(loss, torch.ones_like(batch.current), batch.advantages)

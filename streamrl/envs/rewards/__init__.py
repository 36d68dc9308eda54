"""Rewards for answers: exact match, mathematics, code, an LLM judge, a reward model, mixtures (docs/rewards.md)."""

from streamrl.envs.rewards.loading import load_reward
from streamrl.envs.rewards.protocol import Answer, RewardFn, text_of

__all__ = ["Answer", "RewardFn", "load_reward", "text_of"]

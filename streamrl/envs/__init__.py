"""Environments: what a user writes, and what loads and runs it (docs/environments.md)."""

from streamrl.envs.environment import Completion, Policy, Reward, Task, load_environment
from streamrl.envs.episode import ContextFull

__all__ = ["Completion", "ContextFull", "Policy", "Reward", "Task", "load_environment"]

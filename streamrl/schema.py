"""The typed tree of settings (C12): every key, its default and its unit. ``streamrl/config.py`` reads it from YAML.

A section whose first field is ``name`` may be given as a plain value: ``env=my_pkg.tasks:Riddles`` is
``env.name=my_pkg.tasks:Riddles``. Defaults are settings that were run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EnvConfig:
    name: str = "streamrl.envs.reasoning_gym:ReasoningGym"
    """``package.module:Name`` of an async function or a class (docs/environments.md)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class; an unknown one is refused by name."""
    timeout_s: float = 60.0
    """Seconds one episode may take before it counts as failed."""
    max_failures: int = 20
    """Leases that failed in a row, over all rollouters of the run, after which the run ends and says why."""


@dataclass
class WarmupConfig:
    """Supervised steps on the task's own answers before RL, for a model that was built from scratch."""

    steps: int = 0
    """0 switches the warm-up off."""
    batch: int = 256
    """Question-answer pairs per step."""
    lr: float = 1e-3
    tasks: int = 0
    """Distinct tasks that the warm-up sees; 0 means no limit."""
    stop_accuracy: float = 0.0
    """Greedy accuracy on 256 training tasks, in [0, 1], that ends the warm-up early and that the model does not exceed;
    0: all ``steps`` are taken."""


@dataclass
class ModelConfig:
    name: str = "tiny-qwen3"
    """A folder with a transformers checkpoint, or ``tiny-qwen3``: a small Qwen3 built from ``args`` on this machine."""
    args: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers config that a built model changes."""
    dtype: str = "float32"
    """Parameter dtype of the trainer and the embedded engine; only ``float32`` so far."""
    max_length: int = 512
    """Longest trajectory in tokens, prompt included."""
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    cache: bool = True
    """Keep warmed-up models in the user's cache folder (``$XDG_CACHE_HOME/streamrl``)."""


@dataclass
class EngineConfig:
    name: str = "embedded"
    slots: int = 64
    """Sequences decoded at once."""
    kv: str = "keep"
    """KV cache of requests in flight at a weight update: ``keep`` (stale KV stays) or ``recompute``."""
    threads: int = 1
    """torch threads of each rollouter."""


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 64
    """Sampled tokens of one turn at most."""


@dataclass
class GroupConfig:
    size: int = 8
    """Trajectories per prompt (G)."""
    per_step: int = 32
    """Groups per optimizer step, over all ranks."""
    drop_zero_variance: bool = False
    """Dynamic sampling: drop groups whose rewards are all equal, give the credit back and take another prompt."""


@dataclass
class BufferConfig:
    lease_timeout_s: float = 120.0
    """Seconds a rollouter may take for one group before its prompt is issued again."""
    max_attempts: int = 5
    """Leases of one prompt that may be lost or fail before the run ends and says why."""
    max_bytes: int = 1 << 30
    """Bytes of trajectories that may be ready or promised; leases stop before it is passed (C4)."""


@dataclass
class LossConfig:
    name: str = "tis"
    """``tis`` (behaviour-anchored truncated importance sampling) or ``ppo`` (clipped, PPO/GRPO)."""
    tis_cap: float = 5.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    advantage: str = "mean"
    """Baseline within the group: ``mean``, ``mean_std``, ``leave_one_out`` or ``batch_std``."""
    aggregation: str = "token_mean"
    """``token_mean``, ``sequence_mean_token_mean``, ``sequence_mean_token_sum`` or ``prompt_mean``."""


@dataclass
class TrainerConfig:
    lr: float = 1e-6
    schedule: str = "constant"
    """After the warm-up steps: ``constant``, ``linear`` (to 0 at the last step) or ``cosine``."""
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    token_budget: int = 16384
    """Tokens of one micro-batch on one rank, padding not counted; a longer trajectory is refused."""
    threads: int = 1
    """torch threads of each rank."""


@dataclass
class SyncConfig:
    bucket_bytes: int = 64 << 20
    timeout_s: float = 60.0
    """Seconds a rollouter may take to stage or commit a version before it is declared dead."""


@dataclass
class EvalConfig:
    every: int = 10
    """Optimizer steps between greedy evaluations of the held-out tasks; 0: only the first and the last version."""
    tasks: int = 256
    """Held-out tasks; they never occur in training."""


@dataclass
class WandbConfig:
    name: str = "offline"
    """``offline``, ``online`` or ``disabled``; a missing account is never an error."""
    project: str = "streamrl"


@dataclass
class LivenessConfig:
    heartbeat_s: float = 1.0
    actor_timeout_s: float = 30.0
    """Seconds without a heartbeat after which an actor counts as dead."""
    no_progress_s: float = 300.0
    """Seconds without a step of the optimizer or the warm-up, after which the run ends and names every actor's wait."""
    start_timeout_s: float = 180.0
    drain_timeout_s: float = 20.0
    max_restarts: int = 10
    """Rollouters that may be replaced before the run gives up."""


@dataclass
class Config:
    """The whole run. ``streamrl launch --dry-run`` prints it resolved."""

    run: str = "run"
    """Name of the run; its folder is ``runs/<run>-<time>`` unless ``--run-dir`` says otherwise."""
    seed: int = 0
    steps: int = 100
    """Optimizer steps."""
    trainers: int = 1
    rollouts: int = 1
    """Rollouters."""
    max_lag: int = 1
    """Versions that a trained token may lag behind the trainer (C1). 0 is exact on-policy, 1 one-step-off."""
    on_stale: str = "mask"
    """What happens to a group with tokens over the bound: ``mask``, ``evict`` or ``wait`` (C1)."""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)

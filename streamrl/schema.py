"""The typed tree of settings (C12): every key, its default and its unit. ``streamrl/config.py`` reads it from YAML.

A section whose first field is ``name`` may be given as a plain value: ``env=my_pkg.tasks:Riddles`` is
``env.name=my_pkg.tasks:Riddles``. Defaults are settings that were run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from streamrl.lora_schema import LoraConfig
from streamrl.sync_schema import SyncConfig


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
    play: str = "anywhere"
    """Where episodes run: ``anywhere`` (rollouters and attached processes) or in ``attached`` ones (docs/attach.md)."""


@dataclass
class GatewayConfig:
    """The HTTP endpoint of each rollouter: for clients of its episodes, and for ``streamrl attach``."""

    host: str = "127.0.0.1"
    """Address that it binds to. Any but loopback lets other machines in, with a key, in plain HTTP."""
    port: int = 0
    """0: any free port; else rollouter N takes this port + N, and the evaluator the one after the last."""
    strict: bool = False
    """Refuse requests that want to sample in another way than the run. Else its way wins, which a header says."""


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
    """What the model computes in and its weights travel in, in trainer and engines: ``float32`` or ``bfloat16``. The
    trainer's own weights, gradients and optimizer are float32 in any case (docs/numerics.md)."""
    head_dtype: str = "float32"
    """Of the logits, in trainer and engines: ``float32``, or ``bfloat16`` with a body in it."""
    max_length: int = 512
    """Longest trajectory in tokens, prompt included."""
    tool_format: str = "auto"
    """How the model writes tool calls: ``hermes``, ``llama_json``, ``pythonic``, ``compact``, or ``auto``: as its chat
    template shows."""
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    cache: bool = True
    """Keep warmed-up models in the user's cache folder (``$XDG_CACHE_HOME/streamrl``)."""


@dataclass
class EngineConfig:
    name: str = "embedded"
    """``embedded``, ``vllm`` or ``sglang`` (docs/engines.md)."""
    python: str = ""
    """Interpreter of the actors that hold an engine, where it has an environment of its own. Empty: the run's."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, by its own names; one that a setting of streamrl decides is refused."""
    prefix_caching: bool = False
    """Reuse the KV cache of equal beginnings among requests of the same version (vLLM and SGLang)."""
    async_scheduling: bool = False
    """Schedule the next step while the last one computes (vLLM and SGLang)."""
    tensor_parallel: int = 1
    """Devices that one copy of the model is split over, layer by layer."""
    pipeline_parallel: int = 1
    """Devices that the layers of one copy are dealt to."""
    data_parallel: int = 1
    """Copies of the model in one engine."""
    slots: int = 64
    """Sequences decoded at once."""
    kv: str = "keep"
    """KV cache of requests in flight at a weight update: ``keep`` (stale KV stays) or ``recompute``."""
    threads: int = 1
    """torch threads of each engine."""
    device: str = "cpu"
    """Of the embedded engine: ``cpu`` or ``cuda:N``, the same one for all engines of a host."""
    urls: list[str] = field(default_factory=list)
    """Servers that run already (``http://HOST:PORT``), shared by all rollouters, instead of engines of the run."""


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    top_k: int = 0
    """Only the most likely tokens, so many; 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability; 1: all."""
    min_p: float = 0.0
    """Only tokens at least this times as likely as the most likely one; 0: all."""
    max_tokens: int = 64
    """Sampled tokens of one turn at most."""


@dataclass
class GroupConfig:
    size: int = 8
    """Episodes per prompt (G); an episode is one trajectory, or several where it branches."""
    per_step: int = 32
    """Groups per optimizer step, over all ranks."""
    drop_zero_variance: bool = False
    """Dynamic sampling: drop groups whose rewards are all equal, give the credit back and take another prompt."""
    min_size: int = 2
    """Finished episodes that a group needs; with fewer it fails and its prompt is issued again."""
    on_straggler: str = "wait"
    """A group whose slow trajectories are late: ``wait`` for all of them, or ``close`` it with what it has."""
    straggler_s: float = 0.0
    """With ``close``: seconds from the ``min_size``-th finished episode until the group is closed."""


@dataclass
class QueueConfig:
    backend: str = "zmq"
    """How payloads travel: ``zmq`` (by value, through the buffer) or ``nixl`` (by reference: trainers read them
    from the rollouter's memory)."""
    transport: str = "ipc"
    """Of the sockets: ``ipc`` (a private folder) or ``tcp`` (loopback, authenticated and encrypted by CURVE)."""
    checksum: bool = False
    """An xxh3 digest with every payload that a rollouter sends, verified on arrival."""
    arena_bytes: int = 256 << 20
    """With ``nixl``: registered memory of each rollouter; a full one makes its groups wait."""


@dataclass
class BufferConfig:
    lease_timeout_s: float = 120.0
    """Seconds a rollouter may take for one group before its prompt is issued again."""
    acknowledge_timeout_s: float = 600.0
    """Seconds a trainer may take for one batch before its groups are offered again; one that acknowledges later
    than that ends the run."""
    max_attempts: int = 5
    """Leases of one prompt that may be lost, expire or fail before the run ends and says why."""
    max_bytes: int = 1 << 30
    """Bytes of trajectories that may be ready or promised; leases stop before it is passed (C4)."""
    shards: int = 1
    """Processes that hold payloads, by lease; 1: the buffer holds them itself."""
    epochs_per_group: int = 1
    """Optimizer steps that train on each group, within the lag bound."""
    priority: str = ""
    """``package.module:function`` from a group's description to a number; higher trains first. Empty: oldest first."""
    journal: bool = True
    """Write every change to ``journal/`` in the run folder, so that a killed buffer restores itself (C10)."""
    fsync: str = "interval"
    """When the journal reaches the disk: ``always`` (before each acknowledgement), ``interval`` or ``never``. A killed
    process loses nothing in any case; a machine that loses power does."""
    fsync_interval_s: float = 1.0
    segment_bytes: int = 64 << 20
    """Of one journal file; consumed ones are deleted."""
    keep: str = "live"
    """What the journal keeps: ``live`` groups, or ``all``, for ``streamrl replay``."""


@dataclass
class KLConfig:
    """A KL term to a reference policy (``loss/kl.py``)."""

    coefficient: float = 0.0
    """0 switches it off."""
    place: str = "loss"
    """``loss``: added to the loss; ``reward``: k1 is taken off the advantage of each token."""
    form: str = "k2"
    """In the loss: ``k2``, ``k3``, ``k3_plus`` (value of k3, gradient of k2), ``k1`` or ``absolute``."""
    off_policy: bool = False
    """Multiply by current/behaviour, which makes the term unbiased on stale data (DeepSeek-V3.2)."""
    ratio_cap: float = math.inf
    """Largest such ratio; finite: a constant weight instead of one with a gradient."""
    reference: str = ""
    """``initial``: the policy at the start, frozen; or a folder with a checkpoint. Empty: none."""
    serve: str = "trainer"
    """Where: a sharded copy in the ``trainer`` ranks, or an ``engine`` in a process of its own, which scores first."""


@dataclass
class ValueConfig:
    """A value head on the policy's last hidden state, trained with it; there with ``loss.advantage=gae``."""

    coefficient: float = 0.5
    """Weight of its squared error in the loss."""
    gamma: float = 1.0
    lam: float = 0.95
    step: str = "token"
    """What gamma and lam discount over: each sampled ``token``, or each ``turn`` of an agent."""
    clip: float = math.inf
    """How far one update may move a value unpunished."""
    whiten: bool = True
    """Advantages of the batch's tokens are brought to mean 0 and deviation 1."""


@dataclass
class CorrectionConfig:
    """Corrections for the gap between engine and trainer, all off (``loss/corrections.py``, docs/losses.md)."""

    weight: str = "none"
    """Multiply the loss by proximal/behaviour of the ``token``, ``sequence`` or ``geometric`` mean; or ``none``."""
    weight_cap: float = math.inf
    """Cut of that weight (truncated importance sampling)."""
    reject: str = "none"
    """Drop tokens (``token``) or trajectories (``sequence``, ``geometric``) outside the band below; or ``none``."""
    reject_low: float = 0.0
    reject_high: float = math.inf
    max_k3: float = math.inf
    """Drop trajectories whose mean k3 is over this, nats."""
    veto_low: float = 0.0
    """Drop trajectories with a token whose weight is below this."""
    veto_high: float = math.inf
    opsm: float = math.inf
    """Drop trajectories with negative advantage whose mean of log behaviour − log current is over this, nats."""
    renormalise: bool = False
    """Give the loss weight of what is dropped, or masked as stale, to the rest; off: it stays in the denominators."""


@dataclass
class RewardModelConfig:
    """A reward model in a process of its own, for the reward ``model`` (docs/rewards.md)."""

    name: str = ""
    """A folder with a transformers checkpoint for sequence classification with one label. Empty: none."""
    batch: int = 16
    """Answers of one forward pass."""
    max_length: int = 4096
    """Tokens of one conversation at most; a longer one is refused, and its trajectory fails."""
    threads: int = 1
    """torch threads."""


@dataclass
class LossConfig:
    """``loss=NAME`` takes the preset ``conf/loss/NAME.yaml`` where there is one; null means the loss's own default."""

    name: str = "tis"
    """A loss of docs/losses.md, or ``package.module:function``."""
    cap: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    delta: float | None = None
    floor: float | None = None
    tau_pos: float | None = None
    tau_neg: float | None = None
    weight_cap: float | None = None
    weight_rule: str | None = None
    divergence: str | None = None
    pull: float | None = None
    budget: float | None = None
    moment_rule: str | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    cov_share: float | None = None
    k_pos: float | None = None
    lambda_pos: float | None = None
    k_neg: float | None = None
    lambda_neg: float | None = None
    args: dict[str, Any] = field(default_factory=dict)
    """Parameters of a loss of your own."""
    proximal: str = "behaviour"
    """What the update is measured against: ``behaviour`` (the sampler's log-probs) or ``recompute`` (one more forward
    pass before the update, with the weights it starts from)."""
    updates_per_batch: int = 1
    """Optimizer steps that a batch is split over; a version is published after the last."""
    advantage: str = "mean"
    """Baseline and scale of advantages (``loss/advantages.py``); ``gae``: of tokens, by a value head."""
    aggregation: str = "token_mean"
    """``token_mean``, ``sequence_mean_token_mean``, ``sequence_mean_token_sum``, ``constant_length`` or
    ``prompt_mean``."""
    turn_discount: float = 1.0
    """Factor on the advantage of a token for each turn that followed its own."""
    overlong_cache: int = 0
    """The last so many of ``sampling.max_tokens`` tokens cost an answer reward, linearly (DAPO); 0: off."""
    overlong_penalty: float = 1.0
    """Reward that an answer of ``sampling.max_tokens`` tokens loses."""
    mask_truncated: bool = False
    """Truncated trajectories get no policy gradient; they stay in baselines and denominators (DAPO's filter)."""
    value: ValueConfig = field(default_factory=ValueConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass
class StalenessConfig:
    target_ess: float = 0.0
    """Effective sample size (``policy/ess``) that admission is steered to, inside ``max_lag``; 0: always up to it."""


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
class ParityConfig:
    name: str = "gate"
    """Where engines and trainer disagree before training (C7): ``gate`` ends the run, ``warn`` flags its metrics."""
    rms: float = 0.0
    """Largest rms of engine − trainer, nats, at temperature 1; other limits scale along. 0: by ``model.dtype``."""


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
    """Actors that may be replaced before the run gives up; a server of ``engine.urls`` counts only if none is left."""


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
    rollouters_per_engine: int = 0
    """0: each rollouter holds an engine. N: one in a process of its own for every N, sampled from by all of them."""
    max_lag: int = 1
    """Versions that a trained token may lag behind the trainer (C1). 0 is exact on-policy, 1 one-step-off."""
    on_stale: str = "mask"
    """What happens to a group with tokens over the bound: ``mask``, ``evict`` or ``wait`` (C1)."""
    parity: ParityConfig = field(default_factory=ParityConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)

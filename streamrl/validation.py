"""Refuse settings that contradict each other, with the way out, and derive the bounds that ``--dry-run`` prints."""

from __future__ import annotations

import math
import re

from streamrl.engine_checks import check_engine
from streamrl.errors import ConfigError
from streamrl.objective_checks import check_objective
from streamrl.schema import Config
from streamrl.sharing import check_sharing, engine_hosts
from streamrl.sync_checks import check_sync, choose_transport

CHOICES: dict[str, tuple[str, ...]] = {
    "on_stale": ("mask", "evict", "wait"),
    "parity.name": ("gate", "warn"),
    "env.play": ("anywhere", "attached"),
    "engine.name": ("embedded", "vllm", "sglang"),
    "engine.kv": ("keep", "recompute"),
    "model.dtype": ("float32", "bfloat16"),
    "model.head_dtype": ("float32", "bfloat16"),
    "model.tool_format": ("auto", "compact", "hermes", "pythonic", "llama_json"),
    "group.on_straggler": ("wait", "close"),
    "queue.backend": ("zmq", "nixl"),
    "queue.transport": ("ipc", "tcp"),
    "buffer.fsync": ("always", "interval", "never"),
    "buffer.keep": ("live", "all"),
    "sync.transport": ("auto", "shm", "zmq", "collective", "disk", "nixl"),
    "sync.encoding": ("full", "delta"),
    "sync.stage": ("host", "device", "none"),
    "sync.commit": ("together", "rolling"),
    "sync.on_mismatch": ("stop", "rollback"),
    "trainer.schedule": ("constant", "linear", "cosine"),
    "wandb.name": ("offline", "online", "disabled"),
}

MINIMA: dict[str, float] = {
    "steps": 1,
    "trainers": 1,
    "rollouts": 1,
    "rollouters_per_engine": 0,
    "max_lag": 0,
    "parity.rms": 0,
    "env.timeout_s": 0.001,
    "env.max_failures": 1,
    "model.max_length": 2,
    "model.warmup.steps": 0,
    "model.warmup.batch": 1,
    "model.lora.rank": 0,
    "engine.slots": 1,
    "engine.tensor_parallel": 1,
    "engine.pipeline_parallel": 1,
    "engine.data_parallel": 1,
    "engine.threads": 1,
    "sampling.top_k": 0,
    "sampling.max_tokens": 1,
    "reward_model.batch": 1,
    "reward_model.max_length": 2,
    "reward_model.threads": 1,
    "group.size": 2,
    "group.per_step": 1,
    "group.min_size": 2,
    "group.straggler_s": 0,
    "queue.arena_bytes": 1 << 12,
    "buffer.lease_timeout_s": 0.001,
    "buffer.acknowledge_timeout_s": 0.001,
    "buffer.max_attempts": 1,
    "buffer.max_bytes": 1,
    "buffer.shards": 1,
    "buffer.epochs_per_group": 1,
    "buffer.fsync_interval_s": 0.001,
    "buffer.segment_bytes": 1 << 12,
    "trainer.lr": 0,
    "trainer.lr_warmup_steps": 0,
    "trainer.weight_decay": 0,
    "trainer.token_budget": 2,
    "trainer.threads": 1,
    "sync.bucket_bytes": 256,
    "sync.timeout_s": 0.001,
    "sync.anchor_every": 1,
    "sync.canary_every": 0,
    "eval.every": 0,
    "eval.tasks": 0,
    "gateway.port": 0,
    "liveness.heartbeat_s": 0.01,
    "liveness.actor_timeout_s": 0.1,
    "liveness.no_progress_s": 0.1,
    "liveness.start_timeout_s": 0.1,
    "liveness.drain_timeout_s": 0.1,
    "liveness.max_restarts": 0,
}

LAST_PORT = 65_535

POSITIVE = ("model.lora.alpha", "sampling.temperature", "trainer.max_grad_norm", "trainer.eps")


def lookup(config: Config, key: str) -> object:
    """The value at a dotted key."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def validate(config: Config) -> Config:
    """``config`` unchanged, or ``ConfigError`` with the first thing that is wrong and the way out."""
    if config.model.dtype == "float16":
        raise ConfigError(
            "model.dtype=float16: gradients underflow without loss scaling, which the trainer does not do; "
            "set model.dtype=bfloat16"
        )
    for key, choices in CHOICES.items():
        value = lookup(config, key)
        if value not in choices:
            raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}")
    for key, minimum in MINIMA.items():
        value = lookup(config, key)
        assert isinstance(value, int | float)
        if not minimum <= value < math.inf:
            raise ConfigError(f"{key}={value}: must be at least {minimum:g} and finite")
    for key in POSITIVE:
        value = lookup(config, key)
        assert isinstance(value, int | float)
        if not 0 < value < math.inf:
            raise ConfigError(f"{key}={value}: must be positive and finite")
    _check_relations(config)
    check_engine(config)
    check_sharing(config)
    check_sync(config)
    check_objective(config)
    return config


def _check_relations(config: Config) -> None:
    sampling, group, trainer = config.sampling, config.group, config.trainer
    if not (0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
        raise ConfigError(
            f"sampling.top_p={sampling.top_p}, sampling.min_p={sampling.min_p}: expected 0 < top_p ≤ 1 and "
            "0 ≤ min_p ≤ 1; sampling.top_p=1.0 and sampling.min_p=0.0 switch them off"
        )
    if config.model.head_dtype != "float32" and config.model.dtype == "float32":
        raise ConfigError(
            f"model.head_dtype={config.model.head_dtype} with model.dtype=float32 would round logits that nothing else "
            "rounds; set model.head_dtype=float32, or model.dtype=bfloat16"
        )
    if not re.fullmatch(r"cpu|cuda:\d+", config.engine.device):
        raise ConfigError(f"engine.device={config.engine.device}: expected cpu or cuda:N, such as cuda:0")
    if sampling.max_tokens >= config.model.max_length:
        raise ConfigError(
            f"sampling.max_tokens={sampling.max_tokens} leaves no room for a prompt in "
            f"model.max_length={config.model.max_length}; raise model.max_length"
        )
    if trainer.token_budget < config.model.max_length:
        raise ConfigError(
            f"trainer.token_budget={trainer.token_budget} cannot hold one trajectory of "
            f"model.max_length={config.model.max_length} tokens; raise it to at least that"
        )
    if not (0 <= trainer.beta1 < 1 and 0 <= trainer.beta2 < 1):
        raise ConfigError(f"trainer.beta1={trainer.beta1}, trainer.beta2={trainer.beta2}: both must lie in [0, 1)")
    if group.min_size > group.size:
        raise ConfigError(
            f"group.min_size={group.min_size} is more than group.size={group.size}: no group could be complete; "
            "lower group.min_size"
        )
    _check_queue(config)
    if config.gateway.port and config.gateway.port + config.rollouts > LAST_PORT:
        raise ConfigError(
            f"gateway.port={config.gateway.port}: {config.rollouts} rollouters and the evaluator take a port each from "
            f"there on, and {LAST_PORT} is the last; lower it"
        )
    if group.per_step < config.trainers:
        raise ConfigError(
            f"group.per_step={group.per_step} groups cannot feed trainers={config.trainers} ranks; "
            "raise group.per_step or lower --trainers"
        )
    if config.liveness.actor_timeout_s <= 2 * config.liveness.heartbeat_s:
        raise ConfigError(
            f"liveness.actor_timeout_s={config.liveness.actor_timeout_s} must be over twice "
            f"liveness.heartbeat_s={config.liveness.heartbeat_s}, or a late heartbeat counts as a death"
        )
    if config.model.warmup.steps and config.model.name != "tiny-qwen3":
        raise ConfigError(
            f"model.warmup.steps={config.model.warmup.steps} is for a model built here; "
            f"model.name={config.model.name} is already trained: set model.warmup.steps=0"
        )


def _check_queue(config: Config) -> None:
    buffer, queue = config.buffer, config.queue
    if buffer.epochs_per_group > config.max_lag + 1:
        raise ConfigError(
            f"buffer.epochs_per_group={buffer.epochs_per_group} needs max_lag={buffer.epochs_per_group - 1} or more, "
            f"got max_lag={config.max_lag}: every further epoch trains on tokens one version older"
        )
    if config.on_stale == "wait" and (buffer.epochs_per_group > 1 or buffer.priority):
        what = "buffer.priority" if buffer.priority else f"buffer.epochs_per_group={buffer.epochs_per_group}"
        raise ConfigError(
            f"on_stale=wait hands groups out in the order in which they grow old, which {what} changes; "
            "use on_stale=mask or evict"
        )
    if buffer.keep == "all" and not buffer.journal:
        raise ConfigError("buffer.keep=all keeps the journal, but buffer.journal=false; set buffer.journal=true")
    batch_bytes = config.group.per_step * config.group.size * config.model.max_length * 9  # as buffers/room.py
    if queue.backend == "nixl" and config.rollouts * queue.arena_bytes < batch_bytes:
        raise ConfigError(
            f"queue.arena_bytes={queue.arena_bytes} in each of rollouts={config.rollouts} may not hold one batch of "
            f"{batch_bytes} bytes, and a batch cannot be trained in halves; "
            f"set queue.arena_bytes={-(-batch_bytes // config.rollouts)} or more"
        )
    if queue.backend == "nixl" and buffer.shards > 1:
        raise ConfigError(
            f"queue.backend=nixl keeps payloads with the rollouters, buffer.shards={buffer.shards} in stores; "
            "set buffer.shards=1 or queue.backend=zmq"
        )
    if buffer.keep == "all" and (queue.backend == "nixl" or buffer.shards > 1):
        raise ConfigError(
            f"buffer.keep=all needs every payload in the buffer's own journal; set queue.backend=zmq buffer.shards=1, "
            f"got queue.backend={queue.backend} buffer.shards={buffer.shards}"
        )


def derived_bounds(config: Config) -> dict[str, object]:
    """What follows from the settings, for ``--dry-run``."""
    outstanding = (config.max_lag + 1) * config.group.per_step
    return {
        "groups in flight or ready, at most": outstanding,
        "trajectories per optimizer step": config.group.per_step * config.group.size,
        "lag of a trained token, at most (versions)": config.max_lag,
        "sequences decoded at once, at most": (engine_hosts(config) or config.rollouts) * config.engine.slots,
        "trajectory tokens outstanding, at most": outstanding * config.group.size * config.model.max_length,
        "weights travel by": " – ".join(choose_transport(config)),
        "seconds without progress until the run ends": config.liveness.no_progress_s,
    }

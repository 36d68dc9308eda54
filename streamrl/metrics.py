"""The names that every run writes, by group, and the rule that a line carries every key of its groups."""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: dict[str, tuple[str, ...]] = {
    "": ("step", "version", "time_s", "wall_s"),
    "reward/": ("mean", "std", "zero_variance_fraction"),
    "lag/": ("mean", "p95", "max", "masked_tokens", "evicted_groups", "bound"),
    "policy/": (
        "loss",
        "clip_fraction",
        "clip_fraction_low",
        "clip_fraction_high",
        "ratio_mean",
        "entropy",
        "kl_k1",
        "kl_k3",
        "ess",
        "ess_sequence",
        "grad_norm",
        "lr",
    ),
    "mismatch/": ("rms", "max", "k3", "canary_rms"),
    "length/": ("mean", "max", "truncated_fraction", "turns_mean"),
    "throughput/": ("generated_tokens_per_s", "trained_tokens_per_s", "groups_per_s"),
    "queue/": ("bytes", "latency_p50_s", "latency_p99_s"),
    "buffer/": ("ready_groups", "bytes"),
    "ledger/": ("issued", "consumed", "in_flight", "ready", "refunded", "reissued"),
    "sync/": ("seconds", "pause_seconds", "bytes", "rollouters"),
    "time/": ("wait_for_batch", "forward_backward", "optimizer", "gather", "publish"),
    "utilisation/": ("trainer", "rollouter"),
}
"""Prefix to names, as in `docs/metrics.md`. ``eval/accuracy`` and ``eval/version`` join the lines that evaluate, and
``reward/<env>/mean`` each line of a run that trains on that environment."""

KEYS: tuple[str, ...] = tuple(prefix + name for prefix, names in GROUPS.items() for name in names)
EVAL_KEYS = ("eval/accuracy", "eval/version")


def complete_line(values: Mapping[str, float]) -> dict[str, float]:
    """One metrics line: every key of the design in its order, zero where nothing was measured.

    Raises ``KeyError`` for a name that is not in the table: a metric that nobody documented.
    """
    unknown = [key for key in values if key not in KEYS and key not in EVAL_KEYS and not _is_env_reward(key)]
    if unknown:
        raise KeyError(f"metric {unknown[0]!r} is not in streamrl.metrics.GROUPS")
    return {key: values.get(key, 0) for key in KEYS} | {key: values[key] for key in values if key not in KEYS}


def _is_env_reward(key: str) -> bool:
    parts = key.split("/")
    return len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean"

"""The names that every run writes, by group, and the rule that a line carries every key of its groups."""

from __future__ import annotations

from collections.abc import Mapping

LAG_BINS = {
    "fraction_0": 0,
    "fraction_1": 1,
    "fraction_2": 2,
    "fraction_3_4": 3,
    "fraction_5_8": 5,
    "fraction_9_16": 9,
    "fraction_17_up": 17,
}
"""Bins of the lag histogram, by their smallest lag."""
LENGTH_BUCKETS = {"up_to_64": 64, "up_to_256": 256, "up_to_1024": 1024, "up_to_4096": 4096, "longer": 0}
"""Buckets of trajectories, by their largest number of trained tokens; 0: no bound."""
BUCKET = {
    "tokens": "trained_tokens",
    "clip_fraction": "policy/clip_fraction",
    "dropped_fraction": "policy/dropped_fraction",
    "capped_fraction": "policy/capped_fraction",
    "ess": "policy/ess",
    "ess_sequence": "policy/ess_sequence",
}
"""What is reported for each bucket, and what it is called for the whole batch."""
ENVIRONMENT = {
    "tokens": "trained_tokens",
    "clip_fraction": "policy/clip_fraction",
    "dropped_fraction": "policy/dropped_fraction",
    "ratio_mean": "policy/ratio_mean",
    "kl_k3": "policy/kl_k3",
    "ess": "policy/ess",
    "ess_sequence": "policy/ess_sequence",
    "entropy": "policy/entropy",
    "lag_mean": "lag/mean",
    "mismatch_rms": "mismatch/rms",
}
"""The same for each environment, as ``policy/<env>/…``."""

GROUPS: dict[str, tuple[str, ...]] = {
    "": ("step", "version", "time_s", "wall_s"),
    "reward/": ("mean", "std", "zero_variance_fraction"),
    "lag/": ("mean", "p95", "max", "masked_tokens", "evicted_groups", "bound", "headroom"),
    "policy/": (
        "loss",
        "clip_fraction",
        "clip_fraction_low",
        "clip_fraction_high",
        "clip_fraction_low_positive",
        "clip_fraction_low_negative",
        "clip_fraction_high_positive",
        "clip_fraction_high_negative",
        "dual_clip_fraction",
        "dropped_fraction",
        "capped_fraction",
        "dropped_sequences",
        "slope_positive",
        "slope_negative",
        "ratio_mean",
        "ratio_p999",
        "ratio_absolute_log",
        "chi2",
        "perplexity_ratio",
        "entropy",
        "kl_k1",
        "kl_k3",
        "kl_reference",
        "ess",
        "ess_sequence",
        "grad_norm",
        "lr",
    ),
    "parity/": ("failed_gates",),
    "mismatch/": ("rms", "max", "k3", "ess", "outside_kept", "canary_rms"),
    "update/": ("k3", "ess"),
    "value/": ("loss", "explained_variance"),
    "by_length/": tuple(f"{bucket}_{name}" for bucket in LENGTH_BUCKETS for name in BUCKET),
    "length/": ("mean", "max", "truncated_fraction", "turns_mean"),
    "throughput/": ("generated_tokens_per_s", "trained_tokens_per_s", "groups_per_s"),
    "engine/": ("running", "waiting", "kv_used", "preemptions", "groups"),
    "queue/": (
        "bytes",
        "messages",
        "malformed",
        "refused",
        "resent",
        "reconnects",
        "latency_p50_s",
        "latency_p99_s",
    ),
    "buffer/": ("ready_groups", "bytes", "promised_bytes"),
    "store/": ("payloads", "bytes", "received_bytes", "malformed"),
    "arena/": ("bytes", "used_bytes", "slots", "waiting"),
    "journal/": ("bytes", "disk_bytes", "segments", "fsyncs", "fsync_s", "unsynced_bytes"),
    "ledger/": ("issued", "consumed", "in_flight", "ready", "refunded", "reissued"),
    "sync/": ("seconds", "pause_seconds", "bytes", "delta_fraction", "rollouters"),
    "time/": ("wait_for_batch", "forward_backward", "optimizer", "gather", "publish"),
    "utilisation/": ("trainer", "rollouter"),
}
"""Prefix to names, as in `docs/metrics.md`. ``eval/accuracy`` and ``eval/version`` join the lines that evaluate, and
``reward/<env>/mean``, ``policy/<env>/…`` and ``env/<env>/…`` (what its code measures) each line of a run that trains on
that environment."""

OF_THE_LEARNER: dict[str, tuple[str, ...]] = {"lag/": ("p50", "k3", "ess", "outside_kept", *LAG_BINS)}
"""Keys that the trainer adds to groups which the buffer reports."""
KEYS: tuple[str, ...] = tuple(
    prefix + name for groups in (GROUPS, OF_THE_LEARNER) for prefix, names in groups.items() for name in names
)
EVAL_KEYS = ("eval/accuracy", "eval/version")


def complete_line(values: Mapping[str, float]) -> dict[str, float]:
    """One metrics line: every key of the design in its order, zero where nothing was measured.

    Raises ``KeyError`` for a name that is not in the table: a metric that nobody documented.
    """
    unknown = [key for key in values if key not in KEYS and key not in EVAL_KEYS and not _is_of_environment(key)]
    if unknown:
        raise KeyError(f"metric {unknown[0]!r} is not in streamrl.metrics.GROUPS")
    return {key: values.get(key, 0) for key in KEYS} | {key: values[key] for key in values if key not in KEYS}


def _is_of_environment(key: str) -> bool:
    group, _, rest = key.partition("/")
    env, _, name = rest.rpartition("/")
    known = (group, name) == ("reward", "mean") or (group == "policy" and name in ENVIRONMENT) or group == "env"
    return bool(env) and known

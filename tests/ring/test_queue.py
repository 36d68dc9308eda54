"""The data plane in whole runs: every way in which payloads can lie, and the death of whoever holds them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest

from streamrl.actors.recording import journal_folder
from streamrl.buffers.replay import recorded_steps

STEPS = 60


def kill(ring: Any, actor: str, after_step: int) -> None:
    ring.wait_for_step(after_step)
    os.kill(ring.wait_for("actor_ready", actor)["pid"], signal.SIGKILL)


def assert_complete(ring: Any, restarts: int = 0) -> dict[str, Any]:
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["status"], summary["restarts"]) == ("completed", restarts)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    assert summary["lag_max"] <= summary["lag_bound"]
    return summary


@pytest.mark.parametrize(
    "settings",
    [
        ("queue.transport=tcp", "queue.checksum=true"),
        ("buffer.shards=2", "buffer.fsync=always"),
        ("queue.transport=tcp", "buffer.shards=3"),
        ("queue.backend=nixl", "--trainers", "2"),
        ("buffer.journal=false",),
    ],
    ids=" ".join,
)
def test_a_run_completes_wherever_its_payloads_lie(launch: Any, settings: tuple[str, ...]):
    if "queue.backend=nixl" in settings:
        pytest.importorskip("nixl", reason="queue.backend=nixl needs the nixl package: pip install 'streamrl[nixl]'")
    ring = launch("--steps", "12", "--rollouts", "2", *settings)
    summary = assert_complete(ring)
    assert summary["groups"]["consumed"] == 48


@pytest.mark.parametrize("settings", [("max_lag=2",), ("queue.transport=tcp", "on_stale=wait")], ids=" ".join)
def test_a_killed_buffer_comes_back_with_every_group_and_the_run_completes(launch: Any, settings: tuple[str, ...]):
    ring = launch("--steps", str(STEPS), "--rollouts", "2", *settings)
    kill(ring, "buffer", after_step=5)
    summary = assert_complete(ring, restarts=1)
    assert summary["groups"]["consumed"] == 4 * STEPS
    restored = next(event for event in ring.events() if event["event"] == "buffer_restored")
    assert restored["consumed"] >= 5 * 4


def test_a_killed_store_comes_back_with_every_payload(launch: Any):
    ring = launch("--steps", str(STEPS), "buffer.shards=2")
    kill(ring, "store-1", after_step=5)
    summary = assert_complete(ring, restarts=1)
    assert summary["groups"]["consumed"] == 4 * STEPS
    events = ring.events()
    assert [event["actor"] for event in events if event["event"] == "store_restored"] == ["store-1"]
    assert not [event for event in events if event["event"] == "payload_lost"]


def test_groups_in_the_arena_of_a_killed_rollouter_are_issued_again(launch: Any):
    pytest.importorskip("nixl", reason="queue.backend=nixl needs the nixl package: pip install 'streamrl[nixl]'")
    ring = launch("--steps", str(STEPS), "--rollouts", "2", "queue.backend=nixl", "max_lag=2")
    kill(ring, "rollouter-0", after_step=5)
    summary = assert_complete(ring, restarts=1)
    assert summary["groups"]["reissued"] > 0


def test_a_buffer_without_a_journal_ends_the_run_when_it_is_killed(launch: Any):
    ring = launch("--steps", "100000", "buffer.journal=false")
    kill(ring, "buffer", after_step=2)
    assert ring.wait() == 1
    assert ring.output.strip().splitlines()[-1].startswith("streamrl: buffer was killed by SIGKILL")


def test_each_group_is_trained_as_often_as_epochs_per_group_says_unless_it_grows_too_old(launch: Any):
    ring = launch("--steps", "20", "buffer.epochs_per_group=2", "max_lag=3", "buffer.keep=all")
    summary = assert_complete(ring)
    steps = list(recorded_steps(journal_folder(ring.run_dir), epochs=2))
    uses = Counter(lease for step in steps for lease in step.payloads)
    assert [len(step.payloads) for step in steps] == [4] * 20
    assert max(uses.values()) == 2
    twice = sum(count == 2 for count in uses.values())
    assert twice <= summary["groups"]["consumed"] <= len(uses)  # between them: trained once, then over max_lag


def test_user_columns_make_groups_larger_than_their_leases_and_still_keep_to_the_byte_limit(launch: Any):
    ring = launch("--steps", "10", "env=ring_envs:WithColumns", "buffer.max_bytes=400000", "max_lag=4")
    assert_complete(ring)
    lines = ring.metrics()
    assert max(line["buffer/bytes"] for line in lines) > 4 * 4 * 4096  # a batch of groups with their columns
    assert all(line["buffer/bytes"] + line["buffer/promised_bytes"] <= 400_000 for line in lines)


def test_columns_that_no_batch_could_hold_end_the_run_with_the_number_to_set(launch: Any):
    ring = launch("--steps", "10", "env=ring_envs:WithColumns", "buffer.max_bytes=60000")
    assert ring.wait() == 2
    assert "set buffer.max_bytes=" in ring.output.strip().splitlines()[-1]


def test_a_priority_function_decides_who_trains_first(launch: Any):
    ring = launch("--steps", "10", "buffer.priority=ring_envs:by_prompt", "max_lag=2")
    assert_complete(ring)


def test_a_priority_that_does_not_exist_is_refused_in_one_line(launch: Any):
    ring = launch("buffer.priority=ring_envs:by_promt")
    assert ring.wait() == 2
    assert "did you mean 'by_prompt'?" in ring.output.strip().splitlines()[-1]


def test_a_target_ess_that_is_kept_earns_headroom_until_the_lag_bound(launch: Any):
    ring = launch("--steps", "30", "max_lag=2", "staleness.target_ess=0.5")
    assert_complete(ring)
    headroom = [line["lag/headroom"] for line in ring.metrics()]
    assert headroom[0] < headroom[-1] == 2 * 4


def test_a_target_ess_that_no_lag_keeps_holds_the_ring_near_on_policy(launch: Any):
    ring = launch("--steps", "30", "max_lag=4", "staleness.target_ess=0.999999", "trainer.lr=0.01")
    assert_complete(ring)
    assert max(line["lag/headroom"] for line in ring.metrics()) < 4 * 4 / 2

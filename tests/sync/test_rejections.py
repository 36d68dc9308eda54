"""What the trainer does about versions that a canary rejected."""

from __future__ import annotations

import pytest

from streamrl.actors.trainer import Trainer
from streamrl.config import load_config
from streamrl.errors import ConfigError, ParityError
from streamrl.runtime.actor import ActorSpec

REASON = "rollouter-1: canary: rms 3e-01"


def trainer(*overrides: str) -> Trainer:
    config = load_config("base", ["env=streamrl.envs.reasoning_gym:ReasoningGym", "steps=10", *overrides])
    return Trainer(ActorSpec("trainer", "trainer-0", 0, 0, "/nowhere", "/nowhere", config))


def test_stop_ends_the_run_with_the_first_one() -> None:
    with pytest.raises(ParityError, match=r"version 3 was rejected: rollouter-1: canary.*sync.on_mismatch=stop"):
        trainer("sync.on_mismatch=stop")._account(3, REASON)


def test_rollback_goes_on_as_long_as_max_lag_leaves_something_to_train_on() -> None:
    it = trainer("sync.on_mismatch=rollback", "max_lag=2")
    for version, rejected in ((1, REASON), (2, REASON), (3, ""), (4, REASON), (5, REASON)):
        it._account(version, rejected)
    with pytest.raises(ParityError, match=r"version 6 .*; 3 in a row leave no tokens within max_lag=2 to train on"):
        it._account(6, REASON)


def test_a_rejected_last_version_ends_the_run() -> None:
    with pytest.raises(ParityError, match="it was the last one of the run"):
        trainer("sync.on_mismatch=rollback")._account(10, REASON)


def test_rollback_without_lag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync.on_mismatch=rollback with max_lag=0: .*set max_lag=1"):
        load_config("base", ["sync.on_mismatch=rollback", "max_lag=0"])


def test_groups_that_are_trained_twice_leave_room_for_one_rejection_less() -> None:
    twice = ("sync.on_mismatch=rollback", "buffer.epochs_per_group=2")
    it = trainer(*twice, "max_lag=2")
    it._account(1, REASON)
    with pytest.raises(ParityError, match="2 in a row"):
        it._account(2, REASON)
    with pytest.raises(ConfigError, match=r"max_lag=1 and buffer.epochs_per_group=2: .*set max_lag=2"):
        load_config("base", [*twice, "max_lag=1"])


def test_rollback_under_steering_which_may_grant_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"staleness.target_ess=0.5: .*set staleness.target_ess=0, or sync"):
        load_config("base", ["sync.on_mismatch=rollback", "max_lag=2", "staleness.target_ess=0.5"])


@pytest.mark.parametrize(("every", "judged"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])])
def test_all_engines_are_judged_every_so_many_versions_and_joiners_under_all_but_the_first(
    every: int, judged: list[int]
) -> None:
    it = trainer(f"sync.canary_every={every}")
    assert [version for version in range(5) if it._judges(version)] == judged
    assert [version for version in range(5) if it._scores(version)] == ([1, 2, 3, 4] if every else [])

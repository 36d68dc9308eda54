"""The two-phase protocol as a state machine."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.sync.update import Order, Phase, Step, Update

STAGE, COMMIT, DISCARD = Order.STAGE, Order.COMMIT, Order.DISCARD


def staged_by_all(*names: str, observers: tuple[str, ...] = ()) -> Update:
    update = Update(1, 7, names, observers)
    update.begin((*names, *observers))
    for name in (*names, *observers):
        update.staged(name)
    assert update.phase is Phase.COMMIT
    return update


def test_commit_is_ordered_when_the_last_member_staged() -> None:
    update = Update(1, 7, ["a", "b"], [])
    assert update.begin(["a", "b"]) == [("a", STAGE), ("b", STAGE)]
    assert update.staged("a") == []
    assert update.waiting == {"b": Step.STAGE}
    assert update.staged("b") == [("a", COMMIT), ("b", COMMIT)]
    assert update.committed_by("b", 0.5) == []
    assert update.phase is Phase.COMMIT
    assert update.committed_by("a", 0.25) == []
    assert update.phase is Phase.DONE
    assert update.pauses == {"a": 0.25, "b": 0.5}


def test_a_member_that_is_not_connected_is_waited_for() -> None:
    update = Update(1, 7, ["a", "b"], [])
    assert update.begin(["a"]) == [("a", STAGE)]
    assert update.staged("a") == []
    assert update.waiting == {"b": Step.CONNECT}
    assert update.connected("b") == [("b", STAGE)]
    assert update.staged("b") == [("a", COMMIT), ("b", COMMIT)]


def test_nobody_to_wait_for_is_done_at_once() -> None:
    update = Update(1, 7, [], [])
    assert update.begin([]) == []
    assert update.phase is Phase.DONE


def test_a_version_that_is_still_written_is_not_done_although_nobody_is_left() -> None:
    update = Update(1, 7, ["a"], [], writing=True)
    update.begin(["a"])
    assert update.removed("a") == []
    assert update.phase is Phase.STAGE
    assert update.written() == []
    assert update.phase is Phase.DONE


def test_a_version_that_cannot_be_written_is_given_up_although_nobody_is_left() -> None:
    update = Update(1, 7, [], [], writing=True)
    update.begin([])
    update.give_up()
    assert update.phase is Phase.ABORTED


def test_a_removed_member_is_waited_for_no_longer() -> None:
    update = Update(1, 7, ["a", "b"], [])
    update.begin(["a", "b"])
    update.staged("a")
    assert update.removed("b") == [("a", COMMIT)]
    assert update.removed("a") == []
    assert update.phase is Phase.DONE


def test_a_failed_stage_is_tried_again_once_and_then_given_up_for_all() -> None:
    update = Update(1, 7, ["a", "b"], [])
    update.begin(["a", "b"])
    update.staged("a")
    assert update.failed("b", "bucket 3 is corrupted") == [("b", STAGE)]
    assert update.failed("b", "bucket 3 is corrupted") == [("a", DISCARD), ("b", DISCARD)]
    assert update.phase is Phase.ABORTED
    assert update.failures == {"b": "bucket 3 is corrupted"}


def test_a_member_that_fails_to_commit_is_staged_again_and_then_left_behind() -> None:
    update = staged_by_all("a", "b")
    update.committed_by("a", 0.0)
    assert update.failed("b", "no such name") == [("b", STAGE)]
    assert update.staged("b") == [("b", COMMIT)]
    assert update.failed("b", "no such name") == []
    assert update.phase is Phase.DONE
    assert update.committed == {"a"}
    assert update.failures == {"b": "no such name"}


def test_an_update_that_every_member_refuses_at_commit_is_given_up() -> None:
    update = staged_by_all("a", "b")
    for name in ("a", "b"):
        update.failed(name, "no such name")
        update.staged(name)
        orders = update.failed(name, "no such name")
    assert update.phase is Phase.ABORTED
    assert orders == [("a", DISCARD), ("b", DISCARD)]


def test_a_restarted_member_starts_over_wherever_it_was() -> None:
    update = staged_by_all("a", "b")
    update.committed_by("a", 0.0)
    assert update.connected("a") == [("a", STAGE)]  # a new process without weights
    assert update.committed_by("b", 0.0) == []
    assert update.phase is Phase.COMMIT
    assert update.staged("a") == [("a", COMMIT)]
    update.committed_by("a", 0.0)
    assert update.phase is Phase.DONE


def test_a_member_that_was_left_behind_and_restarts_before_the_end_is_brought_along() -> None:
    update = staged_by_all("a", "b")
    update.failed("a", "no such name")
    update.staged("a")
    update.failed("a", "no such name")
    assert update.failures == {"a": "no such name"}
    assert update.connected("a") == [("a", STAGE)]
    assert update.failures == {}
    update.committed_by("b", 0.0)
    update.staged("a")
    update.committed_by("a", 0.0)
    assert update.phase is Phase.DONE
    assert update.committed == {"a", "b"}


def test_observers_hold_their_copy_until_the_version_is_current() -> None:
    update = staged_by_all("a", observers=("eval",))
    assert update.waiting == {"a": Step.COMMIT}
    assert update.committed_by("a", 0.0) == [("eval", COMMIT)]
    assert update.committed == {"a"}


def test_the_last_deadline_before_the_decision_gives_up_and_after_it_leaves_behind() -> None:
    early = Update(1, 7, ["a", "b"], [])
    early.begin(["a"])
    early.staged("a")
    assert early.expire("late") == [("a", DISCARD)]
    assert early.failures == {"b": "late (connect)"}

    late = staged_by_all("a", "b")
    late.committed_by("a", 0.0)
    assert late.expire("late") == []
    assert late.phase is Phase.DONE
    assert late.failures == {"b": "late (commit)"}


def test_rolling_each_commits_when_it_has_staged_and_the_version_waits_for_all() -> None:
    update = Update(1, 7, ["a", "b"], ["eval"], rolling=True)
    update.begin(["a", "b", "eval"])
    assert update.staged("a") == [("a", COMMIT)]
    assert update.staged("eval") == []
    assert update.committed_by("a", 0.5) == []
    assert update.phase is Phase.COMMIT
    assert update.waiting == {"b": Step.STAGE}
    assert update.staged("b") == [("b", COMMIT)]
    assert update.committed_by("b", 0.25) == [("eval", COMMIT)]
    assert update.phase is Phase.DONE


def test_rolling_who_fails_after_another_has_committed_is_left_behind() -> None:
    update = Update(1, 7, ["a", "b"], [], rolling=True)
    update.begin(["a", "b"])
    update.staged("a")
    update.committed_by("a", 0.0)
    assert update.failed("b", "bucket 3 is corrupted") == [("b", STAGE)]
    assert update.failed("b", "bucket 3 is corrupted") == []
    assert (update.phase, update.committed) == (Phase.DONE, {"a"})
    assert update.failures == {"b": "bucket 3 is corrupted"}


def test_a_rejection_ends_the_update_for_all_whatever_the_others_do() -> None:
    update = staged_by_all("a", "b", "c")
    update.committed_by("a", 0.0, 1e-7)
    assert update.rejected_by("b", 0.5, "canary") == [("a", DISCARD), ("b", DISCARD), ("c", DISCARD)]
    assert (update.phase, update.canary_rms) == (Phase.REJECTED, 0.5)
    assert update.failures == {"b": "canary"}
    assert update.committed_by("c", 0.0) == []
    assert update.phase is Phase.REJECTED


def test_an_attempt_counts_every_time_a_member_starts_over() -> None:
    update = Update(1, 7, ["a", "b"], [])
    update.begin(["a"])
    update.connected("b")  # late, and for the first time
    assert (update.attempt("a"), update.attempt("b")) == (0, 0)
    update.failed("a", "bucket 3 is corrupted")
    update.connected("b")  # a new process
    assert (update.attempt("a"), update.attempt("b")) == (1, 1)
    update.disconnected("a")
    update.connected("a")
    assert update.attempt("a") == 2


NAMES = ["a", "b", "c", "eval"]
EVENTS = ["connected", "disconnected", "removed", "staged", "committed_by", "failed", "expire"]


def happen(update: Update, event: str, name: str) -> list[tuple[str, Order]]:
    if event == "expire":
        return update.expire("late")
    if event == "disconnected":
        update.disconnected(name)
        return []
    extra = {"committed_by": (0.0,), "failed": ("broken",)}.get(event, ())
    return getattr(update, event)(name, *extra)


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(NAMES)), max_size=40), st.booleans())
@settings(max_examples=400, deadline=None)
def test_whatever_happens_in_any_order_the_guarantees_hold(events: list[tuple[str, str]], rolling: bool) -> None:
    update = Update(1, 7, NAMES[:3], NAMES[3:], rolling=rolling)
    asked = {name for name, _ in update.begin(NAMES[:2])}
    staged: set[str] = set()
    committed: set[str] = set()
    for event, name in events:
        over = update.phase in (Phase.DONE, Phase.ABORTED)
        deciding = update.phase is Phase.STAGE
        if event == "staged" and name in asked:
            staged.add(name)
        if event == "committed_by" and update.waiting.get(name) is Step.COMMIT:
            committed.add(name)
        if event in ("connected", "disconnected", "removed"):
            staged.discard(name)
            committed.discard(name)
        orders = happen(update, event, name)
        assert not (over and orders)
        for member, order in orders:
            if order is STAGE:
                asked.add(member)
                staged.discard(member)
        for member, order in orders:
            if order is COMMIT:
                assert member in staged
        if deciding and not rolling and any(order is COMMIT for _, order in orders):
            assert update.members <= staged  # nobody commits before all have staged
        if not over and update.phase is Phase.ABORTED:
            assert not update.committed
        if not over and update.phase is Phase.DONE:
            assert update.members - {"eval"} - set(update.failures) == update.committed <= committed
    settle(update)
    assert update.phase in (Phase.DONE, Phase.ABORTED)


def settle(update: Update) -> None:
    """Everyone that is waited for does what it is waited for."""
    for _ in range(3):
        for name, step in update.waiting.items():
            event = {Step.CONNECT: "connected", Step.STAGE: "staged", Step.COMMIT: "committed_by"}[step]
            happen(update, event, name)

"""A buffer that dies after any record of its journal comes back as it was then; payloads are kept as long as needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from buffer_support import balance, centred, durable_state, put, settings, token_mean, trajectory

from streamrl.buffers.journal.writer import Journal, JournalError, Position
from streamrl.buffers.journaling import open_journal
from streamrl.buffers.offer import Offer
from streamrl.buffers.records import Record
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire.groups import pack_group
from streamrl.buffers.wire.payload import Payload
from streamrl.types import Group, Lease

TIMEOUT_S = 10.0


def make(**others: Any) -> ReplayBuffer:
    keys: dict[str, Any] = {
        "per_step": 2,
        "max_lag": 2,
        "buffer__epochs_per_group": 2,
        "buffer__lease_timeout_s": TIMEOUT_S,
        "buffer__segment_bytes": 1 << 12,
        "buffer__fsync": "never",
        "buffer__keep": "all",
        "group__drop_zero_variance": True,
    }
    return ReplayBuffer(settings(**keys | others), centred, token_mean)


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        self.append((name, fields))

    def names(self) -> list[str]:
        return [name for name, _ in self]


def opened(folder: Path, now: float = 0.0, **others: Any) -> tuple[ReplayBuffer, Journal, Events]:
    buffer, events = make(**others), Events()
    return buffer, open_journal(folder, buffer, now, events), events


def marked(lease: Lease, version: int, rewards: tuple[float, float] = (0.0, 1.0)) -> Group:
    """A group whose tokens are its lease's alone."""
    each = [trajectory([(version, 3)], reward=reward, token=1000 + lease.id) for reward in rewards]
    return Group(lease.id, lease.prompt, "sums", each)


def busy_history(buffer: ReplayBuffer) -> None:
    """Every kind of record, several times, over a dozen segments."""
    now = 0.0
    for step in range(14):
        buffer.publish(step)
        leases = buffer.lease(f"rollouter-{step % 2}", 9, now, asked=f"rollouter#{step}/7")
        for lease in leases:
            match lease.id % 7:
                case 1:
                    buffer.fail(lease.id)
                case 2:
                    put(buffer, marked(lease, step, rewards=(1.0, 1.0)))  # filtered
                case 3 if lease.attempt == 0:
                    pass  # expires, or its holder is lost
                case 4:
                    large = marked(lease, step)
                    large.trajectories[0].columns["image"] = np.arange(600, dtype=np.uint32)
                    assert buffer.reserve(lease.id, pack_group(large)[1].nbytes)
                    put(buffer, large)
                case _:
                    put(buffer, marked(lease, max(0, step - lease.id % 3)))
                    put(buffer, marked(lease, step))  # a duplicate
        if step % 3 == 1:
            buffer.holder_lost("rollouter-1")
        now += TIMEOUT_S / 2
        buffer.expire(now)
        offer = batch(buffer, step, now)
        if step % 2:
            buffer.hand_back()
            offer = batch(buffer, step, now)
        if step % 3 == 2:
            buffer.drop(step, offer.attempt, [offer.groups[0].lease])
        buffer.acknowledge(step, offer.attempt, step - 2)


def batch(buffer: ReplayBuffer, step: int, now: float) -> Offer:
    """The batch of a step, after as many more groups as it takes."""
    for _ in range(9):
        if (offer := buffer.next_batch(step, step, 1 + step % 2)) is not None:
            return offer
        for lease in buffer.lease("rollouter-2", 1, now) or buffer.expire(now + TIMEOUT_S):
            put(buffer, marked(lease, step))
    raise AssertionError("no batch")


class Moment(NamedTuple):
    """The buffer right after a record."""

    record: str
    end: Position
    """Behind the record."""
    state: Any
    payloads: dict[int, bytes]
    """Of the groups that it held, by lease."""


def payloads(buffer: ReplayBuffer) -> dict[int, bytes]:
    held = {lease: buffer.held(lease) for lease in buffer.ledger.records}
    return {lease: b"".join(each.payload.frames) for lease, each in held.items() if each and each.payload}


def lived(folder: Path, history: Callable[[ReplayBuffer], None] = busy_history) -> list[Moment]:
    """Live through a history with a journal in ``folder``: one moment per record."""
    buffer, journal, _ = opened(folder)
    append = buffer.write_down
    written: list[tuple[str, Position]] = []
    moments: list[Moment] = []

    def note_last() -> None:
        if written:
            moments.append(Moment(*written[-1], durable_state(buffer), payloads(buffer)))

    def spy(record: Record, payload: Payload | None) -> Position | None:
        note_last()
        position = append(record, payload)
        assert position is not None
        size = newest(folder).stat().st_size
        written.append((type(record).__name__, Position(position.segment, size)))
        return position

    buffer.write_down = spy
    history(buffer)
    note_last()
    assert balance(buffer.ledger) == 0
    journal.close()
    return moments


def newest(folder: Path) -> Path:
    return max(folder.glob("*.journal"))


def died_at(folder: Path, target: Path, end: Position, torn: int = 0) -> Path:
    """A copy of the journal as the process left it that died with ``torn`` bytes of the next record written."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted(folder.glob("*.journal"))[: end.segment]:
        shutil.copy(path, target)
    os.truncate(newest(target), end.offset + torn)
    return target


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Moment]]:
    folder = tmp_path_factory.mktemp("busy") / "journal"
    return folder, lived(folder)


def test_the_history_is_a_busy_one(busy: tuple[Path, list[Moment]]) -> None:
    _, moments = busy
    kinds = {moment.record for moment in moments}
    assert kinds == {
        "Granted", "Reserved", "Arrived", "Refunded", "HandedOut", "HandedBack", "Dropped", "Acknowledged", "Published",
    }  # fmt: skip
    assert moments[-1].end.segment > 5
    assert len(moments) > 100


def test_a_buffer_that_dies_after_any_record_comes_back_as_it_was_then(
    busy: tuple[Path, list[Moment]], tmp_path: Path
) -> None:
    folder, moments = busy
    for moment in moments:
        copy = died_at(folder, tmp_path / "copy", moment.end)
        buffer, journal, events = opened(copy)
        journal.close()
        assert durable_state(buffer) == moment.state, moment.record
        assert payloads(buffer) == moment.payloads
        assert events.names() == ["buffer_restored"]
        assert balance(buffer.ledger) == 0


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_record_that_was_not_finished_never_happened(
    busy: tuple[Path, list[Moment]], tmp_path: Path, share: float
) -> None:
    folder, moments = busy
    for moment, after in zip(moments, moments[1:], strict=False):
        if after.end.segment != moment.end.segment:
            continue
        torn = max(1, int(share * (after.end.offset - moment.end.offset)))
        copy = died_at(folder, tmp_path / "copy", moment.end, torn)
        buffer, journal, events = opened(copy)
        journal.close()
        assert durable_state(buffer) == moment.state
        assert events.names() == ["journal_cut", "buffer_restored"]
        assert events[0][1]["reason"] == "torn"


def test_a_restored_buffer_goes_on_writing_and_can_die_again_at_once(
    busy: tuple[Path, list[Moment]], tmp_path: Path
) -> None:
    """Each life adds one change; every third tears it."""
    folder, moments = busy
    copy = died_at(folder, tmp_path / "copy", moments[len(moments) // 2].end)
    published = moments[len(moments) // 2].state[1]["published"]
    for life in range(12):
        buffer, journal, _ = opened(copy)
        before = durable_state(buffer)
        buffer.publish(published + 1)
        journal.close()
        if life % 3 == 0:
            os.truncate(newest(copy), newest(copy).stat().st_size - 1)
            buffer, journal, events = opened(copy)
            journal.close()
            assert "journal_cut" in events.names()
            assert durable_state(buffer) == before
        else:
            published += 1
            assert buffer.ledger.published == published


def test_leases_in_flight_get_their_whole_time_again(tmp_path: Path) -> None:
    buffer, journal, _ = opened(tmp_path)
    buffer.publish(0)
    lease = buffer.lease("a", 1, 0.0)[0]
    journal.close()
    buffer, journal, _ = opened(tmp_path, now=100.0)
    journal.close()
    assert buffer.expire(100.0 + TIMEOUT_S - 0.1) == []
    assert buffer.ledger.is_in_flight(lease.id)
    assert buffer.ledger.overdue(100.0 + TIMEOUT_S) == [lease.id]


def test_the_batch_that_was_handed_out_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """Also without the group that was dropped from it: the weights of the others count it still."""
    buffer, journal, _ = opened(tmp_path)
    buffer.publish(0)
    for lease in buffer.lease("a", 2, 0.0):
        put(buffer, marked(lease, 0))
    offer = buffer.next_batch(0, 0, 2)
    assert offer is not None
    buffer.drop(0, offer.attempt, [offer.groups[0].lease])
    journal.close()
    for _ in range(2):  # from the records, then from a snapshot, which the first change makes
        buffer, journal, _ = opened(tmp_path)
        assert buffer.offer is not None
        assert (buffer.offer.attempt, buffer.offer.parts) == (offer.attempt, offer.parts)
        assert buffer.offer.groups == offer.groups
        buffer.publish(0)
        journal.close()
    buffer, journal, _ = opened(tmp_path)
    assert buffer.acknowledge(0, offer.attempt, 0) == 0  # the first of two epochs
    journal.close()


def test_an_empty_folder_is_an_empty_buffer(tmp_path: Path) -> None:
    buffer, journal, events = opened(tmp_path / "new")
    journal.close()
    assert (buffer.ledger.issued, events) == (0, [])


def test_a_change_that_cannot_be_written_down_does_not_happen(tmp_path: Path) -> None:
    buffer, journal, _ = opened(tmp_path)
    buffer.publish(0)
    leases = buffer.lease("a", 3, 0.0)
    for lease in leases[:2]:
        put(buffer, marked(lease, 0))
    before, append = durable_state(buffer), buffer.write_down

    def full(record: Record, payload: Payload | None) -> Position | None:
        raise JournalError("no space left")

    buffer.write_down = full
    changes: list[Callable[[], object]] = [
        lambda: buffer.publish(1),
        lambda: buffer.lease("a", 1, 0.0),
        lambda: put(buffer, marked(leases[2], 0)),
        lambda: put(buffer, marked(leases[2], 0, rewards=(1.0, 1.0))),
        lambda: buffer.reserve(leases[2].id, 1 << 20),
        lambda: buffer.fail(leases[2].id),
        lambda: buffer.expire(1e9),
        lambda: buffer.holder_lost("a"),
        lambda: buffer.next_batch(0, 0, 1),
        lambda: buffer.next_batch(9, 9, 1),
    ]
    buffer.ledger.publish(5)  # so that there are credits
    before = durable_state(buffer)
    for change in changes:
        with pytest.raises(JournalError):
            change()
        assert durable_state(buffer) == before
    buffer.write_down = append
    offer = buffer.next_batch(0, 0, 1)
    assert offer is not None
    before, buffer.write_down = durable_state(buffer), full
    for change in (
        lambda: buffer.hand_back(),
        lambda: buffer.drop(0, offer.attempt, [offer.groups[0].lease]),
        lambda: buffer.acknowledge(0, offer.attempt, 0),
    ):
        with pytest.raises(JournalError):
            change()
        assert durable_state(buffer) == before
        assert buffer.offer is offer
    journal.close()


# Segments -------------------------------------------------------------------------------------------------------------


def segments(folder: Path) -> list[int]:
    return [int(path.stem) for path in sorted(folder.glob("*.journal"))]


def train(buffer: ReplayBuffer, journal: Journal, step: int, durable: int) -> None:
    """One step of new groups, acknowledged; then the journal forgets what it may."""
    buffer.publish(step)
    for lease in buffer.lease("a", 9, 0.0):
        put(buffer, marked(lease, step))
    offer = buffer.next_batch(step, step, 1)
    assert offer is not None
    buffer.acknowledge(step, offer.attempt, durable)
    journal.recycle(buffer.oldest_position)


LIVE = {"buffer__keep": "live", "buffer__epochs_per_group": 1, "max_lag": 0}


def test_segments_of_consumed_groups_are_deleted_once_their_step_is_durable(tmp_path: Path) -> None:
    buffer, journal, _ = opened(tmp_path, **LIVE)
    for step in range(12):
        train(buffer, journal, step, durable=-1)
    assert segments(tmp_path)[0] == 1
    spent = [position.segment for _, position in buffer.snapshot().spent]
    assert len(spent) == 12 * 2
    for durable in (3, 7):
        buffer.publish(99)
        for lease in buffer.lease("a", 2, 0.0):
            put(buffer, marked(lease, 12 + durable))
        offer = buffer.next_batch(12 + durable, 12 + durable, 1)
        assert offer is not None
        buffer.acknowledge(12 + durable, offer.attempt, durable)
        oldest = buffer.oldest_position
        assert oldest is not None
        assert oldest.segment == spent[2 * (durable + 1)] > 1  # the first group of the step after the durable one
        assert journal.recycle(oldest) > 0
    journal.close()  # waits for the deletions
    assert segments(tmp_path)[0] == spent[2 * 8]


def test_a_group_with_epochs_left_keeps_its_segment(tmp_path: Path) -> None:
    buffer, journal, _ = opened(tmp_path, **LIVE | {"buffer__epochs_per_group": 2, "max_lag": 1})
    for step in range(10):
        train(buffer, journal, step, durable=step)
        needed = {held.position.segment for held in map(buffer.held, buffer.ledger.records) if held and held.position}
        assert needed
        assert min(needed) == (buffer.oldest_position or Position(0, 0)).segment
    journal.close()
    assert 1 < segments(tmp_path)[0] <= min(needed)


def test_a_trained_group_that_grew_too_old_keeps_its_segment_until_its_step_is_durable(tmp_path: Path) -> None:
    buffer, journal, _ = opened(tmp_path, **LIVE | {"buffer__epochs_per_group": 2, "max_lag": 1})
    train(buffer, journal, 0, durable=-1)
    positions = {held.position for held in map(buffer.held, buffer.ledger.records) if held}
    assert buffer.next_batch(9, 9, 1) is None
    assert not buffer.ledger.ready
    assert {position for _, position in buffer.snapshot().spent} == positions
    journal.close()


def test_a_buffer_that_recycles_comes_back_too(tmp_path: Path) -> None:
    for step in range(12):
        buffer, journal, _ = opened(tmp_path, **LIVE | {"buffer__epochs_per_group": 2, "max_lag": 1})
        train(buffer, journal, step, durable=step - 1)
        state, bytes_held = durable_state(buffer), payloads(buffer)
        journal.close()
        again, journal, _ = opened(tmp_path, **LIVE | {"buffer__epochs_per_group": 2, "max_lag": 1})
        journal.close()
        assert (durable_state(again), payloads(again)) == (state, bytes_held)
    assert segments(tmp_path)[0] > 1
    assert buffer.summary()["consumed"] == 12


def test_keep_all_deletes_nothing(tmp_path: Path) -> None:
    buffer, journal, _ = opened(tmp_path, **LIVE | {"buffer__keep": "all"})
    for step in range(12):
        train(buffer, journal, step, durable=step)
    journal.close()
    found = segments(tmp_path)
    assert found == list(range(1, found[-1] + 1))
    assert len(found) > 2

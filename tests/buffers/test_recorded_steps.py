"""What the journal of a run gives back to a replay: the very batches that were trained on, in their order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_support import centred, group, put, settings, token_mean

from streamrl.buffers import records
from streamrl.buffers.journal.writer import Journal
from streamrl.buffers.journaling import open_journal
from streamrl.buffers.offer import Offer, Planner
from streamrl.buffers.replay import RecordedStep, count_steps, rank_batch, recorded_steps
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.errors import JournalError


class Life:
    """A buffer that keeps everything it does in a journal."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.config = settings(buffer__keep="all", **keys)
        self.folder = folder
        self.journal: Journal
        self.open()
        self.buffer.publish(0)

    def open(self) -> None:
        """New, or back from the dead."""
        self.buffer = ReplayBuffer(self.config, centred, token_mean)
        self.journal = open_journal(self.folder, self.buffer, 0.0, lambda event, fields: None)

    def put(self, count: int, version: int = 0) -> list[int]:
        leases = self.buffer.lease("rollouter-0", count, 0.0)
        for index, lease in enumerate(leases):
            put(self.buffer, group(lease, version, rewards=(0.0, 1.0 + index)))
        return [lease.id for lease in leases]

    def hand_out(self, step: int, ranks: int = 1) -> Offer:
        offer = self.buffer.next_batch(step, step - 1, ranks)
        assert offer is not None
        return offer

    def acknowledge(self, offer: Offer) -> None:
        self.buffer.acknowledge(offer.step, offer.attempt, offer.step)

    def train(self, step: int, ranks: int = 1) -> Offer:
        offer = self.hand_out(step, ranks)
        self.acknowledge(offer)
        self.buffer.publish(step)
        return offer

    def recorded(self) -> list[RecordedStep]:
        self.journal.close()
        return list(recorded_steps(self.folder, self.config.buffer.epochs_per_group))


@pytest.fixture
def life(tmp_path: Path) -> Any:
    return partial(Life, tmp_path)


def leases(step: RecordedStep) -> list[int]:
    return [group.lease for group in step.groups]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_gets_the_very_micro_batches_that_were_handed_out(life: Any, ranks: int) -> None:
    run = life()
    run.put(4)
    offers = [run.train(1, ranks), run.train(2, ranks)]
    planner = Planner(run.config, centred, token_mean)
    recorded = run.recorded()
    assert [(step.step, step.version, step.ranks) for step in recorded] == [(1, 0, ranks), (2, 1, ranks)]
    for offer, step in zip(offers, recorded, strict=True):
        for rank, parts in enumerate(offer.parts):
            batch = rank_batch(step, planner, rank, run.config.max_lag)
            assert (batch.step, batch.version, batch.oldest_allowed) == (offer.step, offer.version, offer.version - 1)
            assert [
                [(one.lease, one.advantages.tolist(), one.token_weights.tolist()) for one in some]
                for some in batch.micro_batches
            ] == [[(part.lease, part.advantages, part.token_weights) for part in some] for some in parts]
            for one in (one for some in batch.micro_batches for one in some):
                assert [t.tokens.tolist() for t in one.trajectories] == [[1, 2, 3, 7, 7]] * 2
                assert [t.sampled.tolist() for t in one.trajectories] == [[False] * 3 + [True] * 2] * 2
                assert all(t.behaviour.dtype == np.float32 for t in one.trajectories)
                assert [t.versions for t in one.trajectories] == [[(0, 2)]] * 2


def test_what_was_handed_out_and_never_acknowledged_is_no_step(life: Any) -> None:
    run = life()
    run.put(4)
    run.train(1)
    run.hand_out(2)
    assert [step.step for step in run.recorded()] == [1]


def test_a_batch_that_was_handed_back_counts_as_it_was_handed_out_at_last(life: Any) -> None:
    run = life()
    run.put(4)
    first = run.hand_out(1)
    run.buffer.hand_back()
    run.buffer.lose([first.groups[0].lease])
    again = run.train(1)
    (step,) = run.recorded()
    assert leases(step) == [group.lease for group in again.groups] != [group.lease for group in first.groups]


def test_a_dropped_group_is_left_out_but_its_tokens_stay_in_the_weights(life: Any) -> None:
    run = life()
    run.put(2)
    offer = run.hand_out(1)
    gone, kept = (group.lease for group in offer.groups)
    run.buffer.drop(1, offer.attempt, [gone])
    run.acknowledge(offer)
    (step,) = run.recorded()
    batch = rank_batch(step, Planner(run.config, centred, token_mean), 0, run.config.max_lag)
    ((trained,),) = batch.micro_batches
    assert trained.lease == kept
    assert trained.token_weights.tolist() == [1 / 8] * 2  # two groups of two trajectories of two sampled tokens


def test_a_group_is_trained_on_as_often_as_it_was_and_no_longer_held_then(life: Any) -> None:
    run = life(buffer__epochs_per_group=2)
    first = run.put(2)
    run.train(1)
    run.train(2)
    second = run.put(2, version=2)
    run.train(3)
    assert [leases(step) for step in run.recorded()] == [first, first, second]


def test_a_buffer_that_died_in_between_leaves_one_history(life: Any) -> None:
    run = life()
    run.put(4)
    run.train(1)
    offer = run.hand_out(2)
    run.journal.close()
    run.open()
    run.acknowledge(run.buffer.offer)
    recorded = run.recorded()
    assert [step.step for step in recorded] == [1, 2]
    assert leases(recorded[1]) == [group.lease for group in offer.groups]


def test_the_steps_before_damage_are_given_and_then_the_damage_is_named(life: Any) -> None:
    run = life(max_lag=3)
    run.put(8)
    for step in (1, 2, 3):
        run.train(step)
    run.journal.close()
    (segment,) = run.folder.glob("*.journal")
    content = bytearray(segment.read_bytes())
    # MessagePack: the tag of an acknowledgement and its step.
    content[content.index(b"\xacacknowledged\x02")] ^= 1
    segment.write_bytes(content)
    count, damage = count_steps(run.folder, epochs=1)
    assert count == 1
    assert isinstance(damage, JournalError)
    assert "corrupt" in str(damage)


def test_a_record_of_another_kind_is_refused_in_one_line(life: Any) -> None:
    run = life()
    run.journal.append(b"\x91\xa7unknown")
    with pytest.raises(JournalError, match="use the streamrl that wrote it"):
        run.recorded()


def test_a_history_with_a_gap_is_refused(life: Any) -> None:
    run = life()
    run.journal.append(records.encode(records.HandedOut(2, 1, 1, [])))
    run.journal.append(records.encode(records.Acknowledged(2, 2)))
    with pytest.raises(JournalError, match="expected the acknowledgement of step 1, got that of step 2"):
        run.recorded()

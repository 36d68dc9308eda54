"""Versions that an engine scores in another way than the trainer: rejected, undone, and named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sync_support import FakeEngine, Ring, equal, ring, small_model, weights

from streamrl.errors import WeightSyncError
from streamrl.parity.weights import digests
from streamrl.sync.canary import LogprobCanary

ROW = [1, 2, 3, 4]


def scores_of(named: dict[str, torch.Tensor]) -> np.ndarray:
    """Stands for log-probs: something that any wrong tensor changes."""
    sums = [float(tensor.double().sum()) for tensor in named.values() if tensor.numel()]
    return np.array([0.0, *sums])


class ScoringEngine(FakeEngine):
    """Scores what it holds. ``spoil`` makes it load a tensor wrongly under that version."""

    spoil: int | None = None

    async def load(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        await super().load(version, tensors)
        if version == self.spoil:
            with torch.no_grad():
                self.model.get_parameter("1.bias").zero_()

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        assert token_ids == ROW
        return scores_of(self.weights)


class TellingEngine(ScoringEngine):
    async def digests(self) -> dict[str, int]:
        return digests(self.weights)


def join(it: Ring, name: str, engine: FakeEngine) -> FakeEngine:
    return it.join(name, engine, canary=LogprobCanary(ROW, "float32"))


def write(it: Ring, version: int, scored: bool = True, all_of_them: bool = True) -> None:
    """``scored``: whoever joins is judged; ``all_of_them``: and the others."""
    model = small_model(version)
    with it.publisher.open(version) as content:
        content.put(model.named_parameters())
        content.scores = scores_of(weights(model)).tolist() if scored else []
        content.judged = all_of_them


def test_an_engine_that_agrees_commits_and_says_by_how_much() -> None:
    async def scenario() -> None:
        async with ring() as it:
            join(it, "rollouter-0", ScoringEngine())
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0)
            report = await it.publisher.publish(0)
            assert report.rejected == ""
            assert 0 <= report.canary_rms < 1e-6
            assert it.publisher.current_version == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("rms", "said"), [(0.0, "model.dtype=float32 allows 1e-04"), (0.3, "")])
def test_a_run_can_say_how_far_its_engines_may_be_off(rms: float, said: str) -> None:
    class Near(FakeEngine):
        async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
            return np.array([0.0, -1.0, -1.0, -1.0])

    judgement = asyncio.run(LogprobCanary(ROW, "float32", rms).judge(Near(), [0.0, -1.2, -1.2, -1.2], {}))
    assert judgement.rms == pytest.approx(0.2)
    assert said in judgement.reason
    assert bool(judgement.reason) == bool(said)


@pytest.mark.parametrize("rolling", [False, True], ids=["together", "rolling"])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_version_that_one_engine_loads_wrongly_is_taken_back_everywhere(transport: str, rolling: bool) -> None:
    async def scenario() -> None:
        async with ring(transport=transport, rolling=rolling) as it:
            good, bad = (join(it, f"rollouter-{i}", TellingEngine()) for i in range(2))
            updates = it.observe("evaluator").updates()
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, {"evaluator"})
            write(it, 0)
            await it.publisher.publish(0, observe=True)
            assert (await anext(updates))[0] == 0
            bad.spoil = 1
            write(it, 1)
            report = await it.publisher.publish(1, observe=True)
            assert "rollouter-1: canary: engine and trainer log-probs differ by rms" in report.rejected
            assert "tensor 1.bias" in report.rejected
            assert report.canary_rms > 1e-4
            assert it.publisher.current_version == 0
            for engine in (good, bad):
                assert equal(engine.weights, weights(small_model(0)))
                assert engine.log[-1] == "resume"
            assert it.unresponsive == []

            write(it, 2)  # into the slot of the version that was rejected
            report = await it.publisher.publish(2, observe=True)
            assert (report.rejected, report.rollouters, it.publisher.current_version) == ("", 2, 2)
            for engine in (good, bad):
                assert equal(engine.weights, weights(small_model(2)))
            assert (await anext(updates))[0] == 2

    asyncio.run(scenario())


def test_an_engine_that_cannot_tell_its_tensors_says_so() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = join(it, "rollouter-0", ScoringEngine())
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0)
            await it.publisher.publish(0)
            engine.spoil = 1
            write(it, 1)
            assert "cannot tell which tensors differ" in (await it.publisher.publish(1)).rejected

    asyncio.run(scenario())


def test_a_trainer_that_means_other_weights_than_it_sent_is_found_out() -> None:
    async def scenario() -> None:
        async with ring() as it:
            join(it, "rollouter-0", TellingEngine())
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0)
            await it.publisher.publish(0)
            with it.publisher.open(1) as content:
                content.put(small_model(1).named_parameters())
                content.scores = scores_of(weights(small_model(0))).tolist()
            assert "every tensor as it was sent" in (await it.publisher.publish(1)).rejected

    asyncio.run(scenario())


def test_a_version_without_scores_is_not_judged() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = join(it, "rollouter-0", ScoringEngine())
            engine.spoil = 0
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0, scored=False)
            assert (await it.publisher.publish(0)).rejected == ""
            assert it.publisher.current_version == 0

    asyncio.run(scenario())


def test_a_late_joiner_whose_engine_disagrees_is_left_behind_alone() -> None:
    async def scenario() -> None:
        async with ring() as it:
            join(it, "rollouter-0", ScoringEngine())
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0)
            await it.publisher.publish(0)
            late = ScoringEngine()
            late.spoil = 0
            join(it, "rollouter-1", late)
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            failed = await it.events.wait("version_failed", version=0, late=True)
            assert "rollouter-1: canary" in failed["reason"]
            assert it.unresponsive == [("rollouter-1", "commit")]
            assert it.publisher.current_version == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("judged", [True, False])
def test_whoever_joins_is_judged_also_under_a_version_that_the_others_are_not_judged_by(judged: bool) -> None:
    async def scenario() -> None:
        async with ring() as it:
            there, late = ScoringEngine(), ScoringEngine()
            there.spoil = late.spoil = 1
            join(it, "rollouter-0", there)
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0, scored=False)
            await it.publisher.publish(0)
            write(it, 1, scored=judged, all_of_them=False)
            assert (await it.publisher.publish(1)).rejected == ""
            join(it, "rollouter-1", late)
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            if judged:
                failed = await it.events.wait("version_failed", version=1, late=True)
                assert "rollouter-1: canary" in failed["reason"]
            else:
                await it.events.wait("version_committed", version=1, late=True)

    asyncio.run(scenario())


def test_whoever_is_first_brought_in_by_an_update_of_all_is_judged_there() -> None:
    """As one whose own update was overtaken by the next version; the others are not asked under that."""

    async def scenario() -> None:
        async with ring() as it:
            there, late = join(it, "rollouter-0", ScoringEngine()), ScoringEngine()
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0, scored=False)
            await it.publisher.publish(0)
            write(it, 1, all_of_them=False)
            there.spoil = late.spoil = 1
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            publishing = asyncio.create_task(it.publisher.publish(1))
            join(it, "rollouter-1", late)
            report = await publishing
            assert "rollouter-1: canary" in report.rejected
            assert "rollouter-0" not in report.rejected

    asyncio.run(scenario())


def test_a_rejected_version_with_none_before_it_fails_for_its_caller() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = join(it, "rollouter-0", ScoringEngine())
            engine.spoil = 0
            it.publisher.set_members({"rollouter-0"}, set())
            write(it, 0)
            with pytest.raises(WeightSyncError, match="version 0 was rejected, the first one: rollouter-0: canary"):
                await it.publisher.publish(0)
            assert it.publisher.current_version == -1

    asyncio.run(scenario())

"""Contenders in turn, so that a noisy machine is unfair to all of them alike; the first round is discarded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from streamrl.bench.queue.stage import Contender, Job, Outcome, run
from streamrl.bench.queue.workload import Workload

FIRST_BATCHES = 24
"""Of a run in the round that is discarded; its rate decides how long the counted runs are."""
WARM_UP_BATCHES = 12
"""At the start of every run, discarded: connections, pages and caches."""

MakeJob = Callable[[Outcome | None], Job]
"""The contender's run in the discarded round, or None in that round → what it does next."""


def in_turn(contenders: Sequence[Contender], runs: int, make_job: MakeJob) -> dict[str, list[Outcome]]:
    """``runs`` counted outcomes of each contender, by its name."""
    jobs = {contender.name: make_job(run(contender, make_job(None))) for contender in contenders}
    outcomes: dict[str, list[Outcome]] = {contender.name: [] for contender in contenders}
    for repetition in range(runs):
        for contender in contenders:
            outcome = run(contender, jobs[contender.name])
            outcomes[contender.name].append(outcome)
            print(f"run {repetition + 1} of {runs}: {contender.name}, {outcome.seconds:.1f} s", file=sys.stderr)
    return outcomes


def for_seconds(workload: Workload, seconds: float) -> MakeJob:
    """As fast as it goes, for about ``seconds``, by the rate of the discarded round."""
    batch = workload.groups_per_batch
    warm_up = WARM_UP_BATCHES * batch

    def make_job(first: Outcome | None) -> Job:
        batches = FIRST_BATCHES
        if first is not None:
            batches = max(batches, round(first.rate * seconds / (batch * workload.group_size)))
        return Job(workload, warm_up + batches * batch, warm_up)

    return make_job


def on_schedule(workload: Workload, groups_per_s: float, seconds: float) -> MakeJob:
    """``groups_per_s`` are offered, for ``seconds``; the discarded round is short."""
    batch = workload.groups_per_batch
    warm_up = WARM_UP_BATCHES * batch

    def make_job(first: Outcome | None) -> Job:
        batches = 1 if first is None else max(1, round(seconds * groups_per_s / batch))
        return Job(workload, warm_up + batches * batch, warm_up, groups_per_s=groups_per_s)

    return make_job

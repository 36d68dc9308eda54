"""``streamrl bench sync``: from "weights ready in the trainer" to "loaded in all engines", against what else there is.

::

    update       shm to 4 engines that serve from it, to 4 that copy, and to 4 that copy ahead of the pause
                 (sync.stage=device), against the copies that those cannot avoid, safetensors in /dev/shm, and a gloo
                 broadcast per tensor; how long an engine stands still; memory beyond the weights
    transports   the other transports to the same 4, against shm; always with the first size
    delta        sync.encoding=delta against full over zmq and collective, by the share of values that changed; bytes
                 for steps of AdamW, and for the first steps of the quickstart; always with the first size
    digest       bytes per second of the work that a bucket takes on its way, by threads; 64 MiB at a time
    chain        nixl to the same 4 as if they were on 1 to 4 hosts, none of them the trainer's: how often the trainer's
                 memory is read, and how long that takes
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from streamrl import nixl
from streamrl.bench.report import Row, publish, summarise
from streamrl.bench.sync.rates import rates
from streamrl.bench.sync.stage import Contender, Stage
from streamrl.bench.sync.steps import adamw_deltas, quickstart_fractions
from streamrl.bench.sync.weights import GB, shapes
from streamrl.errors import ConfigError

TARGETS = 4
BUCKET_BYTES = 64 << 20
COLD_UPDATES = 2
"""Of each contender in each round, not counted: they fill both slots, and every page for the first time."""
COUNTED_UPDATES = 2
PAUSE_SHARE = 0.15
"""Of an update, that an engine may stand still for."""

_HERE = "streamrl.bench.sync"
FLOOR = Contender("copy floor", f"{_HERE}.copies")
SAFETENSORS = Contender("safetensors in /dev/shm", f"{_HERE}.safetensors_file")
GLOO = Contender("gloo per tensor", f"{_HERE}.gloo", together=True)


TRANSPORTS = ("zmq", "collective", "disk", "nixl")
HOSTS = (1, 2, 4)
"""Of the chain section, that targets are dealt to."""
Change = tuple[float, bool]
"""Which share of all values changes from one version to the next, and whether to any value, or by one step."""
STEPS = [(share, False) for share in (0.001, 0.01, 0.05, 0.1, 0.2, 0.5)]
DELTAS: dict[str, list[Change]] = {
    "zmq": [*STEPS, (0.05, True), (0.2, True)],
    "collective": [(0.01, False), (0.2, False)],
}
LEARNING_RATE = 1e-6
QUICKSTART_STEPS = 8


def ours(
    transport: str, *, delta: bool = False, rolling: bool = False, copies: bool = False, ahead: bool = False
) -> Contender:
    """``copies``: into engines that do not serve from the memory in which weights arrive; ``ahead``: of the pause."""
    options = {"transport": transport, "delta": delta, "rolling": rolling, "copies": copies, "ahead": ahead}
    options |= {"bucket_bytes": BUCKET_BYTES}
    name = f"{transport}{' delta' * delta}{' copied' * copies}{' ahead' * ahead}{' rolling' * rolling}"
    return Contender(name, f"{_HERE}.plane", options, loads=False)


Measured = dict[str, list[dict[str, float]]]


def in_turn(stage: Stage, contenders: Sequence[Contender], runs: int, share: float) -> Measured:
    """Every contender once a round; what each counted update measured, by contender."""
    measured: Measured = {}
    for run in range(runs):
        for contender in contenders:
            with stage.playing(replace(contender, options=contender.options | {"run": run})):
                outcomes = [stage.update(share) for _ in range(COLD_UPDATES + COUNTED_UPDATES)]
                measured.setdefault(contender.name, []).extend(outcomes[COLD_UPDATES:])
    return measured


def seconds(measured: Measured, contender: Contender) -> list[float]:
    return [each["seconds"] for each in measured[contender.name]]


def update(size: str, runs: int) -> Iterator[Row]:
    shm, copied, rolling = ours("shm"), ours("shm", copies=True), ours("shm", copies=True, rolling=True)
    ahead = ours("shm", copies=True, ahead=True)
    where = f"{model_gb(size):.2f} GB to {TARGETS}"
    with Stage(size, TARGETS) as stage:
        measured = in_turn(stage, [shm, copied, ahead, rolling, FLOOR, SAFETENSORS, GLOO], runs, share=1.0)
        memory = stage.memory
    own, floor = seconds(measured, shm), seconds(measured, FLOOR)
    for contender in (shm, copied, ahead):
        times = seconds(measured, contender)
        yield summarise(f"{where}/{contender.name} against the copy floor", "s", times, floor)
    for baseline in (SAFETENSORS, GLOO):
        yield summarise(f"{where}/{baseline.name} against shm", "s", seconds(measured, baseline), own)
    for contender in (shm, copied, ahead, rolling):
        pauses = [each["pause"] for each in measured[contender.name]]
        name = f"{where}/{contender.name}, pause against update (target {PAUSE_SHARE:.2f})"
        yield summarise(name, "s", pauses, seconds(measured, contender))
    yield summarise(f"{where}/extra memory of the trainer", "buckets", _in(memory["shm"], BUCKET_BYTES))
    for contender in (shm, copied, ahead):
        models = _in(memory[f"{contender.name}/host"], model_gb(size) * GB)
        yield summarise(f"{where}/{contender.name}, extra memory of the host", "models", models)


def transports(size: str, runs: int) -> Iterator[Row]:
    contenders = [ours(transport) for transport in ("shm", *_installed(TRANSPORTS))]
    with Stage(size, TARGETS) as stage:
        measured = in_turn(stage, contenders, runs, share=1.0)
    where = f"{model_gb(size):.2f} GB to {TARGETS}"
    for contender in contenders[1:]:
        times = seconds(measured, contender), seconds(measured, contenders[0])
        yield summarise(f"{where}/{contender.name} against shm", "s", *times)


def _installed(transports: Sequence[str]) -> list[str]:
    """Without ``nixl``, and a line that says so, where its package is missing."""
    try:
        nixl.require("the row of nixl")
    except ConfigError as error:
        print(f"{error}; it is left out", file=sys.stderr)
        return [transport for transport in transports if transport != "nixl"]
    return list(transports)


def passed_on(hosts: int) -> Contender:
    """nixl to targets that count to ``hosts`` hosts, none of them the source's."""
    nixl_alone = ours("nixl")
    options = nixl_alone.options | {"hosts": hosts}
    name = f"nixl, as on {hosts} host{'s' * (hosts > 1)}"
    return Contender(name, f"{_HERE}.chain", options)


def chain(size: str, runs: int) -> Iterator[Row]:
    if not _installed(["nixl"]):
        return
    contenders = [passed_on(hosts) for hosts in HOSTS]
    with Stage(size, TARGETS) as stage:
        measured = in_turn(stage, contenders, runs, share=1.0)
    where = f"{model_gb(size):.2f} GB to {TARGETS}"
    for contender in contenders:
        times = seconds(measured, contender), seconds(measured, contenders[0])
        yield summarise(f"{where}/{contender.name} against {contenders[0].name}", "s", *times)
        read = [each["from_trainer"] for each in measured[contender.name]]
        yield summarise(f"{where}/{contender.name}, read from the trainer", "models", _in(read, model_gb(size) * GB))


def delta(size: str, runs: int) -> Iterator[Row]:
    with Stage(size, TARGETS) as stage:
        for transport, changes in DELTAS.items():
            full, coded = _full_and_delta(stage, transport, changes, runs)
            for change, outcomes in coded.items():
                share, anyhow = change
                how = "any value" if anyhow else "by one step"
                name = f"{model_gb(size):.2f} GB to {TARGETS}/{transport} delta, {share:.1%} changed {how}"
                times = [each["seconds"] for each in outcomes]
                yield summarise(f"{name} against full", "s", times, full)
                yield summarise(f"{name}/bytes", "of full", [each["fraction"] for each in outcomes])
    yield from _adamw(runs)
    for dtype in ("float32", "bfloat16"):
        fractions = quickstart_fractions(dtype, QUICKSTART_STEPS)
        yield summarise(f"quickstart in {dtype}/bytes", "of full", fractions)


def _full_and_delta(
    stage: Stage, transport: str, changes: list[Change], runs: int
) -> tuple[list[float], dict[Change, list[dict[str, float]]]]:
    """(seconds of full updates, what the coded ones measured by change): in turn, round by round."""
    full, coded = ours(transport), ours(transport, delta=True)
    times: list[float] = []
    outcomes: dict[Change, list[dict[str, float]]] = {change: [] for change in changes}
    for run in range(runs):
        times += seconds(in_turn(stage, [full], 1, share=1.0), full)
        with stage.playing(replace(coded, options=coded.options | {"run": run})):
            for _ in range(COLD_UPDATES):
                stage.update(changes[0][0])
            for change in changes[run % len(changes) :] + changes[: run % len(changes)]:
                share, anyhow = change
                outcomes[change] += [stage.update(share, anyhow=anyhow) for _ in range(COUNTED_UPDATES)]
    return times, outcomes


def _adamw(runs: int) -> Iterator[Row]:
    changed, fractions = zip(*adamw_deltas(LEARNING_RATE, 1 + runs), strict=True)
    where = f"AdamW, lr {LEARNING_RATE:g}, bf16 from fp32"
    yield summarise(f"{where}/values that change in a step", "of all", changed[1:])
    yield summarise(f"{where}/bytes", "of full", fractions[1:])


def model_gb(size: str) -> float:
    return 2 * sum(math.prod(shape) for shape in shapes(size).values()) / GB


def _in(values: Sequence[float], unit: float) -> list[float]:
    return [value / unit for value in values]


def run(json_path: Path | None, runs: int, sizes: Sequence[str], only: str | None) -> list[Row]:
    """Measure, print the table, write the rows to ``json_path`` if given.

    Raises ``StreamRLError`` where weights did not arrive as they were sent, or a process failed; none is left behind.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends like Ctrl-C: processes and folders are cleaned up
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "update": lambda: (row for size in sizes for row in update(size, runs)),
        "transports": lambda: transports(sizes[0], runs),
        "delta": lambda: delta(sizes[0], runs),
        "digest": lambda: rates(runs),
        "chain": lambda: chain(sizes[0], runs),
    }
    rows = [
        replace(row, name=f"sync/{row.name}")
        for name, measure in sections.items()
        if only in (None, name)
        for row in measure()
    ]
    publish(rows, json_path)
    return rows

"""What ``streamrl bench queue`` makes of what it measured, how it verifies, and that each contender really runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from streamrl.bench.queue import command, contenders, rounds, stage
from streamrl.bench.queue.stage import Contender, Job, Outcome
from streamrl.bench.queue.workload import POOL, STRIDE, Verifier, Workload, pool, router_column
from streamrl.bench.report import Row
from streamrl.errors import ActorDied, ConfigError, StreamRLError

TINY = Workload(prompt=4, answer=128, group_size=4, groups_per_batch=2)


def test_a_trajectory_of_the_workload_takes_the_bytes_that_the_field_ships():
    arrays = pool(Workload())[0]
    assert [array.dtype.str for array in arrays[:4]] == ["<i8", "<f4", "<i4", "|u1"]
    assert sum(array.nbytes for array in arrays[:4]) == Workload().trajectory_bytes == 39_424


# Verification ---------------------------------------------------------------------------------------------------------


def take(verifier: Verifier, group: int, index: int, **changed: Any) -> None:
    """What ``TINY`` sends as that trajectory, with ``changed`` fields."""
    number = TINY.number(group, index)
    arrays = pool(TINY)[number % POOL]
    sent = {
        "reward": float(number),
        **{name: getattr(arrays, name) for name in ("ids", "logprobs", "versions", "mask")},
    }
    verifier.take(group, index, **(sent | changed))


def test_what_was_sent_is_accepted_in_any_order_and_in_narrower_types():
    verifier = Verifier(TINY, 2)
    for number in (3, 7, 0, 1, 6, 5, 2, 4):
        arrays = pool(TINY)[number]
        take(verifier, *divmod(number, 4), ids=arrays.ids.astype(np.int32), mask=arrays.mask.astype(np.bool_))
    verifier.finish()


def test_a_lost_trajectory_is_named():
    verifier = Verifier(TINY, 2)
    for number in (0, 1, 2, 3, 4, 6, 7):
        take(verifier, *divmod(number, 4))
    with pytest.raises(
        StreamRLError, match="1 of 8 trajectories never arrived, the first of them group 1, trajectory 1"
    ):
        verifier.finish()


def test_a_trajectory_that_arrives_twice_is_refused():
    verifier = Verifier(TINY, 2)
    take(verifier, 1, 2)
    with pytest.raises(StreamRLError, match="group 1, trajectory 2: expected once, arrived twice"):
        take(verifier, 1, 2)


@pytest.mark.parametrize("place", [(2, 0), (0, 4), (-1, 0)])
def test_a_trajectory_that_was_never_sent_is_refused(place: tuple[int, int]):
    with pytest.raises(StreamRLError, match="never sent"):
        take(Verifier(TINY, 2), *place)


@pytest.mark.parametrize("field", ["ids", "logprobs", "versions", "mask"])
def test_a_changed_element_is_found_where_it_is_compared(field: str):
    altered = getattr(pool(TINY)[5], field).copy()
    altered[5 + STRIDE] += 1
    with pytest.raises(StreamRLError, match=f"group 1, trajectory 1: its {field} are not those that were sent"):
        take(Verifier(TINY, 2), 1, 1, **{field: altered})


@pytest.mark.parametrize("field", ["ids", "logprobs", "versions", "mask"])
def test_a_truncated_array_is_refused(field: str):
    with pytest.raises(StreamRLError, match=field):
        take(Verifier(TINY, 2), 0, 0, **{field: getattr(pool(TINY)[0], field)[:-1]})


def test_the_arrays_of_another_trajectory_are_refused():
    with pytest.raises(StreamRLError, match="ids are not those"):
        take(Verifier(TINY, 2), 0, 1, ids=pool(TINY)[2].ids)


def test_another_reward_or_other_version_spans_are_refused():
    with pytest.raises(StreamRLError, match="expected the reward 1, got 2.0"):
        take(Verifier(TINY, 2), 0, 1, reward=2.0)
    spans = pool(TINY)[1].spans
    take(Verifier(TINY, 2), 0, 1, versions=spans)
    with pytest.raises(StreamRLError, match="versions"):
        take(Verifier(TINY, 2), 0, 1, versions=[(0, 128)])


def test_a_changed_router_column_is_refused():
    workload = replace(TINY, router_bytes=1000)
    column = router_column(workload)
    arrays = pool(workload)[0]
    sent = (0, 0, 0.0, arrays.ids, arrays.logprobs, arrays.versions, arrays.mask)
    Verifier(workload, 1).take(*sent, router=column)
    with pytest.raises(StreamRLError, match="router"):
        Verifier(workload, 1).take(*sent, router=column[:-1])
    altered = column.copy()
    altered[STRIDE] ^= 1
    with pytest.raises(StreamRLError, match="router"):
        Verifier(workload, 1).take(*sent, router=altered)


def test_every_element_is_compared_in_some_trajectory_of_the_pool():
    for array in pool(Workload())[0][:4]:
        compared = np.zeros(len(array), dtype=bool)
        for number in range(POOL):
            compared[number % STRIDE :: STRIDE] = True
        assert compared.all()


# Arithmetic -----------------------------------------------------------------------------------------------------------


def outcome(rate: float, cpu_s: float = 1.0, told: dict[str, Any] | None = None, warm_up: int = 0) -> Outcome:
    """1,000 trajectories at ``rate``."""
    return Outcome(Job(TINY, 1000, warm_up), 1000, 1000 / rate, cpu_s, 50_000_000, told or {})


def test_rate_and_cpu_seconds_count_the_trajectories_after_the_warm_up():
    measured = Outcome(Job(TINY, 110, 10), 400, 2.0, 0.1, 0, {})
    assert (measured.rate, measured.cpu_per_1000) == (200.0, pytest.approx(0.25))


def test_the_fastest_raw_variant_is_the_baseline_of_all(monkeypatch: pytest.MonkeyPatch):
    rates = {contender.name: 100.0 for contender in [*contenders.RAW, contenders.RAW_NARROW, *contenders.ours()]}
    fastest = contenders.RAW[2].name
    rates |= {fastest: 400.0, contenders.RAW_NARROW.name: 900.0, contenders.ZMQ.name: 300.0}
    rates[contenders.ZMQ_JOURNAL.name] = 240.0
    asked = []

    def in_turn(chosen: list[Contender], runs: int, make_job: Any) -> dict[str, list[Outcome]]:
        asked.append(runs)
        return {each.name: [outcome(rates[each.name], cpu_s=2.0)] * runs for each in chosen}

    monkeypatch.setattr(command, "in_turn", in_turn)
    rows = {row.name: row for row in command.throughput([], 3, 1.0)}
    assert asked == [3]
    assert rows[f"throughput/{fastest}/rate"] == Row(
        f"throughput/{fastest}/rate", pytest.approx(400.0), "trajectories/s", None, None, 3, 0.0
    )
    assert rows[f"throughput/{contenders.ZMQ.name}/rate"].ratio == pytest.approx(0.75)
    assert rows[f"throughput/{contenders.RAW_NARROW.name}/rate"].ratio == pytest.approx(2.25)
    assert rows[f"throughput/{contenders.ZMQ.name}/cpu"].value == pytest.approx(2.0)
    assert rows[f"throughput/{contenders.ZMQ.name}/memory"].value == pytest.approx(50.0)
    assert rows["throughput/journal on against off/rate"].ratio == pytest.approx(0.8)


def test_latency_is_from_put_to_batch_ready_of_the_groups_after_the_warm_up():
    told = {
        "producer-0": {"put_at": {"0": 1.0, "2": 3.0}},
        "producer-1": {"put_at": {"1": 2.0, "3": 4.0}},
        "consumer": {"ready_at": {"0": 9.0, "1": 2.5, "2": 3.002, "3": 4.004}},
    }
    measured = outcome(1.0, told=told, warm_up=2)
    assert command.latencies_ms(measured) == pytest.approx([2.0, 4.0])


def test_the_crossover_is_the_size_from_which_nixl_stays_ahead():
    kb = 1 << 10
    assert command.crossover({64 * kb: True, 256 * kb: False, 1024 * kb: True, 4096 * kb: True}).endswith(
        "from 1024 KB a trajectory on"
    )
    assert "slower" in command.crossover({64 * kb: True, 256 * kb: False})


def test_the_discarded_round_decides_how_long_the_counted_runs_are():
    make_job = rounds.for_seconds(TINY, 3.0)
    first = make_job(None)
    batch = TINY.groups_per_batch
    assert first.warm_up == rounds.WARM_UP_BATCHES * batch
    assert first.groups - first.warm_up == rounds.FIRST_BATCHES * batch
    assert make_job(outcome(rate=800.0)).groups - first.warm_up == 3 * 800 // TINY.group_size


def test_the_first_round_is_not_counted_and_contenders_take_turns(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def run(contender: Contender, job: Job) -> Outcome:
        ran.append(contender.name)
        return outcome(float(len(ran)))

    monkeypatch.setattr(rounds, "run", run)
    measured = rounds.in_turn([Contender("a", ""), Contender("b", "")], 2, rounds.for_seconds(TINY, 1.0))
    assert ran == ["a", "b", "a", "b", "a", "b"]
    assert {name: [each.rate for each in outcomes] for name, outcomes in measured.items()} == {
        "a": [pytest.approx(3.0), pytest.approx(5.0)],
        "b": [pytest.approx(4.0), pytest.approx(6.0)],
    }


def test_a_producer_that_still_delivers_without_a_consumer_fails_the_memory_section():
    told = {"server": {"grown_bytes": 1}, "producer-0": {"idle_s": 5.0}, "producer-1": {"idle_s": 0.01}}
    with pytest.raises(StreamRLError, match="producer-1 still delivered"):
        command._check_held_back("ours", outcome(1.0, told=told))


# Contenders -----------------------------------------------------------------------------------------------------------


def run(contender: Contender, **changed: Any) -> Outcome:
    """A tiny verified run with two producers."""
    return stage.run(contender, Job(TINY, groups=8, warm_up=2, producers=2, **changed))


def installed(peer: str) -> bool:
    packages = {"mp": "multiprocessing", "transferqueue": "transfer_queue"}
    there = importlib.util.find_spec(packages.get(peer, peer)) is not None
    return there and (peer != "redis" or shutil.which("redis-server") is not None)


@pytest.mark.parametrize("contender", [*contenders.RAW, contenders.RAW_NARROW], ids=lambda each: each.name)
def test_a_raw_baseline_carries_every_trajectory(contender: Contender):
    assert run(contender).trajectories == 6 * TINY.group_size


@pytest.mark.parametrize(
    "contender", [contenders.ZMQ, contenders.ZMQ_JOURNAL, contenders.ZMQ_TCP], ids=lambda x: x.name
)
def test_our_queue_carries_every_trajectory(contender: Contender):
    assert run(contender).trajectories == 6 * TINY.group_size


@pytest.mark.parametrize("contender", [contenders.ZMQ, contenders.NIXL], ids=lambda x: x.name)
def test_a_large_column_travels_with_every_trajectory(contender: Contender):
    if contender is contenders.NIXL:
        pytest.importorskip("nixl")
    job = Job(replace(TINY, router_bytes=300_000), groups=8, warm_up=2, producers=2)
    assert stage.run(contender, job).trajectories == 6 * TINY.group_size


def test_producers_are_held_back_while_the_consumer_stands_still():
    options = {"limit_bytes": 4 << 20, "max_lag": command.UNPACED, "stopped": 2.0}
    contender = contenders.with_options(contenders.ZMQ, **options)
    measured = stage.run(contender, Job(Workload(), groups=1 << 20, warm_up=0, producers=2))
    command._check_held_back(contender.name, measured)
    assert all("grown_bytes" in told for told in measured.told.values())


def test_without_nixl_its_rows_are_left_out_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert contenders.ours() == [contenders.ZMQ, contenders.ZMQ_JOURNAL, contenders.ZMQ_TCP]
    assert capsys.readouterr().err == ("NIXL rows are left out: nixl is not installed; pip install 'streamrl[nixl]'\n")


@pytest.mark.parametrize("peer", list(contenders.PEERS))
def test_a_peer_carries_every_trajectory(peer: str):
    if not installed(peer):
        pytest.skip(f"{peer} is not installed")
    assert run(contenders.PEERS[peer]).trajectories == 6 * TINY.group_size


def test_on_a_schedule_every_group_has_a_time_of_put_and_of_arrival():
    measured = run(contenders.RAW[0], groups_per_s=200.0)
    assert len(command.latencies_ms(measured)) == 6
    assert min(command.latencies_ms(measured)) > 0


def test_a_run_that_altered_trajectories_fails_and_leaves_no_process():
    broken = Contender("broken", __name__, {"frames": "packed", "transport": "ipc", "alter": True})
    with pytest.raises(StreamRLError, match=r"broken: its consumer failed: group \d, trajectory \d: its ids"):
        run(broken)
    assert workers() == []


def test_a_process_that_dies_ends_the_run_and_is_named():
    with pytest.raises(ActorDied, match="dying: its producer-1 ended with code -9"):
        run(Contender("dying", __name__, {"frames": "packed", "transport": "ipc", "die": True}))
    assert workers() == []


def test_a_bench_that_is_killed_leaves_no_process(tmp_path: Path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_queue_bench import *\n"
        "if __name__ == '__main__':\n"
        "    options = {'frames': 'packed', 'transport': 'ipc', 'hang': sys.argv[2]}\n"
        "    run(Contender('endless', 'test_queue_bench', options))\n"
    )
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(code)
    os.mkfifo(mark)
    command_line = [sys.executable, str(script), str(Path(__file__).parent), str(mark)]
    bench = subprocess.Popen(command_line, env={**os.environ, "TMPDIR": str(tmp_path)})
    mark.read_text()  # the consumer runs
    children = psutil.Process(bench.pid).children(recursive=True)
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert len(gone) >= 2
    assert alive == []


def workers() -> list[psutil.Process]:
    """Processes that a run started from here."""
    return [
        process for process in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(process.cmdline())
    ]


def produce(job: Job, port: stage.Port) -> None:
    """Of the broken contenders above: a real producer that sends the arrays of other trajectories, or dies."""
    from streamrl.bench.queue import raw_zmq

    if job.options.get("die") and job.producer == 1:
        port.ready()
        os.kill(os.getpid(), signal.SIGKILL)
    if job.options.get("alter"):
        raw_zmq.pool = lambda workload: pool(workload)[::-1]
    raw_zmq.produce(job, port)


def consume(job: Job, port: stage.Port) -> None:
    from streamrl.bench.queue import raw_zmq

    if job.options.get("hang"):
        Path(job.options["hang"]).write_text("")
        time.sleep(600)
    raw_zmq.consume(job, port)


# Peers that are not there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peer", "package"), [("redis", "redis"), ("ray", "ray"), ("transferqueue", "transfer_queue")])
def test_a_missing_package_gets_one_line_before_anything_runs(peer: str, package: str, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(ConfigError) as caught:
        command.run(None, [peer], 1, None, 1.0)
    assert str(caught.value) == f"--peer {peer}: the package {package} is not installed; pip install 'streamrl[bench]'"


def test_a_missing_redis_server_gets_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="^--peer redis: redis-server is not on the path; install it"):
        command.run(None, ["redis"], 1, None, 1.0)

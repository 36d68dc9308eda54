"""Real runs whose weights travel another way than by shared memory."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors import safe_open


@pytest.mark.parametrize("transport", ["zmq", "collective"])
def test_a_run_with_deltas_completes_and_says_what_travelled(launch: Any, transport: str):
    ring = launch(
        "--steps", "4", "--rollouts", "2", f"sync.transport={transport}", "sync.encoding=delta", "sync.anchor_every=3",
        "trainer.lr=1e-11", "sync.bucket_bytes=20000",
    )  # fmt: skip
    assert ring.wait() == 0, ring.output + ring.logs()
    (chosen,) = [event for event in ring.events() if event["event"] == "transport_chosen"]
    assert (chosen["transport"], chosen["why"]) == (transport, "sync.transport names it")
    lines = ring.metrics()
    assert [line["sync/rollouters"] for line in lines] == [2, 2, 2, 2]
    assert lines[2]["sync/delta_fraction"] == 1  # version 3, the anchor
    assert max(lines[index]["sync/delta_fraction"] for index in (0, 1, 3)) < 0.9
    assert not [event for event in ring.events() if event["event"] in ("version_failed", "version_refused")]


def test_a_run_over_disk_leaves_its_last_versions_as_safetensors(launch: Any):
    ring = launch("--steps", "3", "sync.transport=disk")
    assert ring.wait() == 0, ring.output + ring.logs()
    folder = ring.run_dir / "weights"
    assert sorted(path.name for path in folder.iterdir()) == ["version-2", "version-3"]
    with safe_open(folder / "version-3" / "model.safetensors", framework="pt") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118 no mapping


def test_a_run_over_one_sided_reads_completes(launch: Any):
    pytest.importorskip("nixl", reason="sync.transport=nixl needs the nixl package: pip install 'streamrl[nixl]'")
    ring = launch("--steps", "3", "--rollouts", "2", "sync.transport=nixl", "sync.bucket_bytes=20000")
    assert ring.wait() == 0, ring.output + ring.logs()
    assert [line["sync/rollouters"] for line in ring.metrics()] == [2, 2, 2]
    assert not [event for event in ring.events() if event["event"] in ("version_failed", "version_refused")]

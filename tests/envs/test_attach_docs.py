"""What docs/attach.md shows is what happens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
from attach_support import Stage, on_stage
from scripted import says, settings

from streamrl.envs.attach import protocol
from streamrl.envs.attach.agent import MOST_FAILED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "attach.md").read_text()
PLAYER = re.search(r"```python\n# player\.py\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_player_of_the_page_plays_leases_through_the_completions_api(tmp_path: Path) -> None:
    assert PLAYER is not None
    namespace: dict[str, object] = {}
    exec(PLAYER[1], namespace)

    async def scene(stage: Stage) -> None:
        server = stage.server
        player = asyncio.create_task(namespace["play"](server.url, server.token, 2))  # type: ignore[operator]
        for prompt in range(2):
            result = await server.play(size=3, prompt=prompt)
            answer = server.native.split.train(prompt).answer
            assert result.group is not None and result.failures == []
            assert [each.reward for each in result.group.trajectories] == [float(answer == "57")] * 3
        await player

    config = settings("streamrl.envs.strings:Addition", digits=2)
    on_stage(tmp_path, config, lambda: says("57$"), scene)


@pytest.mark.parametrize("kind", [*protocol.FromProcess.__args__, *protocol.FromRollouter.__args__])
def test_every_message_is_on_the_page_with_its_fields(kind: type[msgspec.Struct]) -> None:
    tag = kind.__struct_config__.tag
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{tag}` |"))
    fields = row.split("|")[2]
    named = set(re.findall(r"`(\w+)`", fields))
    known = set(kind.__struct_fields__)
    assert named <= known
    assert "…" in fields or named == known


def test_the_bounds_on_the_page_are_those_that_hold() -> None:
    assert f"at most {protocol.MESSAGE_BYTES >> 20} MiB" in PAGE
    assert f"`protocol` ({protocol.PROTOCOL})" in PAGE
    assert f"at most {protocol.MAX_CALLS:,} episodes of a rollouter at once" in PAGE
    assert f"within {protocol.HEARTBEAT_S * 1.5:.0f} s after a cut" in PAGE
    text = " ".join(PAGE.split())
    assert f"blocks its event loop for {protocol.HEARTBEAT_S / 2:.0f} s counts as dead" in text
    assert f"that happens to {MOST_FAILED} leases of a process in a row" in text

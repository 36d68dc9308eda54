"""Tools in an attached process: texts are shortened by the tokenizer of the run."""

from __future__ import annotations

from pathlib import Path

from attach_support import Stage, on_stage
from scripted import CharTokenizer, lease, says, settings

from streamrl.envs import Policy, Reward, Task
from streamrl.envs.clipping import clip

LONG = "a" * 500


async def clips(task: Task, policy: Policy) -> Reward:
    short, long = await policy.clip("abc", 64), await policy.clip(LONG, 64)
    await policy.complete("1+1=")
    return Reward(1.0, metadata={"texts": [short, long]})


def test_a_long_text_is_clipped_by_the_rollouter_as_it_is_in_its_own_episodes(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.attach("test_tools_attached:clips")
        result = await stage.server.play(size=1)
        native = await stage.server.native.run_group(lease(1))
        assert result.group is not None and native.group is not None
        texts = [each.metadata["texts"] for group in (result.group, native.group) for each in group.trajectories]
        assert texts == [["abc", clip(LONG, 64, CharTokenizer())]] * 2

    config = settings("test_tools_attached:clips")
    config.group.min_size = 1
    on_stage(tmp_path, config, lambda: says("2$"), scene)

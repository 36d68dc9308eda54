"""Branches of an episode are trajectories of their own; every sampled token is trained once; who is worth what."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted import CharTokenizer, ScriptedEngine, generation, ids, lease, play, runner, says, settings

from streamrl.envs import ContextFull
from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import Episode, Limits
from streamrl.envs.session import Session
from streamrl.types import Generation, SamplingParams, Trajectory

LIMITS = Limits(temperature=0.7, top_k=0, top_p=1.0, max_tokens=8, max_length=20)

EPISODES = """
import asyncio
from streamrl.envs import Reward

async def best_of_two(task, policy):
    await policy.complete("1=")
    branches = [policy.branch(), policy.branch()]
    answers = await asyncio.gather(*(each.complete("<") for each in branches))
    for branch, answer in zip(branches, answers):
        branch.finish(float(answer.text))
    return 0.0

async def fills_a_branch(task, policy):
    await policy.complete("1=")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(policy.branch().complete("<" * 100))
        tasks.create_task(policy.branch().complete("<" * 100))
    return 1.0

async def leaves_a_branch(task, policy):
    await policy.complete("1=")
    asyncio.ensure_future(policy.branch().complete("<"))
    await asyncio.sleep(0)
    return 1.0
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "branching_episodes.py").write_text(EPISODES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "branching_episodes", raising=False)


def session(engine: ScriptedEngine, key: tuple[int, int, int, int] = (0, 0, 0, 0)) -> Session:
    return Session(Episode(engine, Codec(CharTokenizer()), LIMITS, key))  # type: ignore[arg-type]


def trajectories(policy: Session, reward: float = 0.0) -> list[Trajectory]:
    return policy.episode.trajectories(Reward(reward), member=3)


def marked(trajectory: Trajectory) -> str:
    """The text with its sampled tokens in capitals (digits and signs as they are, in brackets)."""
    text = CharTokenizer().decode(trajectory.tokens)
    return "".join(f"[{each}]" if chosen else each for each, chosen in zip(text, trajectory.sampled, strict=True))


def test_a_branch_begins_with_what_was_sampled_so_far_as_context() -> None:
    engine = says("5$", "6$", "7$")
    policy = session(engine)

    async def episode() -> None:
        await policy.complete("1=")
        branch = policy.branch()
        await branch.complete("<")
        await policy.complete(">")

    asyncio.run(episode())
    assert [marked(each) for each in trajectories(policy)] == ["1=[5][$]>[7][$]", "1=5$<[6][$]"]
    assert [each.episode for each in trajectories(policy)] == [3, 3]


def test_every_sampled_token_is_trained_in_exactly_one_trajectory() -> None:
    engine = says("5$", "6$", "7$", "8$", "9$")
    policy = session(engine)

    async def episode() -> None:
        await policy.complete("1=")
        first = policy.branch()
        await first.complete("<")
        second = first.branch()
        await second.complete("?")
        await first.complete(".")
        await policy.complete(">")

    asyncio.run(episode())
    found = [marked(each) for each in trajectories(policy)]
    assert found == ["1=[5][$]>[9][$]", "1=5$<[6][$].[8][$]", "1=5$<6$?[7][$]"]
    assert sum(each.sampled_count for each in trajectories(policy)) == sum(len(each) + 1 for each in "56789")


def test_branches_are_sampled_at_the_same_time_and_beside_their_parent() -> None:
    async def episode() -> int:
        engine = says("5$")
        policy = session(engine)
        await policy.complete("1=")
        engine.hold = asyncio.Event()
        branches = [policy.branch() for _ in range(3)]
        calls = [asyncio.create_task(each.complete("<")) for each in (policy, *branches)]
        await engine.asked(5)
        engine.hold.set()
        await asyncio.gather(*calls)
        return engine.most_at_once

    assert asyncio.run(episode()) == 4


def test_a_branch_that_samples_nothing_is_no_trajectory() -> None:
    policy = session(says("5$"))
    asyncio.run(policy.complete("1="))
    policy.branch().branch()
    assert [marked(each) for each in trajectories(policy)] == ["1=[5][$]"]


def test_a_parent_that_samples_nothing_is_no_trajectory() -> None:
    policy = session(says("5$"))
    asyncio.run(policy.branch().complete("1="))
    assert [marked(each) for each in trajectories(policy)] == ["1=[5][$]"]


def test_a_full_context_in_a_branch_truncates_that_branch_only() -> None:
    policy = session(says("5$"))

    async def episode() -> None:
        await policy.complete("1=")
        branch = policy.branch()
        await branch.complete("<")
        with pytest.raises(ContextFull):
            await branch.complete("<" * 20)

    asyncio.run(episode())
    assert [each.truncated for each in trajectories(policy)] == [False, True]


def seeds_of(order: str) -> dict[str, int]:
    """Seeds by prompt, where branches a and b of one session are sampled in the given order."""
    engine = says("5$")
    policy = session(engine)

    async def episode() -> None:
        await policy.complete("1=")
        branches = {"a": policy.branch(), "b": policy.branch()}
        for name in order:
            await branches[name].complete(name)

    asyncio.run(episode())
    return {CharTokenizer().decode(prompt)[-1]: params.seed for prompt, params in engine.requests}


def test_branches_sample_with_seeds_of_their_own_that_do_not_depend_on_who_is_first() -> None:
    assert seeds_of("ab") == seeds_of("ba")
    assert len(set(seeds_of("ab").values())) == 3


def test_branches_of_the_same_place_made_one_after_the_other_differ_in_their_seeds() -> None:
    engine = says("5$")
    policy = session(engine)

    async def episode() -> None:
        for _ in range(4):
            await policy.branch().complete("1=")

    asyncio.run(episode())
    assert len({params.seed for _, params in engine.requests}) == 4


def test_token_ids_are_appended_as_they_are() -> None:
    engine = says("5$")
    tokenizer = CharTokenizer()
    policy = Session(Episode(engine, Codec(tokenizer), LIMITS, (0, 0, 0, 0)))  # type: ignore[arg-type]
    asyncio.run(policy.complete(ids("1=")))
    assert engine.requests[0][0] == ids("1=")
    assert tokenizer.encoded == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([0, 1_000], "token id 1000 is not one of"),
        ([-1], "token id -1 is not one"),
        ([1.5], "must be str or token ids"),
    ],
)
def test_token_ids_that_no_tokenizer_gave_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(session(says("5$")).complete(prompt))


def test_a_completion_has_the_log_probs_of_its_tokens() -> None:
    engine = ScriptedEngine(lambda *_: generation(ids("5$"), logprobs=[-0.25, -0.5]))
    assert asyncio.run(session(engine).complete("1=")).logprobs == (-0.25, -0.5)


# Rewards ------------------------------------------------------------------------------------------------------------


def test_rewards_of_turns_add_up_with_that_of_the_episode() -> None:
    policy = session(says("5$"))

    async def episode() -> None:
        await policy.complete("1=")
        policy.reward(0.25)
        policy.reward(0.5)
        await policy.complete("<")
        await policy.complete("<")
        policy.reward(-2.0)

    asyncio.run(episode())
    (found,) = trajectories(policy, reward=1.0)
    assert found.turn_rewards == [0.75, 0.0, -2.0]
    assert found.reward == 1.0 + 0.75 - 2.0


def test_without_rewards_of_turns_there_are_none() -> None:
    policy = session(says("5$"))
    asyncio.run(policy.complete("1="))
    assert trajectories(policy, reward=1.0)[0].turn_rewards == []


def test_turns_without_context_between_them_are_one_run_with_one_reward() -> None:
    policy = session(says("5", "6$"))

    async def episode() -> None:
        await policy.complete("1=")
        policy.reward(0.25)
        await policy.complete("")
        policy.reward(0.5)

    asyncio.run(episode())
    (found,) = trajectories(policy)
    assert marked(found) == "1=[5][6][$]"
    assert found.turn_rewards == [0.75]


def test_a_branch_is_worth_what_was_given_on_the_way_to_its_end() -> None:
    """The first turn got 1 before the branch; then 10 in the branch and 100 in the parent; the episode 1000."""
    policy = session(says("5$"))

    async def episode() -> None:
        await policy.complete("1=")
        policy.reward(1.0)
        branch = policy.branch()
        await branch.complete("<")
        branch.reward(10.0)
        await policy.complete(">")
        policy.reward(100.0)

    asyncio.run(episode())
    found = trajectories(policy, reward=1000.0)
    assert [each.reward for each in found] == [1101.0, 1011.0]
    assert [each.turn_rewards for each in found] == [[1.0, 100.0], [10.0]]


def test_a_finished_branch_has_its_own_reward_and_so_have_its_branches() -> None:
    policy = session(says("5$"))

    async def episode() -> None:
        await policy.complete("1=")
        branch = policy.branch()
        await branch.complete("<")
        inner = branch.branch()
        await inner.complete("?")
        branch.finish(Reward(4.0, {"depth": 1.0}))
        with pytest.raises(RuntimeError, match="this branch was finished"):
            await branch.complete("<")

    asyncio.run(episode())
    found = trajectories(policy, reward=1.0)
    assert [(each.reward, each.metrics) for each in found] == [(1.0, {}), (4.0, {"depth": 1.0}), (4.0, {"depth": 1.0})]


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_a_reward_of_a_turn_must_be_a_finite_number(value: float) -> None:
    policy = session(says("5$"))
    asyncio.run(policy.complete("1="))
    with pytest.raises(ValueError, match="expected a finite number"):
        policy.reward(value)


def test_there_is_no_turn_to_reward_before_one_was_sampled() -> None:
    policy = session(says("5$"))
    with pytest.raises(ValueError, match="no turn was sampled yet in this branch"):
        policy.reward(1.0)
    asyncio.run(policy.complete("1="))
    with pytest.raises(ValueError, match="no turn was sampled yet in this branch"):
        policy.branch().reward(1.0)


def test_a_reward_that_cannot_be_used_does_not_finish_a_branch() -> None:
    policy = session(says("5$"))
    with pytest.raises(ValueError, match=r"policy\.finish: the reward must be a finite number"):
        policy.finish(math.nan)
    assert asyncio.run(policy.complete("1=")).text == "5"


def test_after_the_episode_no_turn_is_rewarded() -> None:
    policy = session(says("5$"))
    asyncio.run(policy.complete("1="))
    policy.episode.close()
    with pytest.raises(RuntimeError, match="the episode has ended"):
        policy.reward(1.0)


# Groups -------------------------------------------------------------------------------------------------------------


def test_a_group_counts_episodes_and_holds_all_of_their_trajectories() -> None:
    config = settings("branching_episodes:best_of_two")
    config.group.min_size = 2
    result = play(config, says("1$", "2$", "3$", "4$", "5$", "6$"))
    assert result.group is not None and result.failures == []
    assert [each.episode for each in result.group.trajectories] == [0, 0, 0, 1, 1, 1]
    assert sorted(result.group.rewards.tolist()) == [0.0, 0.0, 3.0, 4.0, 5.0, 6.0]


def test_branches_that_only_ran_out_of_context_end_the_episode_as_truncated() -> None:
    config = settings("branching_episodes:fills_a_branch")
    config.model.max_length = 64
    result = play(config, says("1$"))
    assert result.group is not None and result.failures == []
    assert [(each.reward, each.turns) for each in result.group.trajectories] == [(0.0, 1)] * 2


def test_an_episode_that_leaves_a_branch_running_fails() -> None:
    async def main() -> str:
        class Holds(ScriptedEngine):
            async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
                if len(prompt_ids) > 2:
                    await asyncio.Event().wait()  # until it is cancelled
                return await super().generate(prompt_ids, params)

        engine = Holds(lambda *_: generation(ids("1$")))
        result = await runner(settings("branching_episodes:leaves_a_branch"), engine).run_group(lease(2))
        return result.failures[0].reason

    assert "still running" in asyncio.run(main())

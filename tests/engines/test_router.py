"""Routing over several engines, simulated: engines with caches of beginnings, groups, episodes of many turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from streamrl.engines.router import BLOCK, OVERLOAD, SLACK, Router

SLOTS = 64


@dataclass
class Engine:
    """Computes every token of a prompt that no earlier prompt of its began with."""

    had: set[tuple[int, ...]] = field(default_factory=set)
    computed: int = 0
    running: int = 0

    def take(self, prompt: list[int], said: list[int]) -> None:
        reused = 0
        while reused < len(prompt) and tuple(prompt[: reused + 1]) in self.had:
            reused += 1
        self.computed += len(prompt) - reused
        tokens = [*prompt, *said]
        self.had |= {tuple(tokens[: length + 1]) for length in range(len(tokens))}


def router_of(*names: str, requests: int = 0) -> Router:
    router = Router()
    for name in names:
        router.report(name, slots=SLOTS, serving=True, paused=False, requests=requests)
    return router


def prompt(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def load(router: Router, name: str, count: int) -> None:
    for index in range(count):
        router.began(name, [10_000 + index])


def test_a_group_stays_together_and_groups_spread():
    router = router_of("a", "b", "c")
    chosen = []
    for group in range(3):
        members = [router.choose(prompt(group)) for _ in range(1)]
        for _ in range(7):
            router.began(members[-1], prompt(group))
            members.append(router.choose(prompt(group)))
        router.began(members[-1], prompt(group))
        assert len(set(members)) == 1
        chosen.append(members[0])
    assert sorted(chosen) == ["a", "b", "c"]


def test_the_turns_of_an_episode_go_where_the_turns_before_were_computed():
    router = router_of("a", "b")
    history = prompt(0, length=37)
    first = router.choose(history)
    assert first is not None
    other = "b" if first == "a" else "a"
    for turn in range(1, 5):
        router.began(first, history)
        history += prompt(100 + turn, length=21)  # sampled
        router.had(first, history)
        router.ended(first)
        load(router, first, 2)  # the other one is idle, this one is not
        history += prompt(200 + turn, length=5)  # context
        assert router.choose(history) == first
    assert router.own(other) == 0


def test_a_short_common_beginning_draws_nothing():
    router = router_of("a", "b")
    common = prompt(0, length=2 * BLOCK)
    router.began("a", common + prompt(1, length=3 * BLOCK))
    assert router.choose(common + prompt(2, length=3 * BLOCK)) == "b"
    assert router.choose(common + prompt(2, length=2 * BLOCK - 1)) == "a"


def test_an_engine_with_the_beginning_is_passed_over_from_the_stated_load_on():
    router = router_of("a", "b")
    router.began("a", prompt(0))
    load(router, "b", 16)
    limit = int((OVERLOAD * 16 / SLOTS + SLACK) * SLOTS)  # 32 requests
    load(router, "a", limit - 1)
    assert router.choose(prompt(0)) == "a"
    load(router, "a", 1)
    assert router.choose(prompt(0)) == "b"


def test_load_counts_the_requests_of_others_too():
    router = router_of("a", "b")
    router.report("a", slots=SLOTS, serving=True, paused=False, requests=10)
    load(router, "b", 9)
    assert router.choose(prompt(0)) == "b"
    load(router, "b", 2)
    assert router.choose(prompt(0)) == "a"


def test_load_is_measured_in_slots():
    router = Router()
    router.report("small", slots=8, serving=True, paused=False, requests=4)
    router.report("large", slots=64, serving=True, paused=False, requests=20)
    assert router.choose(prompt(0)) == "large"


@pytest.mark.parametrize("how", ["dead", "draining"])
def test_an_engine_that_does_not_serve_gets_nothing_not_even_what_it_has_the_beginning_of(how: str):
    router = router_of("a", "b")
    router.began("a", prompt(0))
    if how == "dead":
        router.lost("a")
    else:
        router.report("a", slots=SLOTS, serving=False, paused=False, requests=1)
    load(router, "b", 3 * SLOTS)
    assert {router.choose(prompt(seed)) for seed in range(5)} == {"b"}
    router.lost("b")
    assert router.choose(prompt(0)) is None


def test_an_engine_that_came_back_has_no_beginnings_any_more():
    router = router_of("a", "b")
    router.began("a", prompt(0))
    router.ended("a")
    router.lost("a")
    router.report("a", slots=SLOTS, serving=True, paused=False, requests=0)
    load(router, "a", 1)
    assert router.choose(prompt(0)) == "b"


def test_a_paused_engine_keeps_what_it_has_the_beginning_of_and_gets_nothing_new():
    router = router_of("a", "b")
    router.began("a", prompt(0))
    router.report("a", slots=SLOTS, serving=True, paused=True, requests=1)
    load(router, "b", 4)
    assert router.choose(prompt(0)) == "a"
    assert router.choose(prompt(1)) == "b"


def test_where_all_are_paused_requests_queue_at_the_least_loaded():
    router = router_of("a", "b")
    load(router, "a", 2)
    for name in ("a", "b"):
        router.report(name, slots=SLOTS, serving=True, paused=True, requests=0)
    assert router.choose(prompt(0)) == "b"


def test_agents_over_four_engines_compute_each_token_once_and_load_stays_even():
    """64 groups of 8 episodes of 4 turns, all at once, turn by turn, on engines with 64 slots."""
    names = [f"engine-{i}" for i in range(4)]
    router, engines, rng = router_of(*names), {name: Engine() for name in names}, np.random.default_rng(0)
    episodes = [prompt(group, length=48) for group in range(32) for _ in range(8)]
    worst = 0.0
    for _ in range(4):
        placed = []
        for history in rng.permutation(len(episodes)):
            name = router.choose(episodes[history])
            assert name is not None
            router.began(name, episodes[history])
            placed.append((name, int(history)))
            loads = sorted(router.own(each) for each in names)
            worst = max(worst, loads[-1] - OVERLOAD * loads[0])
        for name, index in placed:
            said = rng.integers(0, 1000, 16).tolist()
            engines[name].take(episodes[index], said)
            router.had(name, episodes[index] + said)
            router.ended(name)
            episodes[index] += said + rng.integers(0, 1000, 8).tolist()
    assert worst <= SLACK * SLOTS + 1
    least = 32 * 48 + 3 * 256 * 8  # each prompt once, then of each turn what the environment said
    assert sum(engine.computed for engine in engines.values()) < 1.25 * least

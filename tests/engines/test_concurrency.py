"""How many groups are under way, against a simulated engine with a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.engines.concurrency import Concurrency
from streamrl.ports import EngineStatistics


@dataclass
class Cache:
    """A KV cache that holds ``holds`` groups; every group over that preempts one."""

    holds: int
    under_way: int = 0
    preemptions: int = 0
    version: int = -1

    def begin(self) -> None:
        self.under_way += 1
        self.preemptions += self.under_way > self.holds

    def statistics(self) -> EngineStatistics:
        used = min(1.0, self.under_way / self.holds)
        return EngineStatistics(self.under_way, 0, 0, 0, 0.0, self.version, kv_used=used, preemptions=self.preemptions)


def play(groups: int, concurrency: Concurrency, cache: Cache) -> list[int]:
    """Limits after each of so many groups; as many are under way as may be."""
    limits = []
    for _ in range(groups):
        while cache.under_way < concurrency.limit:
            cache.begin()
        cache.under_way -= 1
        concurrency.group_ended(cache.under_way)
        limits.append(concurrency.limit)
    return limits


def test_an_engine_whose_cache_holds_every_slot_is_never_held_back():
    cache = Cache(holds=100)
    assert set(play(200, Concurrency(20, cache.statistics), cache)) == {20}


def test_with_a_small_cache_the_limit_comes_down_to_what_it_holds_and_preemptions_become_rare():
    cache = Cache(holds=12)
    concurrency = Concurrency(80, cache.statistics)
    play(500, concurrency, cache)
    before = cache.preemptions
    limits = play(2000, concurrency, cache)
    assert min(limits) >= 6
    assert max(limits) <= 13
    assert cache.preemptions - before < 2000 / 25
    assert sum(limits) / len(limits) > 0.7 * 12


def test_one_congestion_shrinks_the_limit_once():
    cache = Cache(holds=10)
    concurrency = Concurrency(20, cache.statistics)
    limits = play(20, concurrency, cache)
    assert limits[0] == 14  # 20 × 0.7, whatever else the ten preempted requests report
    assert set(limits) == {14}


def test_the_limit_grows_again_when_there_is_room():
    cache = Cache(holds=5)
    concurrency = Concurrency(16, cache.statistics)
    play(300, concurrency, cache)
    assert concurrency.limit <= 6
    cache.holds = 1000
    assert play(300, concurrency, cache)[-1] == 16


def test_it_never_falls_below_one_group():
    cache = Cache(holds=1)
    concurrency = Concurrency(2, cache.statistics)
    cache.preemptions = 1
    for _ in range(50):
        cache.preemptions += 1
        concurrency.group_ended(0)
    assert concurrency.limit == 1


def test_an_engine_that_was_replaced_counts_from_zero_and_that_is_no_preemption():
    cache = Cache(holds=100, preemptions=7)
    concurrency = Concurrency(10, cache.statistics)
    concurrency.group_ended(9)
    for _ in range(9):
        concurrency.group_ended(9)
    limit, cache.preemptions = concurrency.limit, 0
    concurrency.group_ended(9)
    assert concurrency.limit >= limit


def test_preemptions_shrink_what_is_under_way_and_not_a_limit_that_was_never_reached():
    cache = Cache(holds=100, preemptions=1)
    concurrency = Concurrency(1000, cache.statistics)
    concurrency.group_ended(9)
    assert concurrency.limit == 7


def test_a_preemption_counts_though_every_group_ends_under_another_version():
    cache = Cache(holds=100)
    concurrency = Concurrency(10, cache.statistics)
    concurrency.group_ended(9)
    cache.version, cache.preemptions = 0, 1
    concurrency.group_ended(9)
    assert concurrency.limit == 7


def test_what_an_engine_computes_anew_for_an_update_is_no_preemption():
    cache = Cache(holds=100)
    concurrency = Concurrency(10, cache.statistics, recomputes=True)
    for version in range(5):
        cache.version = version
        cache.preemptions += 40
        concurrency.group_ended(9)
        concurrency.group_ended(9)
    assert concurrency.limit == 10

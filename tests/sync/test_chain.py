"""Who reads from whom, and who is told what: the chain of hosts as a pure state machine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from streamrl.sync.transports.chain import AHEAD, Chain, Orders, Progress, Source

BUCKETS = 10
PATIENCE_S = 8.0


class Play:
    """A chain, and a clock that the test sets."""

    def __init__(self, *hosts: str, offered: int = BUCKETS) -> None:
        self.chain = Chain("s", 7, BUCKETS, PATIENCE_S)
        self.now = 100.0
        self.chain.offered(offered, self.now)
        for host in hosts:
            self.ask(host)

    def ask(self, host: str) -> dict[str, Any]:
        return self.say(host, Progress("s", 7, 0, f"at {host}".encode()))

    def has(self, host: str, count: int) -> dict[str, Any]:
        return self.say(host, Progress("s", 7, count))

    def fails(self, host: str) -> dict[str, Any]:
        return self.say(host, Progress("s", 7, 0, failed=True))

    def alone(self, host: str) -> dict[str, Any]:
        return self.say(host, Progress("s", 7, 0, alone=True))

    def left(self, host: str) -> dict[str, Any]:
        return told(self.chain.left(host, self.now))

    def say(self, host: str, word: Progress) -> dict[str, Any]:
        return told(self.chain.progress(host, host.encode(), word, self.now))

    def expire(self, seconds: float) -> tuple[list[str], dict[str, Any]]:
        self.now += seconds
        still, orders = self.chain.expire(self.now)
        return still, told(orders)


def told(orders: Orders) -> dict[str, Any]:
    """By host: (buckets that are there, whose they are)."""
    said = {identity.decode(): source for identity, source in orders}
    assert len(said) == len(orders), "nobody is told two things at once"
    assert all((source.session, source.version) == ("s", 7) for source in said.values())
    return {host: (source.count, source.address.decode() or "trainer") for host, source in said.items()}


TRAINER = (BUCKETS, "trainer")


def test_the_first_that_asks_reads_from_the_trainer_and_each_other_from_the_one_before() -> None:
    play = Play()
    assert play.ask("a") == {"a": TRAINER}
    assert play.ask("b") == {}, "a has nothing yet"
    assert play.ask("c") == {}
    assert play.has("a", 1) == {"b": (1, "at a")}
    assert play.has("b", 1) == {"c": (1, "at b")}
    assert play.has("a", 2) == {"b": (2, "at a")}
    assert play.has("c", 1) == {}


def test_one_that_asks_late_is_told_at_once_what_is_there() -> None:
    play = Play("a")
    play.has("a", 6)
    assert play.ask("b") == {"b": (6, "at a")}


def test_a_reader_that_falls_behind_is_told_of_a_bounded_number_of_steps() -> None:
    play = Play("a", "b")
    messages = [play.has("a", count) for count in range(1, BUCKETS + 1)]
    assert messages == [{"b": (count, "at a")} for count in range(1, AHEAD + 1)] + [{}] * (BUCKETS - AHEAD)
    assert play.has("b", 1) == {"b": (BUCKETS, "at a")}, "all that came meanwhile, in one word"


@pytest.mark.parametrize("ends", ["fails", "left"])
def test_behind_one_that_ends_the_next_reads_from_the_trainer_and_the_others_read_on(ends: str) -> None:
    play = Play("a", "b", "c", "d")
    assert getattr(play, ends)("b") == {"c": TRAINER}
    assert play.has("c", 1) == {"d": (1, "at c")}
    assert play.has("a", 1) == {}


def test_the_end_of_the_chain_is_whoever_asked_last_of_those_that_pass_on() -> None:
    play = Play("a", "b")
    play.has("a", 1)
    play.left("b")
    assert play.ask("c") == {"c": (1, "at a")}, "a has nobody behind it any more"
    play.fails("c")
    assert play.ask("d") == {"d": (1, "at a")}, "nor now"
    play.has("d", 1)
    assert play.ask("e") == {"e": (1, "at d")}
    play.expire(PATIENCE_S)
    assert play.ask("f") == {"f": TRAINER}, "e stands still"


def test_one_that_reads_the_rest_from_the_trainer_is_told_nothing_and_passes_on() -> None:
    play = Play("a", "b", "c")
    play.has("a", 1)
    assert play.alone("b") == {}
    assert play.has("a", 2) == {}
    assert play.has("b", 3) == {"c": (3, "at b")}
    assert play.expire(PATIENCE_S - 1) == ([], {})
    play.has("c", 3)
    assert play.expire(1) == (["a", "b"], {"c": TRAINER}), "b could read, though a has less than it"


def test_a_new_process_of_a_member_takes_a_place_of_its_own() -> None:
    play = Play("a", "b")
    again = Progress("s", 7, 0, b"at b again")
    assert told(play.chain.progress("a", b"a again", again, play.now)) == {"b": TRAINER}
    assert play.has("a", 3) == {}, "the process before counts no more"


def test_a_word_of_one_without_a_place_is_passed_over() -> None:
    play = Play("a")
    assert play.has("b", 4) == {}
    assert play.fails("b") == {}
    assert play.left("b") == {}
    assert play.ask("c") == {}, "a is the end of the chain still, and has nothing"


def test_only_one_that_could_read_and_does_not_stands_still() -> None:
    play = Play("a", "b", "c", offered=0)
    assert play.chain.due == math.inf, "the trainer has nothing yet"
    play.chain.offered(1, play.now)
    assert play.chain.due == play.now + PATIENCE_S
    play.now += 5
    play.has("a", 1)
    assert play.chain.due == play.now + PATIENCE_S, "a has all that there is, b could read"
    assert play.expire(PATIENCE_S - 0.1) == ([], {})
    assert play.expire(0.1) == (["b"], {"c": TRAINER})
    assert play.chain.due == play.now + PATIENCE_S, "c can read now"


def test_patience_begins_anew_with_each_bucket() -> None:
    play = Play("a", "b")
    for count in range(1, 5):
        play.now += PATIENCE_S - 1
        play.has("a", count)
        assert play.has("b", count) == {}
        assert play.expire(0) == ([], {})
    play.has("a", BUCKETS)
    assert play.expire(PATIENCE_S) == (["b"], {}), "a has all, and waits for nobody"


def test_one_that_stood_still_keeps_its_place_and_is_not_named_again() -> None:
    play = Play("a", "b", "c")
    play.has("a", 1)
    assert play.expire(PATIENCE_S) == (["a", "b"], {"b": TRAINER, "c": TRAINER})
    assert play.has("a", 2) == {}
    assert play.has("b", 1) == {}
    assert play.expire(PATIENCE_S) == (["c"], {})


def test_a_count_beyond_the_last_bucket_counts_as_all() -> None:
    play = Play("a", "b")
    assert play.has("a", 10**6) == {"b": (BUCKETS, "at a")}


def test_every_host_gets_every_bucket_whatever_happens_in_between() -> None:
    """The readers of a chain of 40, of whom every seventh ends half-way."""
    hosts = [f"h{index}" for index in range(40)]
    play = Play(*hosts)
    gone = set(hosts[3::7])
    knows = {host: Source("", 0, 0, b"") for host in hosts}
    knows["h0"] = Source("s", 7, BUCKETS, b"")
    have = dict.fromkeys(hosts, 0)
    reads_from_trainer = 0
    moved = True
    while moved:
        moved = False
        for host in hosts:
            if host not in have or have[host] >= knows[host].count:
                continue
            moved = True
            reads_from_trainer += not knows[host].address
            have[host] += 1
            if host in gone and have[host] == BUCKETS // 2:
                del have[host]
                orders = play.chain.left(host, play.now)
            else:
                orders = play.chain.progress(host, host.encode(), Progress("s", 7, have[host]), play.now)
            knows |= {identity.decode(): source for identity, source in orders}
    assert have == {host: BUCKETS for host in hosts if host not in gone}
    assert reads_from_trainer <= BUCKETS * (1 + len(gone))

"""Which of several engines takes a request: the one that has its beginning, unless that one is overloaded (pure).

An engine that has computed a prompt need not compute it again: the requests of a group share their prompt, and a turn
of an episode begins with the turns before it. So the router remembers, by hashes of their beginnings, which engine had
which tokens, and sends what goes on from there to the same one. A request that shares less than half of its tokens with
what any engine had goes to the least loaded. Versions do not matter: spans say which weights sampled what.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

OVERLOAD = 1.5
"""An engine is overloaded for what it has the beginning of when its load is more than so many times that of the least
loaded engine …"""
SLACK = 0.125
"""… and this share of its slots: a group may stay together on an engine while another one is idle."""
SHARED = 0.5
"""Share of a prompt's tokens that an engine must have had before."""
BLOCK = 16
"""Tokens between two beginnings that are remembered; the whole is remembered beside them."""
REMEMBERED = 1 << 16
"""Beginnings, over all engines; those that were not met for the longest time are forgotten."""


@dataclass
class _Engine:
    slots: int
    serving: bool = False
    paused: bool = False
    own: int = 0
    """Requests that were sent from here and are not answered."""
    others: int = 0
    """Requests of others, at its last report."""

    @property
    def load(self) -> float:
        """Requests per slot."""
        return (self.own + self.others) / self.slots


class Router:
    """Engines by name. Draining and dead ones are not serving; paused ones keep what they have and get nothing new
    while another one runs."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._had: OrderedDict[int, str] = OrderedDict()

    def report(self, name: str, *, slots: int, serving: bool, paused: bool, requests: int) -> None:
        """What an engine says of itself; ``requests``: how many it holds, from here or not."""
        engine = self._engines.setdefault(name, _Engine(slots))
        engine.slots, engine.serving, engine.paused = max(1, slots), serving, paused
        engine.others = max(0, requests - engine.own)

    def lost(self, name: str) -> None:
        """It is gone, and what it had is too; it may come back by a report."""
        if name in self._engines:
            self._engines[name].serving = False
            self._engines[name].others = 0
        self._had = OrderedDict((digest, holder) for digest, holder in self._had.items() if holder != name)

    def choose(self, prompt_ids: Sequence[int]) -> str | None:
        """The engine for this prompt; None while none serves."""
        serving = {name: engine for name, engine in self._engines.items() if engine.serving}
        if not serving:
            return None
        running = {name: engine for name, engine in serving.items() if not engine.paused} or serving
        least = min(running, key=lambda name: running[name].load)
        holder = self._holder(prompt_ids, serving)
        if holder is None or serving[holder].load > OVERLOAD * running[least].load + SLACK:
            return least
        return holder

    def began(self, name: str, token_ids: Sequence[int]) -> None:
        """A request was sent there."""
        self._engines[name].own += 1
        self.had(name, token_ids)

    def ended(self, name: str) -> None:
        """It was answered, cancelled or lost."""
        self._engines[name].own -= 1

    def had(self, name: str, token_ids: Sequence[int]) -> None:
        """The engine computed these tokens."""
        for digest, _ in _beginnings(token_ids):
            self._had[digest] = name
            self._had.move_to_end(digest)
        while len(self._had) > REMEMBERED:
            self._had.popitem(last=False)

    def own(self, name: str) -> int:
        """Requests that were sent there from here and are not answered."""
        return self._engines[name].own if name in self._engines else 0

    def _holder(self, prompt_ids: Sequence[int], serving: Iterable[str]) -> str | None:
        """Who had the most of this prompt, and enough of it."""
        for digest, length in reversed(list(_beginnings(prompt_ids))):
            if length < SHARED * len(prompt_ids):
                return None
            if (name := self._had.get(digest)) is not None and name in serving:
                return name
        return None


def _beginnings(token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(hash, length) of the beginnings of ``token_ids``, the shortest first, the whole last."""
    tokens = np.asarray(token_ids, dtype=np.int32)
    hashed = xxhash.xxh3_64()
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        hashed.update(block.tobytes())
        yield hashed.intdigest(), start + len(block)

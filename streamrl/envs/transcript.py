"""The tokens of one trajectory as they grow: context that was given, and turns that the policy sampled.

Sampled tokens stay as they were sampled; nothing is ever decoded and encoded again. A *fork* begins with the tokens of
another transcript as context, so every sampled token is trained in one trajectory only: in the one that sampled it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from streamrl.envs.environment import Reward
from streamrl.types import Generation, Trajectory, VersionSpans, append_version, expand_versions


@dataclass
class Turn:
    """One sampled turn of a transcript."""

    start: int
    """Position of its first sampled token."""
    generation: Generation
    reward: float = 0.0
    """Given to this turn, beside the reward of the episode."""

    @property
    def end(self) -> int:
        return self.start + len(self.generation.token_ids)


@dataclass
class Transcript:
    """What one trajectory consists of so far."""

    tokens: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    key: int = 0
    """Tells the transcripts of one episode apart, for the seeds of their turns: 0, and for a fork a hash of where it
    comes from. It does not depend on the order in which branches run."""
    overflowed: bool = False
    """A turn was refused because the context was full."""
    busy: bool = False
    """A turn is being sampled."""
    forks: int = 0
    """How many were made of it."""

    def append(self, context: Sequence[int], generation: Generation) -> Turn:
        """Add ``context`` and what was sampled after it; an engine samples at least one token."""
        assert len(generation.token_ids) == len(generation.logprobs) == sum(n for _, n in generation.versions)
        assert len(generation.token_ids), "an engine samples at least one token"
        self.tokens.extend(context)
        turn = Turn(len(self.tokens), generation)
        self.tokens.extend(generation.token_ids.tolist())
        self.turns.append(turn)
        return turn

    def fork(self, end: int | None = None) -> Transcript:
        """A transcript that begins with the tokens before ``end`` (None: all of them), as context."""
        self.forks += 1
        key = xxhash.xxh3_64_intdigest(struct.pack("<3Q", self.key, len(self.turns), self.forks))
        return Transcript(self.tokens[:end], key=key)

    def realign(self, start: int, context: Sequence[int]) -> None:
        """Tokens from ``start`` on, the tail of the last turn, were not what the agent went on with: ``context`` was.

        What the turn sampled from there on is dropped, with its loss. ``start`` must lie inside the last turn or at its
        end; a turn that loses all of its tokens is gone.
        """
        last = self.turns[-1]
        assert last.start <= start <= len(self.tokens) == last.end
        kept = start - last.start
        del self.tokens[start:]
        if kept:
            last.generation = _head(last.generation, kept)
        else:
            self.turns.pop()
        self.tokens.extend(context)

    def _run_rewards(self) -> list[float]:
        """Per run of sampled tokens: a turn that begins where another ends goes on with it."""
        rewards: list[float] = []
        end = -1
        for turn in self.turns:
            if turn.start == end:
                rewards[-1] += turn.reward
            else:
                rewards.append(turn.reward)
            end = turn.end
        return rewards

    def trajectory(self, reward: Reward, total: float, episode: int) -> Trajectory:
        """As arrays ``[T]``, up to the last sampled token; needs at least one.

        ``total`` is what it is worth, the rewards of turns included; what else travels comes from ``reward``.
        """
        length = self.turns[-1].end
        sampled = np.zeros(length, dtype=np.bool_)
        behaviour = np.zeros(length, dtype=np.float32)
        versions: VersionSpans = []
        for turn in self.turns:
            sampled[turn.start : turn.end] = True
            behaviour[turn.start : turn.end] = turn.generation.logprobs
            for version, count in turn.generation.versions:
                append_version(versions, version, count)
        turn_rewards = self._run_rewards()
        return Trajectory(
            tokens=np.array(self.tokens[:length], dtype=np.int32),
            sampled=sampled,
            behaviour=behaviour,
            versions=versions,
            reward=total,
            turns=len(self.turns),
            truncated=self.overflowed or self.turns[-1].generation.finish_reason == "length",
            metrics=dict(reward.metrics),
            columns=dict(reward.columns),
            metadata=dict(reward.metadata),
            episode=episode,
            turn_rewards=turn_rewards if any(turn_rewards) else [],
        )


def _head(generation: Generation, count: int) -> Generation:
    """The first ``count`` tokens of ``generation``."""
    versions: VersionSpans = []
    for version in expand_versions(generation.versions)[:count].tolist():
        append_version(versions, version)
    return Generation(generation.token_ids[:count], generation.logprobs[:count], versions, generation.finish_reason)

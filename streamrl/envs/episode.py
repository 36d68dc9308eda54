"""What the branches of one episode share, and how each of their turns is sampled and recorded.

::

    Episode ── Branch (the episode itself) ── Transcript, and one more for every rewritten history
            └─ Branch (policy.branch())    ── Transcript, begins with the tokens of its parent
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.transcript import Transcript, Turn
from streamrl.errors import StreamRLError
from streamrl.ports import Sampler
from streamrl.types import SamplingParams, Trajectory

_64_BITS = 0xFFFFFFFFFFFFFFFF


class ContextFull(StreamRLError):
    """A turn has no room for a single token within ``model.max_length``; the transcript stays as it was."""


def is_context_full(error: BaseException) -> bool:
    """Also where branches that ran at the same time raised nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_context_full, error.exceptions))
    return isinstance(error, ContextFull)


class Host(Protocol):
    """Serves sessions to clients that speak HTTP."""

    def open(self, session: Any) -> tuple[str, str]:
        """Base URL and key under which ``session`` can be reached from now on."""
        ...

    def close(self, key: str) -> None:
        """Its episode has ended."""
        ...


@dataclass(frozen=True)
class Limits:
    """How the turns of an episode sample."""

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    """Sampled tokens of one turn at most."""
    max_length: int
    """Tokens of a whole trajectory at most."""
    min_p: float = 0.0


def turn_seed(run_seed: int, prompt: int, attempt: int, member: int, turn: int, transcript: int = 0) -> int:
    """Sampling seed of one turn, 63 bits: the same on every machine, different for every argument.

    ``transcript`` is ``Transcript.key``; 0 is the one that the episode began with.
    """
    values = (run_seed, prompt, attempt, member, turn, transcript)
    return _hash(values if transcript else values[:-1]) >> 1


def _hash(values: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(values)}Q", *(value & _64_BITS for value in values)))


class Episode:
    """One call of user code: the engine it samples from, its limits and seeds, its branches, and whether it ended."""

    def __init__(
        self,
        engine: Sampler,
        codec: Codec,
        limits: Limits,
        seed_key: tuple[int, int, int, int],
        host: Host | None = None,
    ) -> None:
        """``seed_key``: seed of the run, prompt, attempt, member of the group."""
        self.codec = codec
        self.limits = limits
        self.host = host
        self.branches: list[Branch] = []
        self.closed = False
        self.engine_error: BaseException | None = None
        """What the engine raised; it is not the environment's fault, whatever user code made of it."""
        self._full = ""
        """What was said of the last turn that had no room."""
        self.matched: Counter[str] = Counter()
        """Requests with a history of their own, by how it was matched (``chat.alignment.Kind``)."""
        self._engine = engine
        self._seed_key = seed_key
        self._keys: list[str] = []
        Branch(self, Transcript())

    async def sample(
        self,
        transcript: Transcript,
        context: Sequence[int],
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        keep: int | None = None,
    ) -> Turn:
        """Sample after ``context`` and append both to ``transcript``; one call per transcript at a time.

        ``keep``: where the end of the last turn did not stay as it was sampled, ``context`` follows after so many
        tokens (``Transcript.realign``).
        A call that raises or is cancelled leaves the transcript as it was. Raises ``ContextFull`` when there is no room
        for one sampled token, ``ValueError`` for arguments that cannot be used, ``RuntimeError`` for a call during
        another one or after the episode.
        """
        try:
            prompt_ids, params = self._plan(transcript, [*transcript.tokens[:keep], *context], max_tokens, stop)
        except Exception:  # any: user code that catches it and tries again must not hold the event loop
            await asyncio.sleep(0)
            raise
        transcript.busy = True
        try:
            generation = await self._engine.generate(prompt_ids, params)
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                self.engine_error = error  # nobody cancelled the caller: the engine was closed
            raise
        except Exception as error:
            self.engine_error = error
            raise
        finally:
            transcript.busy = False
        if self.closed:
            raise RuntimeError("policy: the episode ended during this call; await every call before it returns")
        if keep is not None:
            transcript.realign(keep, ())
        return transcript.append(context, generation)

    def ended_full(self, error: BaseException) -> bool:
        """Whether ``error`` ended the episode for want of room: ours, or what a client of the endpoint made of it."""
        return is_context_full(error) or bool(self._full and self._full in str(error))

    def serve(self, session: Any) -> tuple[str, str]:
        """Base URL and key of ``session`` for clients that speak HTTP, until the episode ends."""
        if self.host is None:
            raise RuntimeError("policy.base_url: this process serves no endpoint; sample by policy.complete or chat")
        if self.closed:
            raise RuntimeError("policy.base_url: the episode has ended")
        url, key = self.host.open(session)
        self._keys.append(key)
        return url, key

    def close(self) -> bool:
        """End the episode: later calls are refused. False where a call was still under way."""
        self.closed = True
        while self.host is not None and self._keys:
            self.host.close(self._keys.pop())
        return not any(each.busy for branch in self.branches for each in branch.transcripts)

    def trajectories(self, reward: Reward, member: int) -> list[Trajectory]:
        """One per transcript with a sampled turn, branch by branch; ``reward`` is what the episode returned."""
        trajectories = [each for branch in self.branches for each in branch.trajectories(reward, member)]
        if self.matched:
            counted = {f"history_{kind}": float(self.matched[kind]) for kind in ("fork", "realign")}
            for each in trajectories:
                each.metrics = counted | each.metrics
        return trajectories

    @property
    def sampled(self) -> bool:
        """Whether there is a sampled turn."""
        return any(each.turns for branch in self.branches for each in branch.transcripts)

    def texts(self) -> tuple[str, str]:
        """What the first transcript with a sampled turn begins with, and all that followed; without special tokens."""
        for branch in self.branches:
            for each in branch.transcripts:
                if each.turns:
                    start, tokens = each.turns[0].start, each.tokens
                    return self.codec.decode(tuple(tokens[:start])), self.codec.decode(tuple(tokens[start:]))
        return "", ""

    def _plan(
        self, transcript: Transcript, prompt_ids: list[int], max_tokens: int | None, stop: str | Iterable[str] | None
    ) -> tuple[list[int], SamplingParams]:
        if self.closed:
            raise RuntimeError("policy: the episode has ended; await every call before it returns")
        if transcript.busy:
            raise RuntimeError(
                "policy: another call is under way; a transcript grows one turn at a time, and policy.branch() "
                "makes a further one"
            )
        limits = self.limits
        if max_tokens is None:
            max_tokens = limits.max_tokens
        elif not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"policy: max_tokens={max_tokens!r} must be a whole number of at least 1")
        if not prompt_ids:
            raise ValueError("policy: the transcript is empty; begin with a text")
        room = limits.max_length - len(prompt_ids)
        if room < 1:
            transcript.overflowed = True
            self._full = f"{len(prompt_ids)} tokens leave no room to sample in model.max_length={limits.max_length}"
            raise ContextFull(self._full)
        stop_tokens, stop_strings = self.codec.stops(stop)
        params = SamplingParams(
            temperature=limits.temperature,
            top_k=limits.top_k,
            top_p=limits.top_p,
            min_p=limits.min_p,
            max_tokens=min(max_tokens, limits.max_tokens, room),
            stop_token_ids=stop_tokens,
            stop_strings=stop_strings,
            seed=turn_seed(*self._seed_key, len(transcript.turns), transcript.key),
        )
        return prompt_ids, params


class Branch:
    """One line of an episode: the transcripts that a session grows, and what it is worth.

    It has more than one transcript where the agent rewrote its history (``fork``).
    """

    def __init__(self, episode: Episode, transcript: Transcript, parent: Branch | None = None) -> None:
        self.episode = episode
        self.transcripts = [transcript]
        self.current = transcript
        """The one that was sampled last; what comes next without a history of its own goes on here."""
        self.own_reward: Reward | None = None
        """Instead of the reward of the episode, for this branch and those that were made from it."""
        self._parent = parent
        self._last: Turn | None = None
        self._turn_rewards: float = parent._turn_rewards if parent else 0.0
        """Sum over the turns of this line, those before the branch included."""
        episode.branches.append(self)

    def branch(self) -> Branch:
        """A branch whose transcript begins with all tokens of the current one."""
        return Branch(self.episode, self.current.fork(), self)

    def fork(self, transcript: Transcript, end: int | None = None) -> Transcript:
        """A further transcript of this line, which begins with the tokens of ``transcript`` before ``end``."""
        fork = transcript.fork(end)
        self.transcripts.append(fork)
        return fork

    async def sample(
        self,
        transcript: Transcript,
        context: Sequence[int],
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        keep: int | None = None,
    ) -> Turn:
        """Sample on one of this line's transcripts (``Episode.sample``)."""
        try:
            if self.own_reward is not None:
                raise RuntimeError("policy: this branch was finished; sample before policy.finish")
            turn = await self.episode.sample(transcript, context, max_tokens, stop, keep)
        finally:
            if not transcript.turns and transcript is not self.transcripts[0]:  # an agent may try again for ever
                self.transcripts = [each for each in self.transcripts if each is not transcript]
        self.current, self._last = transcript, turn
        return turn

    def reward(self, value: float) -> None:
        """Add to the reward of the turn that was sampled last."""
        if self.episode.closed:
            raise RuntimeError("policy.reward: the episode has ended")
        if self._last is None:
            raise ValueError("policy.reward: no turn was sampled yet in this branch, so there is none to reward")
        self._last.reward += value
        self._turn_rewards += value

    def trajectories(self, reward: Reward, member: int) -> list[Trajectory]:
        """One per transcript with a sampled turn. Each is worth the whole line: the reward and those of its turns."""
        own = self._reward() or reward
        total = own.value + self._turn_rewards
        return [each.trajectory(own, total, member) for each in self.transcripts if each.turns]

    def _reward(self) -> Reward | None:
        if self.own_reward is not None or self._parent is None:
            return self.own_reward
        return self._parent._reward()

"""The ``policy`` of one trajectory: it samples for user code and records every token exactly.

Text that the environment gives is encoded once and appended; tokens that the policy sampled stay as sampled, the end
token included. Nothing is ever decoded and encoded again, so what the trainer sees is what the engine saw.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import xxhash

from streamrl.envs.environment import Completion, Reward
from streamrl.errors import StreamRLError
from streamrl.ports import Engine
from streamrl.types import Generation, SamplingParams, Trajectory, VersionSpans, append_version

_CACHED_PROMPTS = 256
"""Texts whose encoding is remembered: the trajectories of a group share their prompt, all share the hints."""

_CACHED_ANSWERS = 4_096
_SHORT = 16
"""Answers of at most so many tokens are remembered when decoded; longer ones hardly ever come twice."""


class ContextFull(StreamRLError):
    """A turn has no room for a single token within ``model.max_length``; the transcript stays as it was."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that environments use."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...


class Codec:
    """A tokenizer with a memory: the same text is encoded once, the same answer decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.end_tokens: tuple[int, ...] = () if end is None else (end,)
        self.encode = lru_cache(_CACHED_PROMPTS)(self._encode)
        self._decode_short = lru_cache(_CACHED_ANSWERS)(self._decode)
        self.stop_tokens = lru_cache(_CACHED_PROMPTS)(self._stop_tokens)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """The text of sampled tokens, without special tokens."""
        return self._decode_short(token_ids) if len(token_ids) <= _SHORT else self._decode(token_ids)

    def _encode(self, text: str) -> list[int]:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if text and not token_ids:
            raise ValueError(f"the tokenizer has no token for any part of {text!r:.80}")
        return token_ids

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _stop_tokens(self, stops: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*map(self._stop_token, stops), *self.end_tokens)))

    def _stop_token(self, text: str) -> int:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) != 1:
            raise ValueError(f"stop={text!r} must be exactly one token of the tokenizer, but is {len(token_ids)}")
        if self._tokenizer.decode(token_ids, skip_special_tokens=False) != text:
            raise ValueError(f"stop={text!r} is not a token of the tokenizer, which reads it as something else")
        return token_ids[0]


@dataclass(frozen=True)
class Limits:
    """How the turns of a session sample."""

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    """Sampled tokens of one turn at most."""
    max_length: int
    """Tokens of the whole trajectory at most."""


def turn_seed(run_seed: int, prompt: int, attempt: int, member: int, turn: int) -> int:
    """Sampling seed of one turn, 63 bits: the same on every machine, different for every argument."""
    key = struct.pack("<5Q", *(value & 0xFFFFFFFFFFFFFFFF for value in (run_seed, prompt, attempt, member, turn)))
    return xxhash.xxh3_64_intdigest(key) >> 1


class Phase(Enum):
    """Where a session stands: OPEN ⇄ SAMPLING, and CLOSED for good once its episode ended."""

    OPEN = "open"
    SAMPLING = "sampling"
    CLOSED = "closed"


class Session:
    """What user code calls ``policy``. One per trajectory; its calls run one after the other."""

    def __init__(self, engine: Engine, codec: Codec, limits: Limits, seed_key: tuple[int, int, int, int]) -> None:
        self._engine = engine
        self._codec = codec
        self._limits = limits
        self._seed_key = seed_key
        self._phase = Phase.OPEN
        self._tokens: list[int] = []
        self._turns: list[tuple[int, Generation]] = []  # (position of the first sampled token, what was sampled)
        self._texts: list[str] = []
        self._overflowed = False
        self.engine_error: BaseException | None = None
        """What the engine raised; it is not the environment's fault, whatever user code made of it."""

    async def complete(
        self, text: str, max_tokens: int | None = None, stop: str | Iterable[str] | None = None
    ) -> Completion:
        """Append ``text`` to the transcript and sample the next turn.

        ``max_tokens`` lowers ``sampling.max_tokens`` for this turn; ``model.max_length`` shortens both. ``stop`` are
        strings of exactly one token each that end the turn beside the tokenizer's end token; the token that ended it
        stays in the transcript. A call that raises or is cancelled leaves the transcript as it was.

        Raises ``ContextFull`` when there is no room for one sampled token, ``ValueError`` for arguments that cannot
        be used, ``RuntimeError`` for a call during another one or after the episode.
        """
        prompt_ids, params = self._plan(text, max_tokens, stop)
        self._phase = Phase.SAMPLING
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
            if self._phase is Phase.SAMPLING:
                self._phase = Phase.OPEN
        return self._record(text, prompt_ids, generation)

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def prompt_text(self) -> str:
        """The first text that was appended."""
        return self._texts[0] if self._texts else ""

    @property
    def answer_text(self) -> str:
        """All that followed the first text: sampled turns and, between them, what the environment said."""
        return "".join(self._texts[1:])

    def trajectory(self, reward: Reward) -> Trajectory:
        """The transcript as arrays ``[T]``; needs at least one sampled token."""
        length = len(self._tokens)
        sampled = np.zeros(length, dtype=np.bool_)
        behaviour = np.zeros(length, dtype=np.float32)
        versions: VersionSpans = []
        for start, generation in self._turns:
            end = start + len(generation.token_ids)
            sampled[start:end] = True
            behaviour[start:end] = generation.logprobs
            for version, count in generation.versions:
                append_version(versions, version, count)
        return Trajectory(
            tokens=np.array(self._tokens, dtype=np.int32),
            sampled=sampled,
            behaviour=behaviour,
            versions=versions,
            reward=reward.value,
            turns=len(self._turns),
            truncated=self._overflowed or self._turns[-1][1].finish_reason == "length",
            metrics=dict(reward.metrics),
            columns=dict(reward.columns),
            metadata=dict(reward.metadata),
        )

    def close(self) -> bool:
        """End the session: later calls are refused. False where a call was still under way."""
        idle = self._phase is not Phase.SAMPLING
        self._phase = Phase.CLOSED
        return idle

    def _plan(
        self, text: str, max_tokens: int | None, stop: str | Iterable[str] | None
    ) -> tuple[list[int], SamplingParams]:
        if self._phase is Phase.SAMPLING:
            raise RuntimeError("policy.complete: another call is under way; a transcript grows one turn at a time")
        if self._phase is Phase.CLOSED:
            raise RuntimeError("policy.complete: the episode has ended; await every call before it returns")
        if not isinstance(text, str):
            raise ValueError(f"policy.complete: text must be str, got {type(text).__name__}")
        limits = self._limits
        if max_tokens is None:
            max_tokens = limits.max_tokens
        elif not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"policy.complete: max_tokens={max_tokens!r} must be a whole number of at least 1")
        prompt_ids = self._tokens + self._codec.encode(text)
        if not prompt_ids:
            raise ValueError("policy.complete: the transcript is empty; begin with a text")
        room = limits.max_length - len(prompt_ids)
        if room < 1:
            self._overflowed = True
            raise ContextFull(
                f"{len(prompt_ids)} tokens leave no room to sample in model.max_length={limits.max_length}"
            )
        stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        params = SamplingParams(
            temperature=limits.temperature,
            top_k=limits.top_k,
            top_p=limits.top_p,
            max_tokens=min(max_tokens, limits.max_tokens, room),
            stop_token_ids=self._codec.stop_tokens(stops),
            seed=turn_seed(*self._seed_key, len(self._turns)),
        )
        return prompt_ids, params

    def _record(self, text: str, prompt_ids: list[int], generation: Generation) -> Completion:
        if self._phase is Phase.CLOSED:
            raise RuntimeError(
                "policy.complete: the episode ended during this call; await every call before it returns"
            )
        token_ids: Sequence[int] = generation.token_ids.tolist()
        assert len(token_ids) == len(generation.logprobs) == sum(count for _, count in generation.versions)
        assert token_ids, "an engine samples at least one token"
        self._turns.append((len(prompt_ids), generation))
        self._tokens = prompt_ids
        self._tokens.extend(token_ids)
        key = tuple(token_ids)
        answer = self._codec.decode(key)
        self._texts.append(text)
        self._texts.append(answer)
        return Completion(answer, key, generation.finish_reason)

"""A tokenizer of one token per character and an engine that answers from a script."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streamrl.envs.environment import load_environment
from streamrl.envs.group import GroupResult, GroupRunner
from streamrl.envs.split import Split
from streamrl.schema import Config
from streamrl.types import Generation, Lease, SamplingParams, VersionSpans

ALPHABET = string.digits + string.ascii_letters + "+-*/=<>?|., "
END = len(ALPHABET)
PAIR = END + 1
"""A token for the two characters ``ab``: sampling it and encoding its text again gives different tokens."""


class CharTokenizer:
    eos_token_id = END

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __len__(self) -> int:
        return PAIR + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        self.encoded.append(text)
        return [ALPHABET.index(character) for character in text if character in ALPHABET]

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        end = "" if skip_special_tokens else "$"
        return "".join("ab" if each == PAIR else end if each == END else ALPHABET[each] for each in token_ids)


def ids(text: str) -> list[int]:
    """``$`` is the end token."""
    return [END if character == "$" else ALPHABET.index(character) for character in text]


def generation(
    token_ids: Sequence[int], versions: VersionSpans | None = None, logprobs: Sequence[float] | None = None
) -> Generation:
    count = len(token_ids)
    return Generation(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs if logprobs is not None else [-0.5] * count, dtype=np.float32),
        versions=versions if versions is not None else [(0, count)],
        finish_reason="stop" if token_ids[-1] == END else "length",
    )


class ScriptedEngine:
    """Answers with ``answer(prompt_ids, params)``; remembers every request."""

    def __init__(self, answer: Callable[[list[int], SamplingParams], Generation]) -> None:
        self._answer = answer
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.cancelled = 0
        self.most_at_once = 0
        self._running = 0
        self.hold: asyncio.Event | None = None
        """Where set, requests wait for it."""
        self.started = asyncio.Event()

    async def asked(self, count: int) -> None:
        """Wait until there were so many requests."""
        while len(self.requests) < count:
            self.started.clear()
            await self.started.wait()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.requests.append((list(prompt_ids), params))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        self.started.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
            answer = self._answer(list(prompt_ids), params)
            await asyncio.sleep(0)  # let the others ask, as a real engine does
            return answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._running -= 1


def says(*texts: str) -> ScriptedEngine:
    """An engine whose requests are answered by ``texts`` in order, the last one for ever."""
    left = list(texts)
    return ScriptedEngine(lambda *_: generation(ids(left.pop(0) if len(left) > 1 else left[0])))


def settings(name: str, **args: Any) -> Config:
    config = Config()
    config.env.name = name
    config.env.args = args
    return config


def runner(config: Config, engine: Any, tokenizer: CharTokenizer | None = None) -> GroupRunner:
    split = Split(load_environment(config), config.seed, held_out=0.0)
    return GroupRunner(split, engine, tokenizer or CharTokenizer(), config)


def lease(size: int = 2, prompt: int = 0, attempt: int = 0) -> Lease:
    return Lease(id=7, prompt=prompt, group_size=size, attempt=attempt, deadline_s=60.0)


def play(config: Config, engine: Any, size: int = 2) -> GroupResult:
    return asyncio.run(runner(config, engine).run_group(lease(size)))

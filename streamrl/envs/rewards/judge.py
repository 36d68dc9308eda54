"""A language model as judge, behind any OpenAI-compatible endpoint: ``POST {url}/chat/completions``.

A prompt is filled in from the task and the answer, the score is read from the reply, and both are remembered, so that
the same answer to the same task is judged once. How requests are paced and tried again: ``judge_client.py``.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import string
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from streamrl.envs.environment import Reward, Task
from streamrl.envs.loading import nearest
from streamrl.envs.rewards.judge_client import JudgeClient, Pace
from streamrl.envs.rewards.protocol import Answer, text_of
from streamrl.envs.rewards.score_cache import ScoreCache
from streamrl.errors import ConfigError, EnvironmentFailed

TEMPLATE = """\
Judge the answer to the question below.

[Question]
{prompt}

[Reference answer, may be empty]
{reference}

[Answer]
{answer}

Say in one or two sentences what is right and wrong about the answer. Then give it a score from 0 (useless) to 10
(perfect) in a last line of the form
Score: <number>
"""
PATTERN = r"[Ss]core\s*:\s*\**\s*(-?\d+(?:\.\d+)?)"
_FIELDS = ("prompt", "reference", "answer", "metadata")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


class JudgeReward:
    """The judge's score, brought from [``lowest``, ``highest``] to [0, 1]. Metric ``cached``: 1 where it was known.

    - ``url``: up to and without ``/chat/completions``; ``model`` is its name for the judge. The key is read from the
      environment variable ``api_key_env``; no key is sent where that is empty.
    - ``template``: the message, with ``{prompt}``, ``{reference}``, ``{answer}`` and ``{metadata[name]}``; ``system``
      goes before it. ``body`` has further fields of the request, such as ``temperature``.
    - ``score``: how it is read from the reply: ``number`` (the last in it), ``json:KEY`` (of the last JSON object in
      it), or ``regex:…`` (the last match, its first group).
    - ``at_once``, ``per_s`` (requests per second, 0: any number), ``timeout_s`` (of one request), ``retries`` (after
      429, 5xx, a lost connection or a timeout) and ``deadline_s`` (of one score, waits and retries included).
    - ``cache_size`` scores are kept in memory; ``cache_path``, a file, keeps them for later runs too.

    Raises ``EnvironmentFailed`` where the endpoint refuses, no score comes in time, or none can be read.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str = TEMPLATE,
        system: str = "",
        score: str = f"regex:{PATTERN}",
        lowest: float = 0.0,
        highest: float = 10.0,
        api_key_env: str = "",
        body: Mapping[str, Any] | None = None,
        at_once: int = 8,
        per_s: float = 0.0,
        timeout_s: float = 30.0,
        retries: int = 5,
        deadline_s: float = 50.0,
        cache_size: int = 10_000,
        cache_path: str = "",
    ) -> None:
        if not lowest < highest:
            raise ConfigError(f"lowest={lowest} must be below highest={highest}")
        _check_template(template)
        self._parse = score_parser(score)
        self._template, self._system = template, system
        self._lowest, self._highest = lowest, highest
        self._reading = [score, lowest, highest]
        self._body = {"model": model, "temperature": 0.0} | dict(body or {})
        pace = Pace(at_once, per_s, timeout_s, retries, deadline_s)
        self._client = JudgeClient(url, _key(api_key_env), pace)
        self._cache = ScoreCache(cache_size, cache_path)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One for each request that is under way."""

    async def __call__(self, task: Task, answer: Answer) -> Reward:
        request = self._body | {"messages": self._messages(task, text_of(answer))}
        name = ScoreCache.name({"url": self._client.url, "request": request, "score": self._reading})
        async with self._asking.setdefault(name, asyncio.Lock()):  # the trajectories of a group often say the same
            if (reply := await asyncio.to_thread(self._cache.get, name)) is not None:
                return Reward(self._scaled(reply), {"cached": 1.0})
            reply = await self._client.complete(request)
            value = self._scaled(reply)
            await asyncio.to_thread(self._cache.put, name, reply)  # only what can be read is worth keeping
            return Reward(value, {"cached": 0.0})

    async def close(self) -> None:
        """End the connections and close the cache's file."""
        await self._client.close()
        self._cache.close()

    def _messages(self, task: Task, answer: str) -> list[dict[str, str]]:
        try:
            text = self._template.format(
                prompt=task.prompt, reference=task.answer or "", answer=answer, metadata=task.metadata
            )
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise EnvironmentFailed(f"judge: template cannot be filled in for task {task.index}: {error!r}") from error
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": text}]

    def _scaled(self, reply: str) -> float:
        score = self._parse(reply)
        if score is None:
            raise EnvironmentFailed(f"judge: no score in the reply {reply[-200:]!r}")
        if not self._lowest <= score <= self._highest:
            raise EnvironmentFailed(
                f"judge: expected a score from {self._lowest:g} to {self._highest:g}, got {score:g}"
            )
        return (score - self._lowest) / (self._highest - self._lowest)


def score_parser(kind: str) -> Callable[[str], float | None]:
    """From a reply to its score, None where there is none: ``number``, ``json:KEY`` or ``regex:PATTERN``."""
    name, _, rest = kind.partition(":")
    if kind == "number":
        return lambda text: _last_number(_NUMBER, text)
    if name == "json" and rest:
        return lambda text: _json_number(text, rest)
    if name == "regex" and rest:
        try:
            pattern = re.compile(rest)
        except re.error as error:
            raise ConfigError(f"score={kind!r}: not a regular expression: {error}") from error
        if pattern.groups < 1:
            raise ConfigError(f"score={kind!r}: expected a group (…) around the number")
        return lambda text: _last_number(pattern, text)
    raise ConfigError(f"score={kind!r}: expected number, json:KEY or regex:PATTERN")


def _last_number(pattern: re.Pattern[str], text: str) -> float | None:
    matches = list(pattern.finditer(text))
    return _finite(matches[-1].group(min(pattern.groups, 1))) if matches else None


def _json_number(text: str, key: str) -> float | None:
    """Of the last object in ``text`` that has ``key``; what stands around the object does not matter."""
    decoder, found, at = json.JSONDecoder(), None, 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        found = value.get(key, found)
        at = end
    return None if found is None or isinstance(found, bool) else _finite(found)


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _check_template(template: str) -> None:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"template: {error}; a brace that is meant is written twice") from error
    for name in fields:
        root = re.split(r"[.\[]", name)[0]
        if root not in _FIELDS:
            raise ConfigError(f"template: no field {{{name}}}{nearest(root, _FIELDS)}")
    if "answer" not in fields:
        raise ConfigError("template: it must show the judge the {answer}")


def _key(variable: str) -> str:
    if variable and not os.environ.get(variable):
        raise ConfigError(f"api_key_env={variable}: that environment variable is not set")
    return os.environ.get(variable, "") if variable else ""

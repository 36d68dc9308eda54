"""Bodies that are nearly right, against a real session: every one is answered or refused, none is an internal error."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from proxy_server import ADD, serving
from scripted import ScriptedEngine

from streamrl.envs.codec import Codec
from streamrl.envs.episode import Episode, Limits
from streamrl.envs.session import Session
from streamrl.policy.tokenizer import EOS, character_tokenizer
from streamrl.types import Generation

TOKENIZER = character_tokenizer()
ODD: list[Any] = [
    None,
    0,
    -1,
    1.5,
    1 << 70,
    True,
    "",
    "x",
    "é\u0000",
    [],
    {},
    [[]],
    [None],
    {"type": "text"},
    {"a": {}},
]

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [ADD],
        "max_tokens": 4,
        "stop": ["x"],
        "n": 1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    },
    "completions": {"prompt": [[1, 2], [3]], "max_tokens": 4, "stop": "x", "logprobs": 1, "stream": False},
    "responses": {
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
    },
    "messages": {
        "max_tokens": 4,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}],
        "stop_sequences": ["x"],
    },
}
TRIES = 250


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in ``value``."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [each for _, key in found for each in places(value[key])]


def spoiled(body: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """``body`` with one or two of its parts replaced or removed."""
    changed = copy.deepcopy(body)
    for _ in range(source.randint(1, 2)):
        container, key = source.choice(places(changed) or [(changed, "messages")])
        if isinstance(container, dict) and source.random() < 0.2:
            container.pop(key, None)
        else:
            container[key] = copy.deepcopy(source.choice(ODD))
    return changed


def engine() -> ScriptedEngine:
    def answer(_: Sequence[int], __: Any) -> Generation:
        ids = np.array(TOKENIZER.convert_tokens_to_ids(["7", EOS]), dtype=np.int32)
        return Generation(ids, np.full(2, -0.5, dtype=np.float32), [(0, 2)], "stop")

    return ScriptedEngine(answer)


@pytest.mark.parametrize("path", BODIES)
def test_nearly_right_bodies_are_answered_or_refused(path: str):
    async def run() -> Counter[int]:
        source, statuses = random.Random(0), Counter[int]()
        async with asyncio.timeout(150), serving(None) as served:
            for _ in range(TRIES):
                body = spoiled(BODIES[path], source)
                episode = Episode(engine(), Codec(TOKENIZER), Limits(1.0, 0, 1.0, 8, 256), (0, 0, 0, 0))
                key = served.desk.open(Session(episode))
                async with served.http.post(
                    f"{served.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {key}"}
                ) as answer:
                    text = await answer.text()
                assert answer.status in (200, 400, 404), (body, text)
                statuses[answer.status] += 1
                served.desk.close(key)
        return statuses

    statuses = asyncio.run(run())
    assert statuses[200] > TRIES // 20
    assert statuses[400] > TRIES // 20

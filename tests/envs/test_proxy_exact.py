"""A real engine behind the proxy: what the SDKs caused is re-scored by the model that sampled it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from proxy_server import Served, serving
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import Episode, Limits
from streamrl.envs.session import Session
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.types import Trajectory

openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed")

TOKENIZER = character_tokenizer()
LIMITS = Limits(temperature=0.8, top_k=0, top_p=1.0, max_tokens=24, max_length=256)


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
    )
    return Qwen3ForCausalLM(config).eval()


def trajectories(scene: Callable[[Served], Awaitable[None]]) -> list[Trajectory]:
    """What ``scene`` recorded, each re-scored to 1e-4."""

    async def run() -> list[Trajectory]:
        engine = EmbeddedEngine(tiny_model(), slots=8, max_length=256, decode=lambda ids: str(TOKENIZER.decode(ids)))
        await engine.start()
        try:
            episode = Episode(engine, Codec(TOKENIZER), LIMITS, (0, 0, 0, 0))
            async with asyncio.timeout(120), serving(Session(episode)) as served:
                await scene(served)
            episode.close()
            recorded = episode.trajectories(Reward(1.0), 0)
            for each in recorded:
                scored = await engine.score(each.tokens.tolist(), LIMITS.temperature)
                np.testing.assert_allclose(each.behaviour[each.sampled], scored[each.sampled], atol=1e-4)
        finally:
            await engine.close()
        return recorded

    return asyncio.run(run())


def test_log_probs_and_token_ids_of_a_chat_are_those_of_its_trajectory():
    told: list[tuple[list[int], list[float]]] = []

    async def scene(served: Served) -> None:
        history: list[Any] = [{"role": "system", "content": "Talk."}]
        for place in range(3):
            history.append({"role": "user", "content": f"turn {place}"})
            answer = await served.openai.chat.completions.create(
                model="any", messages=history, logprobs=True, extra_body={"return_token_ids": True}
            )
            choice = answer.choices[0]
            told.append((choice.token_ids, [each.logprob for each in choice.logprobs.content]))
            history.append(choice.message)

    recorded = trajectories(scene)
    sampled = [each.tokens[each.sampled].tolist() for each in recorded]
    assert sum(map(len, sampled)) <= sum(len(ids) for ids, _ in told)
    first = told[0]
    assert sampled[0][: len(first[0]) - 1] == first[0][:-1]
    np.testing.assert_allclose(recorded[0].behaviour[recorded[0].sampled][:4], first[1][:4], rtol=1e-6)


def test_token_ids_in_and_out_go_on_with_the_same_trajectory():
    sampled: list[int] = []

    async def scene(served: Served) -> None:
        prompt = TOKENIZER.encode("1+2=")
        for _ in range(3):
            answer = await served.openai.completions.create(
                model="any", prompt=prompt, max_tokens=6, extra_body={"return_token_ids": True}
            )
            choice = answer.choices[0]
            assert choice.prompt_token_ids == prompt
            sampled.extend(choice.token_ids)
            prompt = prompt + choice.token_ids + TOKENIZER.encode(";")

    recorded = trajectories(scene)
    assert len(recorded) == 1
    assert recorded[0].tokens[recorded[0].sampled].tolist() == sampled
    assert recorded[0].turns == 3


def test_choices_of_one_request_are_trajectories_of_one_episode():
    async def scene(served: Served) -> None:
        answer = await served.openai.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "a"}], n=4
        )
        assert len({choice.message.content for choice in answer.choices}) > 1

    recorded = trajectories(scene)
    assert len(recorded) == 4
    assert {each.episode for each in recorded} == {0}
    assert {each.prompt_length for each in recorded} == {recorded[0].prompt_length}


def test_both_sdks_go_on_with_each_others_histories():
    anthropic = pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed")
    assert anthropic is not None

    async def scene(served: Served) -> None:
        history: list[Any] = [{"role": "user", "content": "a"}]
        first = await served.openai.chat.completions.create(model="any", messages=history)
        history += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "b"},
        ]
        second = await served.anthropic.messages.create(model="any", messages=history, max_tokens=24)
        text = "".join(block.text for block in second.content if block.type == "text")
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "c"}]
        await served.openai.responses.create(model="any", input=history)

    recorded = trajectories(scene)
    assert recorded[-1].tokens[0] == TOKENIZER.convert_tokens_to_ids("<|user|>")
    assert sum(each.turns for each in recorded) == 3
    assert len(recorded) == 1

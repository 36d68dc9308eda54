"""Recorded log-probs are those of a fresh forward pass over each trajectory, whatever became of the history."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import CHATML, result, tokenizer, tool, user
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import Episode, Limits
from streamrl.envs.session import Session
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.types import Trajectory

TEMPERATURE = 0.8
ADD = tool("add", "a", "b")


def model_for(reader: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=len(reader),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


async def talk(policy: Session) -> None:
    """Several turns with tools, drift, a rewritten history, a branch, and requests at the same time."""
    history: list[dict[str, Any]] = [user("3+4?")]
    for place in range(3):
        turn = await policy.chat(history, [ADD], max_tokens=12)
        history += [turn.message, result(str(place)) if turn.tool_calls else user("more")]
    turn = await policy.chat(history, [ADD], max_tokens=12, stop=["ab", "7"])
    if turn.message["content"]:
        turn.message["content"] += " \n"
    history += [turn.message, user("again")]
    await policy.chat(history, [ADD], max_tokens=12)
    branch = policy.branch()
    await asyncio.gather(
        *(policy.chat(history, [ADD], max_tokens=12) for _ in range(2)),
        branch.chat([*history[:2], user("else")], [ADD], max_tokens=12),
        policy.chat([user("summary"), *history[-2:]], [ADD], max_tokens=12),
    )


async def play(reader: PreTrainedTokenizerBase, model: Qwen3ForCausalLM, member: int) -> tuple[list[Trajectory], Any]:
    def decode(token_ids: list[int]) -> str:
        return str(reader.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    engine = EmbeddedEngine(model, slots=4, max_length=1024, decode=decode)
    await engine.start()
    try:
        limits = Limits(TEMPERATURE, top_k=0, top_p=1.0, max_tokens=32, max_length=1024)
        episode = Episode(engine, Codec(reader), limits, (0, 0, 0, member))  # type: ignore[arg-type]
        policy = Session(episode)
        await talk(policy)
        return episode.trajectories(Reward(1.0), 0), episode.matched
    finally:
        await engine.close()


@pytest.mark.parametrize("reader", [tokenizer(CHATML), character_tokenizer()], ids=["chatml", "tiny"])
def test_a_chat_with_realignment_and_forks_is_scored_as_it_was_sampled(reader: PreTrainedTokenizerBase) -> None:
    model = model_for(reader)
    trajectories, counts = asyncio.run(play(reader, model, member=0))
    assert counts["realign"] == 1
    assert len(trajectories) == 1 + counts["fork"]
    for each in trajectories:
        tokens = torch.tensor(each.tokens[None].astype(np.int64))
        with torch.no_grad():
            scores = (model(input_ids=tokens).logits[0].double() / TEMPERATURE).log_softmax(-1)
        fresh = scores[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
        sampled = each.sampled[1:]
        assert sampled.any()
        np.testing.assert_allclose(each.behaviour[1:][sampled], fresh[sampled], atol=1e-4)

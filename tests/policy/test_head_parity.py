"""Engine against trainer with a bfloat16 body: how far their log-probs are apart, by what each head computes in.

The model is wide and its logits large (about 16, where bfloat16 has a spacing of 0.125), so that the head shows.
"""

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.policy.learner import Learner
from streamrl.policy.precision import freeze
from streamrl.schema import Config
from streamrl.types import Generation, SamplingParams

torch.set_num_threads(1)
VOCAB = 256
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (8, 8))


def wide_model(tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.02,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(9.0)
    return model


async def sampled(model: Qwen3ForCausalLM, head_dtype: str) -> list[Generation]:
    engine = EmbeddedEngine(model, slots=8, max_length=64, head_dtype=head_dtype)
    await engine.start()
    try:
        how = [SamplingParams(max_tokens=56, seed=seed) for seed in range(len(PROMPTS))]
        return await asyncio.gather(*map(engine.generate, PROMPTS.tolist(), how))
    finally:
        await engine.close()


def offsets(model: Qwen3ForCausalLM, head_dtype: str, answers: list[Generation]) -> np.ndarray:
    config = Config()
    config.model.dtype, config.model.head_dtype = "bfloat16", head_dtype
    learner = Learner(config, copy.deepcopy(model))
    return np.concatenate(
        [
            learner.score(np.concatenate([prompt, answer.token_ids]))[len(prompt) :] - answer.logprobs
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]
    )


@pytest.mark.parametrize("tied", [True, False])
def test_mismatch_is_smallest_with_float32_heads_on_both_sides(tied):
    model = wide_model(tied)
    largest = model(torch.from_numpy(PROMPTS)).logits.amax(-1).mean()
    assert largest > 16
    rms = {}
    for of_engine in ("float32", "bfloat16"):
        answers = asyncio.run(sampled(freeze(copy.deepcopy(model), torch.bfloat16), of_engine))
        for of_trainer in ("float32", "bfloat16"):
            rms[of_engine, of_trainer] = float(np.sqrt(np.square(offsets(model, of_trainer, answers)).mean()))
    both = rms.pop(("float32", "float32"))
    assert all(both < 0.75 * each for each in rms.values()), (both, rms)
    assert both < 0.015

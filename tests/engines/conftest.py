"""Tiny models (vocabulary 32, two layers, fp32) with weights large enough that distributions are far from flat."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 32


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def qwen3(tied: bool, **changes: object) -> PreTrainedModel:
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))


def llama(tied: bool) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    )


def gpt2(tied: bool) -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            tie_word_embeddings=tied,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@pytest.fixture
def build() -> Callable[..., PreTrainedModel]:
    """``build("qwen3", tied=True, seed=0)``: the same weights for the same arguments."""
    families = {"qwen3": qwen3, "llama": llama, "gpt2": gpt2}

    def _build(family: str = "qwen3", tied: bool = True, seed: int = 0, **changes: object) -> PreTrainedModel:
        torch.manual_seed(seed)
        return families[family](tied, **changes).eval()

    return _build

"""Tiny reward models with random weights, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from streamrl.policy.tokenizer import character_tokenizer


def make_reward_model(folder: Path, labels: int = 1, **changes: Any) -> Path:
    """A checkpoint without a chat template, whose scores differ clearly between texts."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.5,
        "num_labels": labels, "pad_token_id": None,
    }  # fmt: skip
    Qwen3ForSequenceClassification(Qwen3Config(**(settings | changes))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

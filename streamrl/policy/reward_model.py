"""A discriminative reward model: a transformers checkpoint for sequence classification with one label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSequenceClassification

from streamrl.errors import ConfigError
from streamrl.policy.model import checked_folder, load_tokenizer

Conversation = Sequence[tuple[str, str]]
"""(role, content) of each message."""


class RewardModel:
    """The model in ``folder``, in float32 on the CPU. Raises ``ConfigError`` of one line where it is not one.

    A conversation becomes text by the tokenizer's chat template; without one its contents are put one after the other.
    """

    def __init__(self, folder: Path, max_length: int) -> None:
        where = f"reward_model.name={folder}"
        checked_folder(folder, "reward_model.name")
        transformers.utils.logging.disable_progress_bar()
        try:
            self._model, info = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
            self._tokenizer: Any = load_tokenizer(folder)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigError(f"{where}: cannot be loaded: {' '.join(str(error).split()):.200}") from error
        if missing := sorted(info["missing_keys"]):  # transformers would draw them at random
            raise ConfigError(f"{where}: the checkpoint has no weights for {missing[0]}, so it is no reward model")
        if self._model.config.num_labels != 1:
            raise ConfigError(f"{where}: expected a model with one label, got {self._model.config.num_labels}")
        positions = getattr(self._model.config, "max_position_embeddings", max_length)
        if max_length > positions:
            raise ConfigError(f"{where}: it takes {positions} tokens at most; set reward_model.max_length={positions}")
        self._max_length = max_length
        self._pad = self._model.config.pad_token_id

    def score(self, conversations: Sequence[Conversation]) -> list[float | str]:
        """The logit of each, by one forward pass; why there is none, for a conversation that cannot be scored."""
        rows = [self._encode(conversation) for conversation in conversations]
        fitting = [row for row in rows if not isinstance(row, str)]
        scores = iter(self._forward(fitting)) if fitting else iter(())
        return [row if isinstance(row, str) else next(scores) for row in rows]

    def _encode(self, conversation: Conversation) -> list[int] | str:
        messages = [{"role": role, "content": content} for role, content in conversation]
        try:
            if self._tokenizer.chat_template:
                text = self._tokenizer.apply_chat_template(messages, tokenize=False)
                row: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            else:
                row = self._tokenizer.encode("".join(content for _, content in conversation))
        except Exception as error:  # noqa: BLE001 templates are code of the checkpoint's; they raise what they like
            return f"reward model: the chat template refuses the conversation: {type(error).__name__}: {error}"
        if not 0 < len(row) <= self._max_length:
            return f"reward model: expected 1 to reward_model.max_length={self._max_length} tokens, got {len(row)}"
        return row

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]]) -> list[float | str]:
        longest = max(map(len, rows))
        pad = self._padding(rows)
        self._model.config.pad_token_id = pad  # by which the model finds each row's last token
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        logits = self._model(input_ids=tokens, attention_mask=mask).logits[:, 0].tolist()
        return [value if math.isfinite(value) else f"reward model: its logit is {value}" for value in logits]

    def _padding(self, rows: Sequence[list[int]]) -> int:
        """The model's padding token; where it has none, one that is in no row, so that it moves nobody's last token."""
        if self._pad is not None:
            return int(self._pad)
        used = {token for row in rows for token in row}
        return next(token for token in range(self._model.config.vocab_size) if token not in used)

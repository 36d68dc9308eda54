"""Text to tokens and back, with a memory: the same text is encoded once, the same short answer decoded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from operator import index
from typing import Any, Protocol

from streamrl.envs.chat.template import ChatTemplate
from streamrl.envs.memory import remembering
from streamrl.envs.stops import stop_strings

_CACHED_STOPS = 256
_CACHED_ANSWERS = 4_096
_SHORT = 16
"""Answers of at most so many tokens are remembered when decoded; longer ones hardly ever come twice."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that environments use."""

    @property
    def eos_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...


class Codec:
    """A tokenizer with a memory, and its chat template."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto") -> None:
        self.tokenizer = tokenizer
        self._tool_format = tool_format
        end = tokenizer.eos_token_id
        self.end_tokens: tuple[int, ...] = () if end is None else (end,)
        self.encode = remembering(self._encode)
        self._decode_short = lru_cache(_CACHED_ANSWERS)(self._decode)
        self._checked_stop = lru_cache(_CACHED_STOPS)(self._check_stop)

    @cached_property
    def template(self) -> ChatTemplate:
        """Raises ``ConfigError`` where the tokenizer has none that can be used."""
        return ChatTemplate(self.tokenizer, self._tool_format)

    @cached_property
    def chat_ends(self) -> tuple[str, ...]:
        """What ends an answer in a chat beside the end token."""
        return () if set(self.template.end_tokens) <= set(self.end_tokens) else (self.template.closing,)

    def context(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a text, or token ids as they are. Raises ``ValueError`` for ids that no tokenizer gave."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        try:
            token_ids = [index(each) for each in prompt]
        except TypeError:
            raise ValueError(f"policy: a prompt must be str or token ids, got {prompt!r:.80}") from None
        wrong = next((each for each in token_ids if not 0 <= each < len(self.tokenizer)), None)
        if wrong is not None:
            raise ValueError(f"policy: token id {wrong} is not one of the tokenizer's {len(self.tokenizer)}")
        return token_ids

    def stops(self, stop: str | Iterable[str] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What ends a turn: tokens, the end token among them, and strings.

        Raises ``ValueError`` for a stop that could never be sampled.
        """
        checked = [self._checked_stop(text) for text in stop_strings(stop)]
        tokens = (each for each in checked if isinstance(each, int))
        return tuple(dict.fromkeys((*tokens, *self.end_tokens))), tuple(
            each for each in checked if isinstance(each, str)
        )

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """The text of sampled tokens, without special tokens."""
        return self._decode_short(token_ids) if len(token_ids) <= _SHORT else self._decode(token_ids)

    def _encode(self, text: str) -> list[int]:
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if text and not token_ids:
            raise ValueError(f"the tokenizer has no token for any part of {text!r:.80}")
        return token_ids

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _check_stop(self, text: str) -> int | str:
        """A special token by its id, any other text as it is."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if str(self.tokenizer.decode(token_ids, skip_special_tokens=False)).strip() != text.strip():
            raise ValueError(f"stop={text!r:.80}: the tokenizer has no tokens for it, so it would never be sampled")
        special = len(token_ids) == 1 and not self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return token_ids[0] if special else text

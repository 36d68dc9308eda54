"""A memory of what texts were encoded to: the episodes of a group share their prompt, all share the hints."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")

TEXTS = 256
"""Texts that are remembered."""

CHARACTERS = 1 << 17
"""Of a text at most; longer ones hardly come twice, and a client of the proxy may send any number of them."""


def remembering(encode: Callable[[str], _T]) -> Callable[[str], _T]:
    """``encode``, which remembers the last ``TEXTS`` texts of at most ``CHARACTERS``."""
    remembered = lru_cache(TEXTS)(encode)

    def encoded(text: str) -> _T:
        return remembered(text) if len(text) <= CHARACTERS else encode(text)

    return encoded

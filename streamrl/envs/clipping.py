"""Texts that are longer than a model should read: the middle goes, the two ends stay."""

from __future__ import annotations

from streamrl.envs.codec import Tokenizer

_CHARACTERS = 64
"""Of one token at most, so that of a huge text only the ends are encoded; longer tokens make the result shorter."""


def is_short(text: str, tokens: int) -> bool:
    """Whether ``text`` has at most ``tokens`` tokens whatever the tokenizer: none needs more than one per byte."""
    return len(text.encode("utf-8", "replace")) < tokens


def clip(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """``text`` where it has at most ``tokens`` tokens; else its start and its end round a mark that says how many
    characters are missing, in at most ``tokens`` tokens, the mark included.

    Raises ``ValueError`` where the mark alone has more.
    """
    if is_short(text, tokens):
        return text
    longest = _CHARACTERS * tokens
    if len(text) <= 2 * longest:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) <= tokens:
            return text
    head, tail = _ids(text[:longest], tokenizer), _ids(text[-longest:], tokenizer)
    kept = tokens
    while kept >= 0:
        before = _text(head[: (kept + 1) // 2], tokenizer)
        after = _text(tail[len(tail) - kept // 2 :], tokenizer)
        shorter = f"{before} ...[{len(text) - len(before) - len(after)} characters left out]... {after}"
        excess = len(_ids(shorter, tokenizer)) - tokens
        if excess <= 0:
            return shorter
        kept -= excess
    raise ValueError(f"clip: {tokens} tokens leave no room for the mark that says what is missing; allow more")


def _ids(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _text(token_ids: list[int], tokenizer: Tokenizer) -> str:
    """Without the halves of a character that was cut."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True)).strip("\ufffd")

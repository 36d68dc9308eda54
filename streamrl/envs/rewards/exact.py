"""Exact match with the reference answer, after as much normalisation as asked for."""

from __future__ import annotations

import re
import string
import unicodedata

from streamrl.envs.environment import Task
from streamrl.envs.rewards.protocol import Answer, reference_of, text_of
from streamrl.errors import ConfigError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class ExactReward:
    """1.0 where the answer is ``task.answer``, else 0.0; spaces around the two never count.

    ``pattern``: a regular expression whose last match in the text (its first group, where it has one) is the answer; a
    text without a match is wrong. ``normalise`` compares as SQuAD does (arXiv:1606.05250): no case, punctuation,
    articles, or differences in spaces and Unicode form. Raises ``EnvironmentFailed`` for a task without an answer.
    """

    def __init__(self, normalise: bool = False, pattern: str = "") -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL) if pattern else None
        except re.error as error:
            raise ConfigError(f"pattern={pattern!r}: not a regular expression: {error}") from error
        self._normalise = normalise

    async def __call__(self, task: Task, answer: Answer) -> float:
        reference = reference_of(task, "exact")
        given = self._extract(text_of(answer))
        return float(given is not None and self._form(given) == self._form(reference))

    async def close(self) -> None:
        """Nothing is held."""

    def _extract(self, text: str) -> str | None:
        if self._pattern is None:
            return text
        matches = list(self._pattern.finditer(text))
        if not matches:
            return None
        groups = matches[-1].groups()
        return (groups[0] or "") if groups else matches[-1].group()

    def _form(self, text: str) -> str:
        if not self._normalise:
            return text.strip()
        folded = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
        return " ".join(_ARTICLES.sub(" ", folded).split())

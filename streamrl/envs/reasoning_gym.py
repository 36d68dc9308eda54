"""Single-turn tasks of the reasoning-gym package: one of its families, with its own options and its own scorer."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

from streamrl.envs.environment import Policy, Reward, Task, refuse_unknown
from streamrl.envs.loading import nearest
from streamrl.errors import ConfigError

_DEFAULT_SIZE = 1_000_000

_BUILT_AHEAD = {"acre": 5_000, "word_ladder": 20_000}
"""Families that build or bound all entries up front; the others compute an entry when it is asked for."""


class ReasoningGym:
    """``family`` and its options, such as ``min_digits``; prompts from ``template`` over the question and metadata.

    Entry ``index`` is what the family draws with seed ``seed + index``; nothing is stored. The reward is the family's
    ``score_answer`` of the sampled text without the end token and surrounding whitespace, 1 for a right answer. Most
    families give partial credit: ``chain_sum`` and ``basic_arithmetic`` give len(right)/len(given) to a text that
    *contains* the right answer ("146" for "46": 2/3), others 0.01 to 0.05 to any wrong one.
    """

    def __init__(
        self,
        family: str = "chain_sum",
        template: str = "{question}",
        compact: bool = False,
        size: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """``compact`` removes all spaces from the rendered prompt, for models that read characters.

        ``size`` bounds the entries, a million where None; a few families that build all entries ahead have less.
        """
        self.name = family
        self._template = template
        self._compact = compact
        self._size = size if size is not None else _BUILT_AHEAD.get(family, _DEFAULT_SIZE)
        self._dataset = _create(family, {**options, "size": self._size, "seed": seed})
        self._check_template()

    def __len__(self) -> int:
        return self._size

    def task(self, index: int) -> Task:
        """``metadata`` is the family's entry: ``question``, ``answer``, ``metadata``."""
        entry = self._dataset[index % self._size]
        return Task(self._render(entry), entry["answer"], entry)

    async def episode(self, task: Task, policy: Policy) -> Reward:
        completion = await policy.complete(task.prompt)
        try:
            score = float(self._dataset.score_answer(completion.text.strip(), task.metadata))
        except Exception:  # noqa: BLE001 some scorers raise on text that does not parse: a wrong answer, and counted
            return Reward(0.0, {"scorer_raised": 1.0})
        return Reward(score, {"scorer_raised": 0.0})

    def _render(self, entry: dict[str, Any]) -> str:
        prompt = self._template.format(**_fields(entry))
        return prompt.replace(" ", "") if self._compact else prompt

    def _check_template(self) -> None:
        entry = self._dataset[0]
        fields = _fields(entry)
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self._template) if name is not None]
        except ValueError as error:
            raise ConfigError(f"env.args.template={self._template!r}: {error}") from error
        for name in names:
            root = name.partition(".")[0].partition("[")[0]
            if root not in fields:
                raise ConfigError(
                    f"env.args.template={self._template!r}: {self.name} has no field {root!r}{nearest(root, fields)}"
                )
        if not names:
            raise ConfigError(f"env.args.template={self._template!r}: it must use a field, such as {{question}}")
        try:
            self._render(entry)
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            raise ConfigError(f"env.args.template={self._template!r}: cannot be filled in: {error}") from error


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry["metadata"], "question": entry["question"]}


def _create(family: str, options: dict[str, Any]) -> Any:
    """The family's data set; raises ``ConfigError`` for an unknown family or option or a value that it refuses."""
    try:
        import reasoning_gym  # takes most of a second, so only where it is used
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.name: {error.name} is not installed; pip install 'streamrl[envs]'") from error

    if family not in DATASETS:
        raise ConfigError(f"env.args.family={family!r}: reasoning-gym has no such family{nearest(family, DATASETS)}")
    refuse_unknown(options, [each.name for each in dataclasses.fields(DATASETS[family][1])], f"family {family}")
    try:
        return reasoning_gym.create_dataset(family, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"env.args: {family} refuses these options: {error}") from error

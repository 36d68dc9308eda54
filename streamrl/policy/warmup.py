"""A short supervised phase on the task's own answers: a model built from scratch learns the format before RL starts."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamrl.errors import ConfigError, DivergedError
from streamrl.schema import WarmupConfig

Lesson = Sequence[tuple[str | Sequence[int], bool]]
"""One demonstrated trajectory in pieces, text or token ids; True: the policy is to learn it. A text that it is to learn
is followed by the end token; token ids are taken as they are. ``[("1+2=", False), ("3", True)]``"""
Lessons = Callable[[int], Lesson]
"""The demonstration of a training task by its index."""
Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and a line of text."""

FIRST_TASK = 1 << 40
"""Index of the first task that the warm-up trains on: RL starts at 0, so it does not start with the same tasks."""
FIRST_PROBE = 1 << 41
"""Index of the first probe task. Probes are training tasks too: what is held out stays unseen until RL evaluates."""
PROBES = 256

_RAMP_STEPS = 20
_PROBE_EVERY = 5
_PROBES_AVERAGED = 8
_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.01
_MAX_GRAD_NORM = 1.0
_ROW_TOKENS = 4096
"""Tokens of one forward pass, padding included."""
_IGNORED = -100


@dataclass(frozen=True)
class Encoded:
    """Some lessons, in one row each, padded on the right (causal attention skips it)."""

    inputs: Tensor
    """int64 ``[N, T]``."""
    targets: Tensor
    """int64 ``[N, T]``: the next token where the policy is to learn it, −100 elsewhere."""


@dataclass(frozen=True)
class WarmedUp:
    """How a warm-up ended."""

    steps: int
    loss: float
    """Mean over the taught tokens of the last batch, in nats."""
    accuracy: float
    """Share of the probe tasks that greedy decoding answers exactly at the end, in [0, 1]."""


class StopRule:
    """Ends a warm-up at ``target`` greedy accuracy on the probe tasks, and keeps the weights it ends with.

    At a constant rate accuracy jumps by ten points from step to step. The first probe that happens to reach the target
    would leave a model that knows little, so the mean of the last 8 probes decides when to end; what is kept are the
    weights of the newest probe that did not exceed the target, so that a run starts at most there.
    """

    def __init__(self, model: nn.Module, target: float) -> None:
        self._model = model
        self._target = target
        self._recent: deque[float] = deque(maxlen=_PROBES_AVERAGED)
        self._kept = WarmedUp(0, math.inf, 0.0), copy.deepcopy(model.state_dict())

    def reached(self, probed: WarmedUp) -> bool:
        """Record a probe of the model as it is now; True where the warm-up may end."""
        self._recent.append(probed.accuracy)
        if probed.accuracy <= self._target:
            self._kept = probed, copy.deepcopy(self._model.state_dict())
        return len(self._recent) == _PROBES_AVERAGED and sum(self._recent) / _PROBES_AVERAGED >= self._target

    def restore(self) -> WarmedUp:
        """Give the model the kept weights; how it was when they were kept."""
        probed, weights = self._kept
        self._model.load_state_dict(weights)
        return probed


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lessons: Lessons,
    config: WarmupConfig,
    max_length: int,
    progress: Progress,
) -> WarmedUp:
    """Train ``model`` in place on ``config.batch`` lessons a step; the loss counts the tokens that are taught.

    AdamW at a constant rate after a ramp of 20 steps. The rate does not decay, because a decay makes accuracy leap (on
    two-digit sums from 30 % to 90 % within 30 steps) and what is left to RL a matter of luck; ``stop_accuracy`` ends
    the phase instead (``StopRule``). Deterministic given the weights, the tasks and the thread count. Raises
    ``ConfigError`` for a lesson that cannot be used, ``DivergedError`` for a gradient that is not finite.
    """
    probes = _encode(tokenizer, [lessons(FIRST_PROBE + index) for index in range(PROBES)], max_length)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=_BETAS, weight_decay=_WEIGHT_DECAY, fused=True
    )
    rule = StopRule(model, config.stop_accuracy) if config.stop_accuracy else None
    probed = WarmedUp(0, math.inf, 0.0)
    model.train()
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / _RAMP_STEPS)
        drawn = (_task_index((step - 1) * config.batch + row, config.tasks) for row in range(config.batch))
        loss = _step(model, optimizer, _encode(tokenizer, [lessons(index) for index in drawn], max_length))
        if step % _PROBE_EVERY == 0 or step == config.steps:
            probed = WarmedUp(step, loss, exact_share(model, probes))
            progress(step, config.steps, f"warm-up: loss {loss:.2f}, {probed.accuracy:.0%} of answers right")
            if rule is not None and rule.reached(probed):
                break
    model.eval()
    return probed if rule is None else rule.restore()


def exact_share(model: PreTrainedModel, encoded: Encoded) -> float:
    """Share of the rows whose taught tokens greedy decoding gives exactly, end tokens included.

    One forward pass over the right tokens decides: greedy decoding leaves the right answer at the first position
    whose largest logit is another token, and never comes back.
    """
    right = 0
    with torch.inference_mode():
        for inputs, targets in _chunks(encoded):
            counted = targets != _IGNORED
            predicted = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
            right += int(((predicted == targets) | ~counted).all(dim=1).sum())
    return right / len(encoded.inputs)


def _task_index(drawn: int, distinct: int) -> int:
    return FIRST_TASK + (drawn % distinct if distinct else drawn)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, encoded: Encoded) -> float:
    count = int((encoded.targets != _IGNORED).sum())
    total = 0.0
    for inputs, targets in _chunks(encoded):
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum") / count
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    if not torch.isfinite(norm):
        raise DivergedError(f"warm-up: gradient norm is {norm.item()}; lower model.warmup.lr")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def _chunks(encoded: Encoded) -> list[tuple[Tensor, Tensor]]:
    """Rows by length, cut into forward passes of at most ``_ROW_TOKENS`` tokens without columns of padding only."""
    chunks = []
    lengths = (encoded.targets != _IGNORED).long().cumsum(1).argmax(1) + 1  # the last target is each row's last column
    order = lengths.argsort(stable=True, descending=True)
    start = 0
    while start < len(order):
        width = int(lengths[order[start]])
        rows = order[start : start + max(1, _ROW_TOKENS // width)]
        chunks.append((encoded.inputs[rows, :width], encoded.targets[rows, :width]))
        start += len(rows)
    return chunks


def _encode(tokenizer: PreTrainedTokenizerBase, lessons: list[Lesson], max_length: int) -> Encoded:
    rows = [_tokens(tokenizer, lesson, max_length) for lesson in lessons]
    width = max(len(tokens) for tokens, _ in rows) - 1
    inputs = torch.full((len(rows), width), tokenizer.pad_token_id or 0)
    targets = torch.full((len(rows), width), _IGNORED)
    for index, (ids, taught) in enumerate(rows):
        tokens = torch.tensor(ids)
        inputs[index, : len(ids) - 1] = tokens[:-1]
        targets[index, : len(ids) - 1] = tokens[1:].where(torch.tensor(taught[1:]), _IGNORED)
    return Encoded(inputs, targets)


def _tokens(tokenizer: PreTrainedTokenizerBase, lesson: Lesson, max_length: int) -> tuple[list[int], list[bool]]:
    """Token ids, up to the last taught one, and which of them are taught."""
    if len(lesson) < 2 or lesson[0][1] or not lesson[-1][1] or not all(len(piece) for piece, _ in lesson):
        shown = ", ".join(f"{'answer' if is_taught else 'prompt'}={piece!r:.40}" for piece, is_taught in lesson)
        raise ConfigError(
            f"model.warmup.steps needs tasks with a prompt and an answer, got {shown or 'nothing'}; "
            "set them, or a demonstration, in the environment's Task, or model.warmup.steps=0"
        )
    tokens: list[int] = []
    taught: list[bool] = []
    for piece, is_taught in lesson:
        ids = tokenizer.encode(piece, add_special_tokens=False) if isinstance(piece, str) else list(piece)
        if is_taught and isinstance(piece, str):
            ids = [*ids, tokenizer.eos_token_id]
        tokens += ids
        taught += [is_taught] * len(ids)
    if len(tokens) > max_length:
        raise ConfigError(
            f"model.max_length={max_length} is too short for the warm-up: prompt {lesson[0][0]!r:.40}, answer and end "
            f"token are {len(tokens)} tokens; raise model.max_length"
        )
    return tokens, taught

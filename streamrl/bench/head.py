"""The head of the trainer: peak memory, time and error of log-probs with their gradients, against plain autograd.

::

    ours    token_logprobs(hidden, weight, targets)                 logits of a chunk of tokens at a time
    naive   log_softmax(linear(hidden, weight)).gather(targets)     logits of all tokens, with what autograd keeps

Each side runs forward and backward on random data of a model with a vocabulary of 150,000 and a width of 1,024. Peak
memory is what a process of its own needs beyond weight, hidden states and libraries: gradients and logits. The naive
side of the large size is computed from a measured smaller one. ``python -m streamrl.bench.head [JSON]``.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamrl.bench.report import Row, alternate, publish, summarise
from streamrl.loss.logprobs import token_logprobs

VOCABULARY = 150_000
HIDDEN = 1024
LARGE, SMALL, EXACT = 8192, 1024, 128
"""Tokens: of the memory bound, of what both sides can do, of what is compared with float64."""
RUNS = 3
MB = 1e6


@dataclass(frozen=True)
class Data:
    """Hidden states ``[T, H]``, head ``[V, H]`` and targets ``[T]``, with logits of about ±18."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor

    @staticmethod
    def random(tokens: int, vocabulary: int, width: int, dtype: torch.dtype = torch.float32) -> Data:
        generator = torch.Generator().manual_seed(0)
        weight = torch.empty(vocabulary, width, dtype=dtype).normal_(std=4 / width**0.5, generator=generator)
        hidden = torch.empty(tokens, width, dtype=dtype).normal_(generator=generator)
        targets = torch.randint(vocabulary, (tokens,), generator=generator)
        return Data(hidden.requires_grad_(), weight.requires_grad_(), targets)

    def run(self, logprobs: Callable[[Data], Tensor]) -> Tensor:
        """Forward and backward: the log-probs; gradients are in ``hidden.grad`` and ``weight.grad``."""
        self.hidden.grad = self.weight.grad = None
        found = logprobs(self)
        found.mean().backward()
        return found.detach()

    def double(self) -> Data:
        hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (self.hidden, self.weight))
        return Data(hidden, weight, self.targets)


def ours(data: Data) -> Tensor:
    return token_logprobs(data.hidden, data.weight, data.targets, 1.0).logprobs


def naive(data: Data) -> Tensor:
    every = torch.nn.functional.linear(data.hidden, data.weight).log_softmax(dim=1)
    return every.gather(1, data.targets[:, None])[:, 0]


SIDES = {"ours": ours, "naive": naive}


def peak_megabytes(work: Callable[[], object]) -> float:
    """Megabytes that ``work`` needs at most beyond what this process holds now (Linux)."""
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work()
    return (_status("VmHWM") - before) / MB


def measure_peak(side: str, tokens: int, dtype: str) -> float:
    """In this process, after a small run that loads what the libraries load once."""
    Data.random(8, 1000, HIDDEN, getattr(torch, dtype)).run(SIDES[side])
    data = Data.random(tokens, VOCABULARY, HIDDEN, getattr(torch, dtype))
    return peak_megabytes(partial(data.run, SIDES[side]))


def measure_seconds(runs: int) -> list[list[float]]:
    """Of both sides, in turn."""
    data = Data.random(SMALL, VOCABULARY, HIDDEN)

    def seconds(side: str) -> float:
        started = time.perf_counter()
        data.run(SIDES[side])
        return time.perf_counter() - started

    return alternate(runs, partial(seconds, "ours"), partial(seconds, "naive"))


def measure_errors(side: str, tokens: int = EXACT, vocabulary: int = VOCABULARY, width: int = HIDDEN) -> list[float]:
    """Against float64: the largest error of a log-prob, and ‖error‖ / ‖gradient‖ of hidden states and of the weight."""
    data = Data.random(tokens, vocabulary, width)
    exact = data.double()
    expected, found = exact.run(naive), data.run(SIDES[side])
    errors = [float((found - expected).abs().max())]
    for own, true in ((data.hidden.grad, exact.hidden.grad), (data.weight.grad, exact.weight.grad)):
        assert own is not None
        assert true is not None
        errors.append(float((own - true).norm() / true.norm()))
    return errors


def rows(runs: int) -> list[Row]:
    """Every figure from a process of its own."""
    large: float = _ask("peak", "ours", LARGE, "float32")
    low: float = _ask("peak", "ours", LARGE, "bfloat16")
    small, plain = (float(_ask("peak", side, SMALL, "float32")) for side in SIDES)
    gradient = VOCABULARY * HIDDEN * 4 / MB
    computed = gradient + (plain - gradient) * LARGE / SMALL
    seconds, baseline = _ask("seconds", runs)
    found = [
        summarise(f"head/peak/{LARGE}-tokens/naive-computed", "MB", [large], [computed]),
        summarise(f"head/peak/{LARGE}-tokens/bfloat16", "MB", [low]),
        summarise(f"head/peak/{SMALL}-tokens", "MB", [small], [plain]),
        summarise(f"head/seconds/{SMALL}-tokens", "s", seconds, baseline),
    ]
    names = ("log-prob-largest", "gradient-of-hidden", "gradient-of-weight")
    for name, own, other in zip(names, _ask("errors", "ours"), _ask("errors", "naive"), strict=True):
        found.append(summarise(f"head/error/{name}", "of float64", [own], [other]))
    return found


def run(json_path: str | Path | None = None, runs: int = RUNS) -> list[Row]:
    """Measure, print the table, write ``json_path`` if given."""
    found = rows(runs)
    publish(found, json_path)
    return found


def _ask(*what: object) -> Any:
    """What a process of its own measured."""
    command = [sys.executable, "-m", "streamrl.bench.head", "--measure", *map(str, what)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def _answer(what: str, *arguments: str) -> object:
    match what:
        case "peak":
            return measure_peak(arguments[0], int(arguments[1]), arguments[2])
        case "seconds":
            return measure_seconds(int(arguments[0]))
        case _:
            return measure_errors(arguments[0])


def _status(field: str) -> float:
    """Bytes, by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(_answer(*sys.argv[2:])))
    else:
        run(next(iter(sys.argv[1:]), None))

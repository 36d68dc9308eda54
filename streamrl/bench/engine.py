"""The embedded engine against static ``generate`` of transformers: same model, same threads, in turn, in one process.

::

    equal       64 requests × 64 tokens                        tokens/s
    long-tail   256 requests, median 32, up to 256 tokens,     useful tokens/s
                64 slots against static batches of 64 that run to their longest
    short       1,024 answers of 3 to 5 tokens, 8 per prompt    answers/s

Both sides sample at temperature 1 without truncation; the engine returns log-probs as well. Outputs are verified:
lengths on every run, greedy tokens against ``generate`` once. ``python -m streamrl.bench.engine [JSON]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from streamrl.bench.report import Row, alternate, publish, summarise
from streamrl.engines.embedded import EmbeddedEngine
from streamrl.types import SamplingParams

SLOTS = 64
VOCABULARY = 48
RUNS = 3


@dataclass(frozen=True)
class Workload:
    """``prompts[i]`` (token ids) is to be continued by exactly ``lengths[i]`` tokens."""

    name: str
    unit: str
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def amount(self) -> int:
        """What a run produces, in units of the reported rate."""
        return len(self.prompts) if self.unit == "answers/s" else sum(self.lengths)


def build_model(vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A Qwen3 of 1.2M parameters with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def workloads() -> list[Workload]:
    rng = np.random.default_rng(0)

    def prompts(count: int, low: int, high: int) -> list[list[int]]:
        return [rng.integers(0, VOCABULARY, rng.integers(low, high + 1)).tolist() for _ in range(count)]

    tail = np.clip(rng.lognormal(np.log(32), 0.9, 256).astype(int), 4, 256)
    grouped = [prompt for prompt in prompts(128, 5, 9) for _ in range(8)]
    return [
        Workload("equal", "tokens/s", prompts(64, 8, 8), [64] * 64),
        Workload("long-tail", "tokens/s", prompts(256, 8, 8), tail.tolist()),
        Workload("short", "answers/s", grouped, rng.integers(3, 6, len(grouped)).tolist()),
    ]


def static_generate(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, sample: bool) -> torch.Tensor:
    """One static batch: prompts padded on the left, every row ``new_tokens`` long; ``[n, new_tokens]``."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, **how
        )
    return output[:, width:]


def measure_static(model: PreTrainedModel, work: Workload) -> float:
    """Rate of static batches of ``SLOTS``, each of which runs to its longest answer."""
    started = time.perf_counter()
    for first in range(0, len(work.prompts), SLOTS):
        lengths = work.lengths[first : first + SLOTS]
        output = static_generate(model, work.prompts[first : first + SLOTS], max(lengths), sample=True)
        assert output.shape == (len(lengths), max(lengths))
    return work.amount / (time.perf_counter() - started)


async def measure_engine(engine: EmbeddedEngine, work: Workload) -> float:
    """Rate of the engine with all requests asked at once."""
    started = time.perf_counter()
    params = [SamplingParams(max_tokens=length, seed=seed) for seed, length in enumerate(work.lengths)]
    answers = await asyncio.gather(*map(engine.generate, work.prompts, params))
    elapsed = time.perf_counter() - started
    assert [len(answer.token_ids) for answer in answers] == work.lengths
    return work.amount / elapsed


async def verify(engine: EmbeddedEngine, model: PreTrainedModel, work: Workload) -> None:
    """A few greedy answers equal those of ``generate``."""
    for prompt in work.prompts[:4]:
        answer = await engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
        assert answer.token_ids.tolist() == static_generate(model, [prompt], 24, sample=False)[0].tolist()


def _engine_run(runner: asyncio.Runner, engine: EmbeddedEngine, work: Workload) -> float:
    return runner.run(measure_engine(engine, work))


def measure(threads: int) -> list[Row]:
    """All workloads with ``threads`` torch threads on both sides."""
    torch.set_num_threads(threads)
    model = build_model()
    rows = []
    with asyncio.Runner() as runner:
        engine = EmbeddedEngine(model, slots=SLOTS, max_length=512, threads=threads)
        runner.run(engine.start())
        for work in workloads():
            runner.run(verify(engine, model, work))
            contenders = partial(_engine_run, runner, engine, work), partial(measure_static, model, work)
            ours, static = alternate(RUNS, *contenders)
            rows.append(summarise(f"engine/{work.name}/threads-{threads}", work.unit, ours, static))
        runner.run(engine.close())
    return rows


def run(json_path: str | Path | None = None) -> list[Row]:
    """Measure with 1 and 2 threads, print the table, write ``json_path`` if given.

    A process of its own measures, because ``OMP_WAIT_POLICY`` (spinning threads on a shared machine make every figure
    of two threads a matter of luck) is read when torch is loaded.
    """
    command = [sys.executable, "-m", "streamrl.bench.engine", "--measure"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    rows = [Row(**fields) for fields in json.loads(output)]
    publish(rows, json_path)
    return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps([asdict(row) for threads in (1, 2) for row in measure(threads)]))
    else:
        run(*sys.argv[1:2])

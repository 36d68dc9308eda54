"""TRL's ``GRPOTrainer`` on a workload of ``streamrl bench ring``: ``python -m streamrl.bench.trl_peer CONFIG SEED``.

It starts from the same checkpoint as the ring, sees the same training prompts in the same order, samples groups of the
same size, is scored by the same environment and evaluated on the same held-out tasks. The last line of stdout is a
``Measured`` as JSON. Needs ``pip install 'streamrl[bench]'``.

Settings tuned by hand on another checkpoint of two-digit addition, and not retuned here: no advantage standard
deviation, Adam β2 0.999 and a rate of 1e-4 that falls linearly to 0 over 500 steps. What TRL spends on evaluation does
not count as its time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from streamrl.bench.ring import DISCARDED, TARGET_ACCURACY, WORKLOADS, Measured, Workload
from streamrl.clock import Clock, RealClock
from streamrl.config import load_config
from streamrl.envs.environment import Completion, Environment, Reward, Task, load_environment
from streamrl.envs.split import Split
from streamrl.errors import ConfigError
from streamrl.policy.model import load_model, load_tokenizer, prepare_model
from streamrl.policy.warmup import Lesson
from streamrl.schema import Config

LEARNING_STEPS, RATE_STEPS = 500, DISCARDED + 10
"""Optimizer steps where learning is measured, unless the target is reached before, and where only the rate is."""
THREADS = 2
"""torch threads: one a core of the machine that the figures come from, as the ring's trainer has."""


@dataclass(frozen=True)
class Answered:
    """A policy that has answered already, so that an environment scores what somebody else sampled: by its text."""

    text: str

    async def complete(self, text: str, max_tokens: int | None = None, stop: Any = None) -> Completion:
        return Completion(self.text, (), "stop")


class Watch(TrainerCallback):
    """Takes the time of every step, evaluates every ``every`` steps and ends training at ``TARGET_ACCURACY``.

    The clock of training starts with the first step and stands still during evaluations. ``every`` 0: no evaluation.
    """

    def __init__(self, evaluate: Callable[[Any], float], every: int, clock: Clock) -> None:
        self._evaluate = evaluate
        self._every = every
        self._clock = clock
        self._started: float | None = None
        self.ended: list[float] = []
        """Seconds of training at the end of each step."""
        self.seconds_to_target: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._started is None:
            self._started = self._clock.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._started is not None
        now = self._clock.now()
        self.ended.append(now - self._started)
        if not self._every or len(self.ended) % self._every:
            return
        accuracy = self._evaluate(kwargs["model"])
        self._started += self._clock.now() - now
        print(f"trl: step {len(self.ended)}, {self.ended[-1]:.1f} s, accuracy {accuracy:.1%}", file=sys.stderr)
        if accuracy >= TARGET_ACCURACY:
            self.seconds_to_target = self.ended[-1]
            control.should_training_stop = True


def check_installed() -> None:
    """Raise ``ConfigError`` where TRL or what it needs is missing."""
    for package in ("trl", "datasets"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--peer trl: {package} is not installed; pip install 'streamrl[bench]'")


def score(environment: Environment, tasks: Sequence[Task], texts: Sequence[str]) -> list[float]:
    """The environment's reward of each text, as the one answer of an episode on its task."""

    async def rewards() -> list[float | Reward]:
        return [await environment.episode(task.copy(), Answered(text)) for task, text in zip(tasks, texts, strict=True)]

    return [each.value if isinstance(each, Reward) else float(each) for each in asyncio.run(rewards())]


def amount(workload: Workload, token_ids: Sequence[Sequence[int]]) -> int:
    """What a step counts in the workload's unit: answers, or sampled tokens with the end token but no padding."""
    return len(token_ids) if workload.unit == "answers/s" else sum(map(len, token_ids))


def rate(amounts: Sequence[int], ended: Sequence[float]) -> float:
    """Amount per second from the end of step ``DISCARDED`` on; both have one entry per step."""
    assert len(amounts) == len(ended) > DISCARDED
    return sum(amounts[DISCARDED:]) / (ended[-1] - ended[DISCARDED - 1])


def measure(config: Config, workload: Workload) -> Measured:
    """Train on ``workload`` and say how fast that went; raises ``ConfigError`` without TRL."""
    check_installed()
    torch.set_num_threads(THREADS)
    environment = load_environment(config)
    split = Split.of(environment, config)
    checkpoint = prepare_model(config, lambda index: _lesson(split.train(index)), lambda *_: None)
    tokenizer = load_tokenizer(checkpoint)
    held_out = split.held_out(config.eval.tasks)
    steps = LEARNING_STEPS if workload.measures_learning else RATE_STEPS
    tasks = [split.train(index) for index in range(steps * config.group.per_step)]
    amounts: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        amounts.append(amount(workload, completion_ids))
        return score(environment, [tasks[each] for each in index], completions)

    def accuracy(model: Any) -> float:
        texts = _greedy(model, tokenizer, [task.prompt for task in held_out], config.sampling.max_tokens)
        return sum(value >= 1.0 for value in score(environment, held_out, texts)) / len(held_out)

    watch = Watch(accuracy, config.eval.every if workload.measures_learning else 0, RealClock())
    model = load_model(checkpoint, config.model.dtype)
    _train(config, model, tokenizer, [task.prompt for task in tasks], reward, watch)
    return Measured(rate(amounts, watch.ended), watch.seconds_to_target)


def _lesson(task: Task) -> Lesson:
    return [(task.prompt, False), (task.answer or "", True)]


def _greedy(model: Any, tokenizer: Any, prompts: list[str], max_tokens: int) -> list[str]:
    tokenizer.padding_side = "left"  # as TRL pads
    rows = tokenizer(prompts, padding=True, return_token_type_ids=False, return_tensors="pt")
    model.eval()
    with torch.no_grad():
        tokens = model.generate(**rows, do_sample=False, max_new_tokens=max_tokens)
    model.train()
    return tokenizer.batch_decode(tokens[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)


def _train(
    config: Config, model: Any, tokenizer: Any, prompts: list[str], reward: Callable[..., list[float]], watch: Watch
) -> None:
    from datasets import Dataset
    from huggingface_hub import constants
    from trl import GRPOConfig, GRPOTrainer

    constants.HF_HUB_DISABLE_TELEMETRY = True  # TRL reports every trainer that is built, over the network
    with tempfile.TemporaryDirectory(prefix="streamrl-trl-") as folder:
        settings = GRPOConfig(
            output_dir=folder,
            seed=config.seed,
            max_steps=len(prompts) // config.group.per_step,
            per_device_train_batch_size=config.group.per_step * config.group.size,
            num_generations=config.group.size,
            shuffle_dataset=False,
            max_completion_length=config.sampling.max_tokens,
            temperature=config.sampling.temperature,
            learning_rate=1e-4,
            lr_scheduler_type="linear",
            adam_beta2=0.999,
            loss_type="dapo",  # the mean over the tokens of the batch
            scale_rewards="none",
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )  # by default: clipping at 0.2, no KL term, one update per answer, data loaded in this process
        data = Dataset.from_dict({"prompt": prompts, "index": list(range(len(prompts)))})
        GRPOTrainer(model, reward, settings, data, processing_class=tokenizer, callbacks=[watch]).train()


def main(name: str, seed: str) -> None:
    """``name`` is that of a workload, or the path of a YAML file that is named like one."""
    workload = {each.config: each for each in WORKLOADS}[Path(name).stem]
    try:
        measured = measure(load_config(name, [f"seed={seed}"]), workload)
    except ConfigError as error:
        sys.exit(f"streamrl: {error}")
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main(*sys.argv[1:])

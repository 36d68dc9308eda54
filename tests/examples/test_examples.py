"""Each example runs as its README says, learns, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from example_runs import ROOT, Example, example

from streamrl.actors.planning import estimators
from streamrl.actors.recording import first_checkpoint, journal_folder
from streamrl.buffers.offer import Planner
from streamrl.buffers.replay import rank_batch, recorded_steps
from streamrl.config import load_config
from streamrl.policy.learner import PackedPolicy
from streamrl.policy.model import load_model
from streamrl.policy.packing import pack
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.schema import Config
from streamrl.types import RankBatch, Trajectory

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session keeps warmed-up models; empty at first, as on a user's machine."""
    return tmp_path_factory.mktemp("cache")


def assert_learned(run: Example, by: float) -> None:
    """Some version answered held-out tasks better than the first; the last one may have had a bad step before it."""
    summary = run.summary()
    assert (summary["status"], summary["groups"]["lost"]) == ("completed", 0)
    best = max(step["eval/accuracy"] for step in run.metrics() if "eval/accuracy" in step)
    assert best >= summary["eval_first"] + by


def test_guess_the_number_learns_to_ask_well(tmp_path: Path, cache: Path):
    with example("guess_the_number", tmp_path, cache) as run:
        assert run.wait(run.launch("steps=250")) == 0, run.output(0)
        assert_learned(run, by=0.2)


def test_the_calculator_agent_learns_to_call_its_tool(tmp_path: Path, cache: Path):
    with example("calculator", tmp_path, cache) as run:
        assert run.wait(run.launch("buffer.keep=all", "steps=60")) == 0, run.output(0)
        assert_learned(run, by=0.4)
        batch, config = first_batch(run)
        assert_results_are_context(batch)
        assert_scored_as_sampled(batch, config, first_checkpoint(run.run_dir))


def test_a_mixture_of_families_learns_and_reports_each_of_them(tmp_path: Path, cache: Path):
    pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")
    with example("reasoning_gym_mixture", tmp_path, cache) as run:
        assert run.wait(run.launch()) == 0, run.output(0)
        assert_learned(run, by=0.1)
        steps = run.metrics()
        for family in ("basic_arithmetic", "spell_backward"):
            assert any(step.get(f"reward/{family}/mean") for step in steps), family


def test_an_agent_of_the_openai_sdk_learns_without_knowing(tmp_path: Path, cache: Path):
    pytest.importorskip("openai", reason="the package openai is not installed")
    assert "streamrl" not in (ROOT / "examples/sdk_agent/agent.py").read_text()
    with example("sdk_agent", tmp_path, cache) as run:
        assert run.wait(run.launch()) == 0, run.output(0)
        assert_learned(run, by=0.3)


def test_a_run_learns_from_what_another_process_plays(tmp_path: Path, cache: Path):
    with example("attached", tmp_path, cache) as run:
        launched = run.launch()
        run.wait_for(run.run_dir / "process.json")
        attached = run.start("attach", str(run.run_dir))
        assert run.wait(launched) == 0, run.output(launched)
        assert run.wait(attached) == 0, run.output(attached)
        assert "attached to rollouter-0 of run attached: 8 workers" in run.output(attached)
        assert_learned(run, by=0.25)


def first_batch(run: Example) -> tuple[RankBatch, Config]:
    """What the run trained on in its first step, by its journal, and its settings."""
    config = load_config(str(run.run_dir / "config.yaml"))
    step = next(recorded_steps(journal_folder(run.run_dir), config.buffer.epochs_per_group))
    return rank_batch(step, Planner(config, *estimators(config)), 0, config.max_lag), config


def assert_results_are_context(batch: RankBatch) -> None:
    """No token of what the tool gave has a weight in the loss, and all that the policy sampled has one."""
    groups = [group for micro_batch in batch.micro_batches for group in micro_batch]
    trajectories = [each for group in groups for each in group.trajectories]
    results = [_result(each) for each in trajectories]
    assert any(len(result) > 2 for result in results)
    for each, result in zip(trajectories, results, strict=True):
        assert not each.sampled[result].any()
    packed = pack(groups, batch.version, batch.oldest_allowed, row_tokens=1024)
    for place, each in enumerate(trajectories):
        trained = packed.target[packed.trajectory == place].numpy()
        np.testing.assert_array_equal(trained, each.tokens[each.sampled])


def _result(trajectory: Trajectory) -> np.ndarray:
    """Positions of a tool's result with the tokens of the template round it; empty where no tool was called."""
    tool, assistant = character_tokenizer().convert_tokens_to_ids(["<|tool|>", "<|assistant|>"])
    given = np.flatnonzero(~trajectory.sampled)
    start = given[trajectory.tokens[given] == tool]
    if not len(start):
        return start
    ends = given[trajectory.tokens[given] == assistant]
    return np.arange(start[0], ends[ends > start[0]][0] + 1)


def assert_scored_as_sampled(batch: RankBatch, config: Config, checkpoint: Path) -> None:
    """The trainer's forward pass with the first weights gives the log-probs that were recorded while sampling."""
    policy = PackedPolicy(load_model(checkpoint, config.model.dtype))
    assert batch.version == 0
    for groups in batch.micro_batches:
        packed = pack(groups, batch.version, batch.oldest_allowed, row_tokens=1024)
        with torch.no_grad():
            scores = policy(packed, config.sampling.temperature)[0]
        np.testing.assert_allclose(scores.numpy(), packed.behaviour.numpy(), atol=1e-4)

"""vLLM itself at the parity gate: it passes, and a prefix cache without the salt of the version is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance_model import build_model
from parity_support import failed_gate, judged, report_of, weights_of
from vllm_support import salt_alike, settings

from streamrl.config import load_config
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.parity.verdict import Verdict
from streamrl.policy.learner import Learner
from streamrl.policy.model import load_model

Examine = Callable[[], Verdict]


@pytest.fixture(scope="module")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examine]:
    """The verdict on one running engine that keeps prefixes, each time with a first update of its own."""
    model = build_model(Path(tmp_path_factory.mktemp("model")), tied=True)
    config = load_config(
        overrides=settings("engine.prefix_caching=true", "sampling.temperature=0.7", "sampling.top_k=20")
    )
    learner = Learner(config, load_model(str(model.folder), "float32"))
    with asyncio.Runner() as runner:
        engine = runner.run(VllmEngine.start(config, str(model.folder)))

        def run() -> Verdict:
            report = report_of(engine, config, weights_of(learner), model.vocabulary)
            return judged(runner.run(report), learner)

        try:
            yield run
        finally:
            runner.run(engine.close())


def test_vllm_with_a_salted_prefix_cache_passes_every_gate(examine: Examine):
    verdict = examine()
    assert [(gate.name, gate.passed, gate.judged) for gate in verdict.gates] == [
        ("semantics", True, True), ("path", True, True), ("numerics", True, True),
    ]  # fmt: skip
    assert all(line.comparison.tokens > 50 for gate in verdict.gates for line in gate.measured)
    assert all(line.comparison.rms < 1e-4 for gate in verdict.gates for line in gate.measured)


def test_a_prefix_cache_that_is_not_salted_fails_the_path_gate(examine: Examine, monkeypatch: pytest.MonkeyPatch):
    salt_alike(monkeypatch)
    assert failed_gate(examine()) == (
        "path",
        "a prefix cache is stale across a weight update: prompts that were cached before it give other log-probs, "
        "fresh prompts the right ones",
    )

"""One engine and one trainer taken through the gate in one process, as the ring does it over its sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.parity.gate import ParityGate
from streamrl.parity.probe import probe_set
from streamrl.parity.records import EngineReport
from streamrl.parity.rehearsal import AHEAD, EngineProbe
from streamrl.parity.verdict import GateVerdict, Verdict
from streamrl.policy.learner import Learner
from streamrl.policy.parity import answer
from streamrl.schema import Config, ModelConfig, SamplingConfig
from streamrl.types import Generation, SamplingParams

torch.set_num_threads(1)
VOCABULARY = 48
ENGINE = "rollouter-0"


def build(tied: bool = False, seed: int = 0, hidden: int = 32, scale: float = 0.2) -> PreTrainedModel:
    """A Qwen3 whose distributions are far from flat; the same for the same arguments."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            initializer_range=scale,
            attn_implementation="sdpa",
        )
    ).eval()


def settings(temperature: float = 1.0, **sampling: Any) -> Config:
    return Config(
        steps=1, model=ModelConfig(max_length=160), sampling=SamplingConfig(temperature=temperature, **sampling)
    )


class Engine(EmbeddedEngine):
    """The engine under test; subclasses plant one fault each."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model, max_length=160, **{"slots": 32, **options})

    def _turn(self) -> bool:
        """Stands still once nothing runs but what the update is to overtake: its end must not come first."""
        running = [request for request in self._core._table.requests if request is not None]
        if self.version < 0 and running and all(request.params.max_tokens > AHEAD for request in running):
            with self._condition:
                self._condition.wait_for(lambda: self._inbox or self._closing)
        return super()._turn()

    async def sampled_as(self, prompt: Sequence[int], params: SamplingParams, **changed: Any) -> Generation:
        return await super().generate(prompt, replace(params, **changed))


class Trainer(Learner):
    """The trainer under test."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        super().__init__(config, model)


async def report_of(engine: Any, config: Config, tensors: Mapping[str, Any], vocabulary: int) -> EngineReport:
    """The answer of a started engine, which gets ``tensors`` as version 0."""
    probe = EngineProbe(engine, config, probe_set(vocabulary, config), decode=lambda token: f"<{token}>")
    async with asyncio.TaskGroup() as tasks:
        await probe.rehearse(tensors, tasks)
        await engine.pause()
        await engine.load(0, tensors)
        await engine.resume()
        return await probe.report()


def judged(report: EngineReport, learner: Learner) -> Verdict:
    """What the gates say of ``report``, with ``learner`` to answer their questions."""
    gate = ParityGate(learner.config)
    gate.add(ENGINE, report)
    asked = gate.ask([ENGINE])
    while not isinstance(asked, Verdict):
        assert asked is not None
        asked = gate.answer(answer(learner, asked))
    return asked


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.full_parameters()}


def examine(engine: Any, learner: Learner) -> Verdict:
    """What the gates say of ``engine`` when it gets the weights of ``learner``."""

    async def run() -> EngineReport:
        await engine.start()
        try:
            return await report_of(engine, learner.config, weights_of(learner), VOCABULARY)
        finally:
            await engine.close()

    return judged(asyncio.run(run()), learner)


def failed_gate(verdict: Verdict) -> tuple[str, str]:
    """Name of the one gate that failed, and its cause."""
    (gate,) = verdict.failed
    assert gate.cause is not None
    assert gate.engine == ENGINE
    return gate.name, gate.cause.text


def gate_of(verdict: Verdict, name: str) -> GateVerdict:
    return next(gate for gate in verdict.gates if gate.name == name)

"""Each fault that is known to make engine and trainer disagree is planted, and the gate calls it by its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parity_support import Engine, Trainer, build, examine, failed_gate, gate_of, settings

from streamrl.errors import ParityError
from streamrl.parity.probe import probe_set
from streamrl.parity.verdict import summary_of
from streamrl.ports import EngineFacts
from streamrl.types import Generation, SamplingParams


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6}, {"top_p": 0.9, "temperature": 1.3}, {"top_k": 5, "min_p": 0.05}], ids=str
)
def test_an_engine_without_a_fault_passes_every_gate(kv: str, tied: bool, sampling: dict[str, Any]) -> None:
    learner = Trainer(settings(**sampling), build(tied))
    verdict = examine(Engine(build(tied, seed=1), kv=kv), learner)
    assert [(gate.name, gate.passed, gate.judged) for gate in verdict.gates] == [
        ("semantics", True, True), ("path", True, True), ("numerics", True, True),
    ]  # fmt: skip
    assert verdict.warnings == []
    assert all(line.comparison.tokens > 50 for gate in verdict.gates for line in gate.measured)
    assert all(line.comparison.rms < 1e-5 for gate in verdict.gates for line in gate.measured)


def test_a_tensor_without_elements_is_not_taken_for_one_that_is_never_loaded() -> None:
    models = [build(seed=seed) for seed in (0, 1)]
    for model in models:
        model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0)))
    assert examine(Engine(models[1]), Trainer(settings(), models[0])).passed


# Semantics ------------------------------------------------------------------------------------------------------------


class ReturnsRaw(Engine):
    """Samples as asked, returns log-probs of the logits as they came out."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        answer = await super().generate(prompt_ids, params)
        scores = await super().score([*prompt_ids, *answer.token_ids.tolist()], 1.0)
        return replace(answer, logprobs=scores[len(prompt_ids) :])


class SamplesAtOne(Engine):
    """Does not know of temperature when it samples."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self.sampled_as(prompt_ids, params, temperature=1.0)


class SamplesTwiceScaled(Engine):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self.sampled_as(prompt_ids, params, temperature=params.temperature**2)


class ScoresAtOne(Engine):
    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        return await super().score(token_ids, 1.0)


class ScoresAtOneOnly(Engine):
    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        if temperature != 1.0:
            raise ValueError("prompt log-probs are at temperature 1")
        return await super().score(token_ids)


class TruncatesUnasked(Engine):
    """As an engine that reads top_p in the model's generation_config.json."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self.sampled_as(prompt_ids, params, top_p=0.9)


class TruncatesOddly(Engine):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self.sampled_as(prompt_ids, params, top_k=7, top_p=0.85)


class DoesNotRenormalise(Engine):
    """Samples from the truncated distribution, returns log-probs of the whole one."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        answer = await super().generate(prompt_ids, params)
        scores = await super().score([*prompt_ids, *answer.token_ids.tolist()], params.temperature)
        return replace(answer, logprobs=scores[len(prompt_ids) :])


class EndsAtOnce(Engine):
    """As an engine that stops at the end token of a checkpoint, and does not count it."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        answer = await super().generate(prompt_ids, params)
        return replace(answer, token_ids=answer.token_ids[:0], logprobs=answer.logprobs[:0], versions=[])


class AddsAPenalty(Engine):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self.sampled_as(prompt_ids, params, frequency_penalty=0.5)


class DeafToTemperature(Trainer):
    def score_all(self, rows: Any, temperature: float = 1.0, truncation: Any = None) -> list[np.ndarray]:
        return super().score_all(rows, 1.0, truncation)


class DeafToTruncation(Trainer):
    def score_all(self, rows: Any, temperature: float = 1.0, truncation: Any = None) -> list[np.ndarray]:
        return super().score_all(rows, temperature)


@pytest.mark.parametrize(
    ("engine", "trainer", "sampling", "cause"),
    [
        (ReturnsRaw, Trainer, {"temperature": 0.6},
         "raw instead of processed log-probs: sampled at temperature 0.6, returned at 1"),
        (ReturnsRaw, Trainer, {"temperature": 0.6, "top_p": 0.9},
         "raw instead of processed log-probs: sampled at temperature 0.6, returned at 1"),
        (ReturnsRaw, Trainer, {"top_p": 0.9},
         "raw instead of processed log-probs: not renormalised over what top_p=0.9 keeps"),
        (DoesNotRenormalise, Trainer, {"temperature": 0.6, "top_k": 4},
         "raw instead of processed log-probs: temperature is in them, but they are not renormalised over what top_k=4 "
         "keeps"),
        (SamplesAtOne, Trainer, {"temperature": 0.6},
         "temperature applied on one side only: sampling.temperature=0.6, and the engine's log-probs are those at 1"),
        (SamplesTwiceScaled, Trainer, {"temperature": 0.7},
         "temperature applied twice by the engine: sampling.temperature=0.7, and the engine's log-probs are those at "
         "0.49"),
        (Engine, DeafToTemperature, {"temperature": 0.6},
         "temperature applied on one side only: the trainer's log-probs are the same at 0.6 and at 1"),
        (TruncatesUnasked, Trainer, {},
         "top_p=0.9 not replayed by the trainer: the engine truncates, the run's settings say no truncation"),
        (Engine, DeafToTruncation, {"top_p": 0.9},
         "top_p=0.9 not replayed by the trainer: its log-probs are the same without it"),
        (TruncatesOddly, Trainer, {},
         "truncated sampling not replayed by the trainer: every log-prob of the engine lies above the trainer's"),
        (ScoresAtOne, Trainer, {"temperature": 0.6},
         "prompt log-probs at another temperature: asked for 0.6, got 1"),
        (EndsAtOnce, Trainer, {},
         "nothing to compare: the engine answered the part 'in flight' of the probe without a single token"),
        (AddsAPenalty, Trainer, {},
         "the engine's log-probs of sampled tokens follow no known rule, while its prompt log-probs are right"),
    ],
)  # fmt: skip
def test_a_rule_that_differs_fails_the_semantics_gate(
    engine: type[Engine], trainer: type[Trainer], sampling: dict[str, Any], cause: str
) -> None:
    verdict = examine(engine(build()), trainer(settings(**sampling), build()))
    assert failed_gate(verdict) == ("semantics", cause)


def test_an_engine_that_scores_at_temperature_one_only_is_compared_there() -> None:
    verdict = examine(ScoresAtOneOnly(build()), Trainer(settings(0.6), build()))
    assert verdict.passed
    assert all(line.comparison.tokens > 50 for gate in verdict.gates for line in gate.measured)


# Path -----------------------------------------------------------------------------------------------------------------


class Loses(Engine):
    """Loads every tensor but one."""

    lost = "model.layers.1.mlp.up_proj.weight"
    from_version = 0

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        changed = dict(tensors)
        if version >= self.from_version:
            changed[self.lost] = self._core.runner.parameters()[self.lost].clone()
        await super().load(version, changed)


class NeverLoads(Loses):
    from_version = -9


class Swaps(Engine):
    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        one, other = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
        await super().load(version, {**tensors, one: tensors[other], other: tensors[one]})


class LagsBehind(Engine):
    """Says that it serves a version when it has loaded the one before."""

    _last: Mapping[str, object] | None = None

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        last, self._last = self._last, {name: tensor.clone() for name, tensor in tensors.items()}  # type: ignore[attr-defined]
        await super().load(version, tensors if last is None else last)


class Stuck(Engine):
    """Its weights do not change any more once it serves."""

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        await super().load(version, self._core.runner.parameters() if version == 0 else tensors)


class CannotTell:
    """Any engine, without the capability of digests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "digests":
            raise AttributeError(name)
        return getattr(self._engine, name)


BLOCK = 64
"""Tokens of one block of the prefix cache below."""


class KeepsPrefixes(Engine):
    """A prefix cache without a salt: keys and values of a prefix that was seen before are taken from then."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        runner = self._core.runner
        prefill, cache = runner.prefill, runner.cache
        kept: dict[bytes, list[tuple[torch.Tensor, torch.Tensor]]] = {}

        def cached_prefill(prompts: Any, sources: Any, targets: Any) -> torch.Tensor:
            hidden: torch.Tensor = prefill(prompts, sources, targets)
            for source, target in zip(sources, targets, strict=True):
                prefix = np.asarray(prompts[source])[:BLOCK]
                if len(prefix) < BLOCK:
                    continue
                layers = [(layer.keys[target, :, :BLOCK], layer.values[target, :, :BLOCK])
                          for layer in cache.slot_layers]  # fmt: skip
                old = kept.setdefault(prefix.tobytes(), [(keys.clone(), values.clone()) for keys, values in layers])
                for (keys, values), (old_keys, old_values) in zip(layers, old, strict=True):
                    keys.copy_(old_keys)
                    values.copy_(old_values)
            return hidden

        runner.prefill = cached_prefill  # type: ignore[method-assign]


class LabelsEarly(Engine):
    """The last token of the old weights counts as one of the new ones."""

    shift = -1

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        answer = await super().generate(prompt_ids, params)
        if len(answer.versions) == 2:
            (old, count), (new, rest) = answer.versions
            return replace(answer, versions=[(old, count + self.shift), (new, rest - self.shift)])
        return answer


class LabelsLate(LabelsEarly):
    shift = 1


class ClaimsToRecompute(Engine):
    """Keeps the keys and values of the old weights where the new ones should have made them anew."""

    def facts(self) -> EngineFacts:
        return replace(super().facts(), kv="recompute")


@pytest.mark.parametrize(
    ("engine", "kv", "cause"),
    [
        # With kv=keep the last update changes a norm alone: every other tensor was loaded by the one before.
        (Loses, "recompute", "tensor model.layers.1.mlp.up_proj.weight not loaded: the engine holds what was there "
         "before the update"),
        (NeverLoads, "keep", "tensor model.layers.1.mlp.up_proj.weight not loaded: no update changes what the engine "
         "holds"),
        (Swaps, "keep", "tensors model.layers.0.self_attn.k_proj.weight and model.layers.0.self_attn.v_proj.weight are "
         "swapped"),
        (Stuck, "keep", "the weights are one version behind: the engine holds those of before the update"),
        (LagsBehind, "keep", "the weights are one version behind: the engine holds those of before the update"),
        (LagsBehind, "recompute", "the weights are one version behind: the engine holds those of before the update"),
        (KeepsPrefixes, "keep", "a prefix cache is stale across a weight update: prompts that were cached before it "
         "give other log-probs, fresh prompts the right ones"),
        (LabelsEarly, "keep", "labels are off by one: the first tokens labelled with the new version were sampled by "
         "the old one"),
        (LabelsEarly, "recompute", "labels are off by one: the first tokens labelled with the new version were sampled "
         "by the old one"),
        (LabelsLate, "keep", "labels are off by one: the last tokens labelled with the old version were sampled by the "
         "new one"),
        (ClaimsToRecompute, "keep", "wrong keys and values after resume: requests in flight do not sample by the new "
         "weights over recomputed keys and values"),
    ],
)  # fmt: skip
def test_an_update_that_goes_wrong_fails_the_path_gate(engine: type[Engine], kv: str, cause: str) -> None:
    assert failed_gate(examine(engine(build(), kv=kv), Trainer(settings(), build()))) == ("path", cause)


def test_an_engine_that_cannot_tell_its_tensors_is_found_one_version_behind_by_its_scores() -> None:
    name, cause = failed_gate(examine(CannotTell(Stuck(build())), Trainer(settings(), build())))
    assert (name, cause) == (
        "path", "the weights are one version behind: the engine scores as it did before the update",
    )  # fmt: skip


@pytest.mark.parametrize("engine", [Loses, Swaps])
def test_wrong_weights_of_an_engine_that_cannot_tell_its_tensors_fail_all_the_same(engine: type[Engine]) -> None:
    verdict = examine(CannotTell(engine(build(seed=1), kv="recompute")), Trainer(settings(), build()))
    name, cause = failed_gate(verdict)
    assert name == "numerics"
    assert cause.startswith("engine and trainer differ by more than rounding")


def test_requests_that_end_before_the_update_are_told_of_and_hold_nothing_up() -> None:
    config = settings()
    config.model.max_length = 12  # room for 3 tokens, and the request that tells takes 4
    verdict = examine(Engine(build(seed=1)), Trainer(config, build()))
    assert verdict.passed
    assert verdict.warnings == ["rollouter-0: in flight: not checked, the requests ended before the update"]


@pytest.mark.parametrize(("slots", "rows"), [(3, 2), (1, 0)])
def test_no_more_requests_are_left_in_flight_than_slots_hold_beside_the_one_that_tells(slots: int, rows: int) -> None:
    config = settings()
    config.engine.slots = slots
    engine = Engine(build(seed=1), slots=slots)
    verdict = examine(engine, Trainer(config, build()))
    assert verdict.passed
    assert verdict.warnings == (
        [] if rows else ["rollouter-0: in flight: not checked, which needs engine.slots=2 or more"]
    )
    (in_flight,) = [line for line in gate_of(verdict, "path").measured if line.what == "in flight"]
    assert (in_flight.comparison.tokens > 0) == (rows > 0)


# Numerics -------------------------------------------------------------------------------------------------------------


class Overflows(Engine):
    """Prompt log-probs that are no numbers, before the update and after it."""

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        scores = await super().score(token_ids, temperature)
        scores[-1] = np.nan
        return scores


def test_log_probs_that_are_no_numbers_fail_and_are_not_taken_for_those_of_before_the_update() -> None:
    verdict = examine(CannotTell(Overflows(build())), Trainer(settings(), build()))
    name, cause = failed_gate(verdict)
    assert name == "numerics"
    assert cause.startswith("engine and trainer differ by more than rounding: rms nan")
    assert json.loads(json.dumps(summary_of(verdict), allow_nan=False))["numerics"]["rms"] is None


class ClaimsFullHead(Engine):
    def facts(self) -> EngineFacts:
        return replace(super().facts(), head_dtype="float32")


@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_head_on_one_side_is_refused(tied: bool) -> None:
    verdict = examine(
        Engine(build(tied, hidden=1024), head_dtype="bfloat16"), Trainer(settings(), build(tied, hidden=1024))
    )
    name, cause = failed_gate(verdict)
    assert name == "numerics"
    assert cause.startswith("the head multiplies in different dtypes: bfloat16 in the engine, float32 in the trainer")
    assert ("(tied to the embedding)" in cause) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_head_shows_in_the_numbers_although_the_engine_denies_it(tied: bool) -> None:
    verdict = examine(
        ClaimsFullHead(build(tied, hidden=1024), head_dtype="bfloat16"), Trainer(settings(), build(tied, hidden=1024))
    )
    assert failed_gate(verdict)[0] == "numerics"
    assert gate_of(verdict, "numerics").worst.comparison.rms > 10 * gate_of(verdict, "numerics").worst.limits.rms


@pytest.mark.parametrize(
    ("claimed", "cause"),
    [
        (
            {"dtype": "bfloat16"},
            "the body computes in different dtypes: bfloat16 in the engine, float32 in the trainer",
        ),
        ({"tied": True}, "head and embedding are one parameter in the engine and two in the trainer"),
    ],
)
def test_facts_that_differ_are_refused_whatever_the_numbers_say(claimed: dict[str, Any], cause: str) -> None:
    engine = Engine(build())
    found = engine.facts
    engine.facts = lambda: replace(found(), **claimed)  # type: ignore[method-assign]
    assert failed_gate(examine(engine, Trainer(settings(), build()))) == ("numerics", cause)


def test_paths_that_may_blur_labels_are_warned_of() -> None:
    engine = Engine(build())
    found = engine.facts
    engine.facts = lambda: replace(found(), async_scheduling=True)  # type: ignore[method-assign]
    verdict = examine(engine, Trainer(settings(), build()))
    assert verdict.passed
    assert verdict.warnings == [
        "rollouter-0: async scheduling is on: version labels may come a token late; engine.async_scheduling=false"
    ]


# Liveness -------------------------------------------------------------------------------------------------------------


class NeverAnswers(Engine):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def test_an_engine_that_never_answers_ends_the_rehearsal_with_a_name() -> None:
    config = settings()
    config.sync.timeout_s = 0.05
    with pytest.raises(ExceptionGroup) as caught:
        examine(NeverAnswers(build()), Trainer(config, build()))
    (error,) = caught.value.exceptions
    assert isinstance(error, ParityError), "a fresh process would be no faster"
    # Before the publisher gives the engine up, which would leave no reason behind.
    assert str(error) == "the engine took over 0.04 s to rehearse the first weight update; raise sync.timeout_s"


def test_the_probe_is_the_same_in_every_process_and_fits_the_model() -> None:
    config = settings()
    config.model.max_length = 12
    probe = probe_set(5, config)
    assert probe == probe_set(5, config)
    assert all(len(row) <= 12 for row in probe.scored)
    assert all(len(prompt) + probe.sampled <= 12 for prompt in (*probe.prompts, *probe.sharing))
    assert all(len(prompt) + probe.in_flight <= 12 for prompt in probe.overtaken)
    assert {token for row in (*probe.scored, *probe.prompts) for token in row} <= set(range(5))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["float32", "bfloat16"])
def test_bfloat16_bodies_with_equal_heads_pass_within_the_limits_of_their_dtype(tied: bool, head: str) -> None:
    config = settings()
    config.model.dtype, config.model.head_dtype = "bfloat16", head
    verdict = examine(Engine(build(tied).to(torch.bfloat16), head_dtype=head), Trainer(config, build(tied)))
    assert verdict.passed, [gate.cause for gate in verdict.gates]
    assert 1e-4 < gate_of(verdict, "numerics").worst.comparison.rms < 0.05

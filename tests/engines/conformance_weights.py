"""Scores, loads, updates with requests in flight."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conformance_case import GREEDY, TEMPERATURES, EngineCase, Serving, check_all, generate_all, prompts

from streamrl.errors import WeightSyncError
from streamrl.types import Generation, SamplingParams, expand_versions


class WeightConformance(Serving):
    """Every tensor arrives, every token is labelled, what does not fit is refused."""

    def test_facts_are_what_really_runs(self, engine_case: EngineCase) -> None:
        facts, model = engine_case.engine.facts(), engine_case.model
        assert facts.engine.startswith(engine_case.name)
        assert (facts.dtype, facts.head_dtype) == (str(model.dtype)[6:], str(model.head_dtype)[6:])
        assert (facts.tied, facts.logprobs, facts.kv) == (model.tied, "processed", engine_case.kv)

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_scores_are_the_references_at_every_temperature_that_is_served(
        self, engine_case: EngineCase, temperature: float
    ) -> None:
        rows = [*prompts(5, longest=60, seed=8), [9], [9, 9, 9, 9, 9, 9]]

        async def run() -> None:
            if temperature not in engine_case.score_temperatures:
                with pytest.raises(ValueError, match="temperature"):
                    await engine_case.engine.score(rows[0], temperature)
                return
            scores = await asyncio.gather(*(engine_case.engine.score(row, temperature) for row in rows))
            for row, score in zip(rows, scores, strict=True):
                assert (score.dtype, score.shape, score[0]) == (np.float32, (len(row),), 0)
                expected = engine_case.model.score("A", row, temperature)
                np.testing.assert_allclose(score, expected, rtol=0, atol=engine_case.tolerance)

        engine_case.run(run())

    def test_every_load_replaces_every_tensor(self, engine_case: EngineCase) -> None:
        """Each score depends on every tensor, by far more than the tolerance."""
        row = prompts(1, longest=60, seed=9)[0] + list(range(8, 60))

        async def run() -> None:
            for which in ("B", "A", "late", "B", "A"):
                version = await engine_case.install(which)
                assert engine_case.engine.version == version
                score = await engine_case.engine.score(row)
                expected = engine_case.model.score(which, row)
                np.testing.assert_allclose(score, expected, rtol=0, atol=engine_case.tolerance, err_msg=which)

        engine_case.run(run())

    def test_a_version_that_comes_again_after_a_roll_back_serves_its_new_weights(self, engine_case: EngineCase) -> None:
        """Nothing that is kept by version may be taken for that of the version before."""
        asked = [(prompt * 4, GREEDY) for prompt in prompts(3, seed=12)]

        async def run() -> None:
            version = engine_case.engine.version
            await generate_all(engine_case, asked)
            await engine_case.install("B", version + 1)
            await generate_all(engine_case, asked)
            await engine_case.install("late", version)
            await generate_all(engine_case, asked)
            await engine_case.install("A", version + 1)
            for answer in await generate_all(engine_case, asked):
                assert answer.versions == [(version + 1, GREEDY.max_tokens)]

        engine_case.run(run())

    @pytest.mark.parametrize("other", ["late", "B"])
    def test_groups_in_flight_survive_updates_and_every_token_has_the_logprob_of_its_versions_weights(
        self, engine_case: EngineCase, other: str
    ) -> None:
        """``late`` leaves keys and values as they are, so it shows the labels alone; ``B`` shows the KV policy too."""
        first, case = engine_case.engine.version, engine_case
        asked = [
            (prompt, SamplingParams(max_tokens=6 + 8 * (4 * group + member), seed=10 * group + member))
            for group, prompt in enumerate(prompts(6, seed=10))
            for member in range(4)
        ]

        async def run() -> list[Generation]:
            tasks = [asyncio.ensure_future(case.engine.generate(prompt, params)) for prompt, params in asked]
            for which in (other, "A", other):
                ended = sum(task.done() for task in tasks)
                while sum(task.done() for task in tasks) == ended:
                    pending = [task for task in tasks if not task.done()]
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                await case.install(which)
            return list(await asyncio.gather(*tasks))

        answers = case.run(run())
        assert [len(answer.token_ids) for answer in answers] == [params.max_tokens for _, params in asked]
        check_all(case, asked, answers)
        assert {version for answer in answers for version, _ in answer.versions} == set(range(first, first + 4))
        assert max(len(answer.versions) for answer in answers) >= 3, "the updates were in flight"
        self._labels_can_be_told(case, asked, answers, other)

    @staticmethod
    def _labels_can_be_told(
        case: EngineCase, asked: list[tuple[list[int], SamplingParams]], answers: list[Generation], other: str
    ) -> None:
        """Tokens next to a boundary would have another log-prob under the other weights: a wrong label is seen."""
        told: Counter[bool] = Counter()
        for (prompt, _), answer in zip(asked, answers, strict=True):
            labels = expand_versions(answer.versions)
            tokens = [*prompt, *answer.token_ids.tolist()]
            scores = {which: case.model.score(which, tokens)[len(prompt) :] for which in ("A", other)}
            for boundary in np.flatnonzero(np.diff(labels)):
                for index in (boundary, boundary + 1):
                    told[abs(scores["A"][index] - scores[other][index]) > 5 * (case.rms or case.tolerance)] += 1
        assert told[True] > 4 * told[False], told

    def test_a_load_is_refused_while_generating(self, engine_case: EngineCase) -> None:
        async def run() -> None:
            version = engine_case.engine.version
            with pytest.raises(WeightSyncError, match="pause"):
                await engine_case.engine.load(version + 1, engine_case.model.weights["B"])
            assert engine_case.engine.version == version
            await generate_all(engine_case, [([9, 10], GREEDY)])

        engine_case.run(run())

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "kind"])
    def test_weights_that_do_not_fit_are_refused_whole_and_the_old_ones_serve_on(
        self, engine_case: EngineCase, fault: str
    ) -> None:
        tensors: dict[str, Any] = dict(engine_case.model.weights["B"])
        last = next(name for name, each in reversed(tensors.items()) if each.shape != each.transpose(0, -1).shape)
        if fault == "missing":
            del tensors[last]
        elif fault == "unknown":
            tensors["model.extra.weight"] = torch.zeros(2)
        elif fault == "shape":
            tensors[last] = tensors[last].transpose(0, -1).contiguous()
        elif fault == "dtype":
            tensors[last] = tensors[last].double()
        else:
            tensors[last] = tensors[last].float().numpy()

        async def run() -> None:
            version = engine_case.engine.version
            await engine_case.engine.pause()
            with pytest.raises(WeightSyncError, match="extra" if fault == "unknown" else re.escape(last)):
                await engine_case.engine.load(version + 1, tensors)
            await engine_case.engine.resume()
            assert engine_case.engine.version == version
            await generate_all(engine_case, [(prompt, GREEDY) for prompt in prompts(3, seed=11)])

        engine_case.run(run())

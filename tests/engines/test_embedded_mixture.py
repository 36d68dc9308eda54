"""The embedded engine over a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance_case import EngineCase
from conformance_model import build_model
from conformance_weights import WeightConformance
from embedded_cases import started_engine


@pytest.fixture(scope="module")
def engine_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    model = build_model(tmp_path_factory.mktemp("model"), tied=False, experts=4)
    with EngineCase("embedded", model, lambda: started_engine(model, "keep"), "keep") as case:
        yield case


class TestMixture(WeightConformance):
    def test_digests_are_told_by_the_names_that_travel(self, engine_case: EngineCase) -> None:
        held = engine_case.run(engine_case.engine.digests())
        assert list(held) == list(engine_case.model.weights["A"])

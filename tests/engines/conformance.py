"""What every engine must do, whoever wrote it. Not collected by itself: an engine's test module derives from it.

::

    @pytest.fixture(scope="module")
    def engine_case(tmp_path_factory) -> Iterator[EngineCase]:
        model = build_model(tmp_path_factory.mktemp("model"), tied=True)
        with EngineCase("mine", model, start=..., kv="keep") as case:
            yield case

    class TestMine(Conformance): ...

One engine and one event loop serve the whole module; each test installs the weights that it wants first. The last test
ends the engine.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(*(f"conformance_{part}" for part in ("case", "ending", "life", "sampling", "weights")))

from conformance_case import GREEDY, SHAPES, SLOTS, TEMPERATURES, EngineCase, check_all, generate_all, prompts  # noqa: E402
from conformance_ending import EndingConformance  # noqa: E402 what was not seen to fail says nothing of values
from conformance_life import LifeConformance  # noqa: E402
from conformance_sampling import SamplingConformance  # noqa: E402
from conformance_weights import WeightConformance  # noqa: E402

__all__ = [
    "GREEDY",
    "SHAPES",
    "SLOTS",
    "TEMPERATURES",
    "Conformance",
    "EngineCase",
    "check_all",
    "generate_all",
    "prompts",
]


class Conformance(LifeConformance, WeightConformance, EndingConformance, SamplingConformance):
    """All of it. pytest runs the tests of the last base first, those of ``LifeConformance`` at the end."""

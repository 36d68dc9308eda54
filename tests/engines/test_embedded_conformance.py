"""The embedded engine does what every engine must, under both KV policies, tied and untied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance import Conformance
from conformance_case import EngineCase
from conformance_model import build_model
from embedded_cases import started_engine


@pytest.fixture(scope="module", params=[("tied", "keep"), ("untied", "recompute")], ids="-".join)
def engine_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    head, kv = request.param
    model = build_model(tmp_path_factory.mktemp("model"), tied=head == "tied")
    with EngineCase("embedded", model, lambda: started_engine(model, kv), kv) as case:
        yield case


class TestEmbedded(Conformance):
    pass

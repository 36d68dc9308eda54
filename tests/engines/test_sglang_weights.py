"""The weights' way to SGLang, by memory and by value, and what follows where it refuses them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
from typing import Any

import pytest
import torch
from sglang_support import ABLE, Recorded, engine_over

from streamrl.engines.http_client import Refused
from streamrl.engines.sglang import loader
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.engines.sglang.facts import abilities_of
from streamrl.engines.sglang.processor import Processor, memory_probe
from streamrl.engines.sglang.weights import placed
from streamrl.engines.shelf import Shelf
from streamrl.errors import ActorDied
from streamrl.types import SamplingParams

WEIGHTS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
}
ONE = SamplingParams(max_tokens=1)


class Model:
    """What the loader needs of SGLang's."""

    def load_weights(self, named: Any) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in named}


def loaded(body: bytes, rank: int) -> dict[str, torch.Tensor]:
    """The weights that a process of SGLang finds by ``body``, after what SGLang itself does with it."""
    model = Model()
    loader.load(model, pickle.loads(base64.b64decode(json.loads(body)["serialized_named_tensors"][rank])))
    return model.loaded


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_of_a_server_finds_each_version_in_our_memory_by_a_small_body(rank: int) -> None:
    shelf = Shelf()
    for version, sign in ((3, 1), (4, -1)):
        weights = {name: sign * tensor for name, tensor in WEIGHTS.items()}
        body = placed(shelf.put(weights), version=version, flush=True, copies=2)
        assert same(loaded(body, rank), weights)
        told = json.loads(body)
        assert (told["load_format"], told["weight_version"], told["flush_cache"]) == (loader.LOADER, str(version), True)
        assert told["abort_all_requests"] is False
    shelf.close()


def test_the_name_that_sglang_imports_the_loader_by_is_the_loaders() -> None:
    assert loader.LOADER == "streamrl.engines.sglang.loader.load"


def answered(where: dict[str, Any], values: dict[str, list[float]]) -> int:
    return int(Processor()(torch.zeros(1, 8), [memory_probe(where, values)]).argmax())


def test_the_probe_of_the_memory_tells_whether_its_values_are_seen() -> None:
    shelf, values = Shelf(), {"probe": [3.0, 5.0]}
    where = shelf.put({"probe": torch.tensor(values["probe"])})
    assert answered(where, values) == 1
    assert answered(where, {"probe": [3.0, 6.0]}) == 0, "another process of that number holds something else"
    assert answered(where | {"path": f"/proc/{os.getpid()}/fd/1048575"}, values) == 0, "there is no such file here"
    shelf.close()


def test_a_pipe_by_the_path_of_our_memory_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    where = {"path": f"/proc/{os.getpid()}/fd/{reading}", "size": 8, "places": [("probe", [2], "float32", 0)]}
    assert answered(where, {"probe": [3.0, 5.0]}) == 0
    os.close(reading)


INFO = {
    "enable_custom_logit_processor": True, "disable_overlap_schedule": True, "disable_radix_cache": True,
    "sampling_mask_max_tokens": 10, "tp_size": 2, "nnodes": 1, "custom_weight_loader": [loader.LOADER],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"custom_weight_loader": []}, False),
        ({"custom_weight_loader": None}, False),
        ({"enable_custom_logit_processor": False}, False),
        ({"nnodes": 2}, False),
    ],
)
def test_only_a_server_of_one_machine_that_has_our_modules_is_asked_for_our_memory(
    changes: dict[str, Any], expected: bool
) -> None:
    assert abilities_of(INFO | changes).loads_memory is expected


class Refusing(Recorded):
    """Refuses calls of some paths; what it did first may have happened."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__()
        self.path, self.message = path, message

    async def post(self, path: str, body: Any, within_s: float | None = None) -> Any:
        if path == self.path:
            raise Refused("SGLang", path, 400, self.message)
        return await super().post(path, body, within_s)

    async def get(self, path: str) -> Any:
        if path.startswith(self.path):
            raise Refused("SGLang", path, 500, self.message)
        return await super().get(path)


async def install(engine: SglangEngine) -> None:
    await engine.pause()
    await engine.load(0, {})
    await engine.resume()


def test_a_cache_that_was_not_flushed_when_that_was_asked_ends_the_engine() -> None:
    client = Refusing("/update_weights_from_tensor", "Weights were updated, but the cache was not flushed")

    async def run() -> None:
        engine = engine_over(client, caches=True)
        engine._sees_shelf = True
        with pytest.raises(ActorDied, match="half loaded.*cache was not flushed"):
            await install(engine)
        with pytest.raises(ActorDied, match="cache was not flushed"):
            await engine.resume()

    asyncio.run(run())


def test_a_sample_is_delivered_though_the_question_after_it_fails_and_the_next_call_says_so() -> None:
    async def run() -> None:
        engine = engine_over(Refusing("/v1/loads", "out of order"), caches=False)
        answer = await engine.generate([9, 10, 11], ONE)
        assert answer.token_ids.tolist() == [5]
        with pytest.raises(Refused, match="out of order"):
            await engine.generate([9, 10, 11], ONE)

    asyncio.run(run())


@pytest.mark.parametrize(("sees", "load_format"), [(True, loader.LOADER), (False, "flattened_bucket")])
def test_weights_go_by_memory_to_a_server_that_sees_it_and_by_value_to_any_other(sees: bool, load_format: str) -> None:
    client = Recorded()

    async def run() -> None:
        engine = engine_over(client, caches=False, shapes={name: tensor.shape for name, tensor in FLOATS.items()})
        engine._sees_shelf = sees
        await engine.pause()
        await engine.load(6, FLOATS)
        assert engine.version == 6
        await engine.close()

    asyncio.run(run())
    (told,) = [json.loads(body) for path, body in client.asked if path == "/update_weights_from_tensor"]
    assert (told["load_format"], told["weight_version"]) == (load_format, "6")
    assert len(told["serialized_named_tensors"]) == ABLE.copies


FLOATS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([0.5])}

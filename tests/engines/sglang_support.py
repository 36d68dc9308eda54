"""An engine on SGLang over a server that only writes down what it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from streamrl.config import load_config
from streamrl.engines.blueprint import Blueprint
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.engines.sglang.requests import Abilities
from streamrl.sync.names import same_names

ABLE = Abilities(processes=True, overlaps=False, caches=False, masks=100, copies=1, loads_memory=False)


def answer(tokens: list[int], reason: dict[str, Any], spans: list[tuple[str, int, int]]) -> dict[str, Any]:
    labels = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    logprobs = [[-0.5 * token, token, None] for token in tokens]
    meta = {"finish_reason": reason, "output_token_logprobs": logprobs, "weight_versions": labels}
    return {"output_ids": tokens, "meta_info": meta}


class Recorded:
    """``ServerClient`` of a server that answers every request with one token."""

    url = "here"

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def post(self, path: str, body: dict[str, Any], within_s: float | None = None) -> Any:
        self.asked.append((path, body))
        if path != "/generate":
            return None
        counted = {
            "prompt_tokens": 3,
            "cached_tokens": 0,
            "num_retractions": 0,
            "output_token_ids_logprobs": [[[-1.0]]],
        }
        one = answer([5], {"type": "length"}, [("0", 0, 1)])
        one["meta_info"] |= counted | {"input_token_logprobs": [[None], [-1.0], [-1.0]]}
        return one if isinstance(body["input_ids"][0], int) else [one] * len(body["input_ids"])

    async def get(self, path: str) -> Any:
        return {"loads": [{"token_usage": 0.0}]}

    async def close(self) -> None:
        pass

    def generated(self) -> list[dict[str, Any]]:
        return [body for path, body in self.asked if path == "/generate"]


def engine_over(client: Recorded, *, caches: bool, shapes: Mapping[str, torch.Size] | None = None) -> SglangEngine:
    """``shapes``: of the model's parameters; None: it has none."""
    shapes = shapes or {}
    blueprint = Blueprint(shapes, torch.float32, 104, None, same_names(shapes), {})
    engine = SglangEngine(load_config(overrides=["engine=sglang"]), client, None, blueprint, str)  # type: ignore[arg-type]
    engine._abilities = replace(ABLE, caches=caches)
    return engine

"""Penalties and truncation of our semantics, inside SGLang's sampler.

SGLang counts only sampled tokens for the repetition penalty, forgets penalties when a request is retracted, measures
top-p against the whole distribution where top-k is on too, and returns log-probs from before top-k and top-p. So it is
asked for none of these: the scheduler calls ``Processor`` on the raw logits, which come back with −inf where a token is
removed, and what SGLang then returns is the processed distribution. The rollouter names the class in its requests, and
SGLang imports it in its own environment, where streamrl's dependencies are absent.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.engines.sampling import Penalties, penalise, truncate
from streamrl.engines.sglang.loader import sees
from streamrl.types import SamplingParams

HEAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Answers to the probe of the head, by the token that is then sampled."""
HEAD_PROBE: Mapping[str, Any] = {"probe": "head"}


class Processor:
    """SGLang's interface for logit processors: a class that is made without arguments and called once per step."""

    def __call__(self, logits: Tensor, requests: Sequence[Mapping[str, Any]]) -> Tensor:
        """``logits`` float32 ``[n, V]`` before the temperature, and what ``n`` requests want: processed ``[n, V]``."""
        if any("probe" in each for each in requests):  # before the first weights: whatever runs beside it is a probe
            return torch.stack([_answer(row, each) for row, each in zip(logits, requests, strict=True)])
        processed = logits.double()
        if penalties := _penalties(requests):
            rows = torch.from_numpy(penalties.rows).to(logits.device)
            processed[rows] = penalise(processed[rows], penalties)
        cut = [row for row, wanted in enumerate(requests) if wanted["truncates"]]
        if cut:
            temperature, min_p, top_k, top_p = (
                torch.tensor([requests[row][name] for row in cut], device=logits.device, dtype=dtype)
                for name, dtype in (
                    ("temperature", torch.float64),
                    ("min_p", torch.float64),
                    ("top_k", torch.int64),
                    ("top_p", torch.float64),
                )
            )
            kept = truncate(processed[cut] / temperature[:, None], min_p, top_k, top_p)
            processed[cut] = processed[cut].masked_fill(kept.isneginf(), -torch.inf)
        return processed.to(logits.dtype)


def serialised() -> str:
    """How a request names ``Processor``: SGLang's JSON around a pickle that holds nothing but an import path."""
    return json.dumps({"callable": pickle.dumps(Processor).hex()})


def memory_probe(where: Mapping[str, Any], values: Mapping[str, list[float]]) -> dict[str, Any]:
    """Whether ``values`` are seen ``where`` a ``Shelf`` has put them; the answer is token 1 or 0."""
    return {"probe": "memory", "where": where, "values": values}


def wanted(params: SamplingParams) -> dict[str, Any] | None:
    """What ``Processor`` is told of a request; None where SGLang's own sampler does all that is asked."""
    greedy = params.temperature == 0
    truncates = not greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    if not truncates and not penalised(params):
        return None
    return {
        "truncates": truncates,
        "temperature": params.temperature,
        "min_p": params.min_p,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
    }


def penalised(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


def _penalties(requests: Sequence[Mapping[str, Any]]) -> Penalties | None:
    """Of those requests that have some; ``__req__`` is SGLang's own record of a request."""
    names = ("repetition", "presence", "frequency")
    rows = [row for row, each in enumerate(requests) if tuple(each[name] for name in names) != (1, 0, 0)]
    if not rows:
        return None
    asked = [requests[row]["__req__"] for row in rows]
    histories = [[*each.origin_input_ids, *each.output_ids] for each in asked]
    lengths = np.array([len(history) for history in histories])
    tokens = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for line, history in zip(tokens, histories, strict=True):
        line[: len(history)] = history
    repetition, presence, frequency = (np.array([requests[row][name] for row in rows], dtype=float) for name in names)
    prompts = np.array([len(each.origin_input_ids) for each in asked])
    return Penalties(np.array(rows), repetition, presence, frequency, tokens, prompts, lengths)


def _answer(row: Tensor, asked: Mapping[str, Any]) -> Tensor:
    """Logits ``[V]`` that leave one token, which answers a probe."""
    if asked["probe"] == "memory":
        token = int(sees(asked["where"], asked["values"]))
    else:  # the narrowest dtype that holds every logit of ``row`` exactly
        token = [bool((row.to(dtype).to(row.dtype) == row).all()) for dtype in HEAD_DTYPES].index(True)
    answer = torch.full_like(row, -torch.inf)
    answer[token] = 0
    return answer

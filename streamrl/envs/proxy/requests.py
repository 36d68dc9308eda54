"""What the dialects share when they read a request: decoding, limits, and parameters that the proxy does not follow."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from streamrl.envs.episode import Limits
from streamrl.envs.proxy.desk import Seat
from streamrl.envs.proxy.errors import ApiError, bad_request, malformed

_T = TypeVar("_T", bound=msgspec.Struct)

CHOICES = 128
"""``n`` at most."""

HARMLESS = frozenset(
    {
        "metadata",
        "user",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "verbosity",
        "include",
        "context_management",
        "inference_geo",
        "cache_control",
        "betas",
        "speed",
        "stream_options",
    }
)
"""Parameters that say nothing about how tokens are sampled."""

_NAMED_IN_HEADER = 16

_log = logging.getLogger(__name__)


def neutral(limits: Limits) -> dict[str, tuple[Any, ...]]:
    """Sampling parameters that clients send, and the values of each that ask for what the run does anyway."""
    return {
        "temperature": (limits.temperature,),
        "top_p": (limits.top_p,),
        "top_k": (limits.top_k,) if limits.top_k else (0, -1),
        "min_p": (limits.min_p,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "seed": (),
        "response_format": ({"type": "text"},),
        "text": ({"format": {"type": "text"}}, {}),
        "tool_choice": ("auto", {"type": "auto"}),
        "parallel_tool_calls": (True,),
        "reasoning": ({},),
        "reasoning_effort": (),
        "thinking": ({"type": "disabled"},),
        "truncation": ("disabled",),
        "suffix": ("",),
        "echo": (False,),
        "best_of": (1,),
        "background": (False,),
        "functions": ([],),
    }


def decode(body: bytes, shape: type[_T]) -> tuple[_T, dict[str, Any]]:
    """The body as ``shape`` and as it came. Raises ``ApiError`` 400 naming the field that is wrong."""
    try:
        raw = msgspec.json.decode(body)
        if not isinstance(raw, dict):
            raise bad_request("body", f"expected a JSON object, got {type(raw).__name__}")
        return msgspec.convert(raw, shape), raw
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None


def not_followed(raw: dict[str, Any], shape: type[msgspec.Struct], seat: Seat) -> tuple[str, ...]:
    """Names of parameters that want tokens sampled in another way than the run samples, which wins.

    They are counted, and the first of each is logged. Raises ``ApiError`` 400 for the first where the desk is strict.
    """
    usual = neutral(seat.session.episode.limits)
    names = [
        key
        for key, value in raw.items()
        if value is not None
        and key not in shape.__struct_fields__
        and key not in HARMLESS
        and value not in usual.get(key, ())
    ]
    if names and seat.strict:
        raise bad_request(names[0], "the run's own sampling is used; leave this out")
    for key in names:
        counted = f"ignored/{key if key in usual else 'other'}"
        seat.counts[counted] += 1
        if seat.counts[counted] == 1:
            _log.warning("a client set %.40r: the run's own sampling is used (docs/proxy.md)", key)
    return tuple(key if re.fullmatch(r"\w{1,40}", key, re.ASCII) else "?" for key in sorted(names)[:_NAMED_IN_HEADER])


def positive(value: int | None, param: str) -> int | None:
    if value is not None and value < 1:
        raise bad_request(param, f"expected a whole number of at least 1, got {value}")
    return value


def choices(n: int | None) -> int:
    """How many turns a request wants."""
    if n is None:
        return 1
    if not 1 <= n <= CHOICES:
        raise bad_request("n", f"expected 1 to {CHOICES}, got {n}")
    return n


def stop_strings(stop: str | Sequence[str] | None, param: str) -> list[str] | None:
    """Stop strings of a request; None where it gave none."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    for index, text in enumerate(stops):
        if not text:
            raise bad_request(f"{param}[{index}]", "an empty string stops nothing")
    return stops or None


def refuse_top_logprobs(count: int | None, most: int, param: str) -> None:
    if count is not None and count > most:
        raise bad_request(param, "log-probs of the sampled tokens are returned, those of other tokens are not recorded")


def refuse(raw: dict[str, Any], *params: str) -> None:
    """Raise ``ApiError`` 400 for a parameter that changes what is asked, so that ignoring it would be wrong."""
    for param in params:
        if raw.get(param):
            raise ApiError(400, "unsupported_parameter", f"{param}: not supported by this endpoint", param)

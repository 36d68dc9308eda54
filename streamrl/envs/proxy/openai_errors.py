"""Errors as the OpenAI API spells them."""

from __future__ import annotations

from typing import Any

from streamrl.envs.proxy.errors import ApiError
from streamrl.envs.proxy.exchange import Dialect, event

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class OpenAIErrors(Dialect):
    """``{"error": {message, type, param, code}}``."""

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = _TYPES.get(error.status, "invalid_request_error")
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

    def error_event(self, error: ApiError) -> bytes:
        return event(self.error(error))


class ResponsesErrors(OpenAIErrors):
    """As above; in a stream the event ``error``, with the fields of both shapes, which clients look for."""

    def error_event(self, error: ApiError) -> bytes:
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return event({**told, "sequence_number": 0, **self.error(error)}, "error")

"""What the proxy answers when it cannot sample: one exception, which every dialect spells in its own way."""

from __future__ import annotations

import re

import msgspec

from streamrl.errors import StreamRLError


class ApiError(StreamRLError):
    """A request that gets no turn."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        """``code``: for programs. ``param``: path of the field that is wrong, such as ``messages[2].role``."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


def bad_request(param: str, message: str) -> ApiError:
    """400 for one field of the body."""
    return ApiError(400, "invalid_request", f"{param}: {message}", param)


def refused(error: ValueError) -> ApiError:
    """400 for what a session did not take; it names the field first, as in ``messages[2].role: …``."""
    path = re.match(r"[a-z_]\w*[\w.\[\]]*(?=: )", str(error))
    return ApiError(400, "invalid_request", str(error), path[0] if path else None)


def unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message)


def ended() -> ApiError:
    return ApiError(410, "episode_ended", "the episode of this key has ended; an agent must stop when its episode does")


def too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limit} bytes")


def engine_closed() -> ApiError:
    return ApiError(503, "engine_closed", "the engine is closing; the run ends or this rollouter restarts")


def malformed(error: Exception) -> ApiError:
    """400 for a body that is not JSON, or not of the right shape; msgspec says where."""
    if isinstance(error, RecursionError):
        return ApiError(400, "invalid_json", "the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, "invalid_json", f"the body is not JSON: {error}")
    what, _, where = str(error).partition(" - at `")
    path = where.removesuffix("`").removeprefix("$").removeprefix(".")
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        path, what = f"{path}.{missing[1]}".removeprefix("."), "this field is required"
    return bad_request(path or "body", what)

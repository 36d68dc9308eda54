"""A process that compares mathematical answers, one at a time: JSON lines in, JSON lines out. Run as a file.

It ends with its input, or with the process that started it. What takes too long is ended from outside, by a kill.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """``python math_worker.py PARENT_PID MEMORY_BYTES``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # it died before the line above
    memory = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no reply

    import logging

    import math_verify

    logging.disable(logging.CRITICAL)  # it warns of every expression that it cannot read; the reply says so
    _say(replies, {"ready": True})
    for line in sys.stdin:
        try:
            reply = _compare(math_verify, **json.loads(line))
        except MemoryError:
            reply = {"error": f"the comparison needs more than {memory} bytes of memory"}
        _say(replies, reply)


def _compare(library: Any, reference: str, answer: str, digits: int) -> dict[str, Any]:
    """Whether the two are equal; ``parsed`` whether there is an expression in the answer at all."""
    gold = _parse(library, f"${reference}$") if "$" not in reference and "\\boxed" not in reference else []
    gold = gold or _parse(library, reference)
    if not gold:
        return {"error": f"the reference answer {reference!r:.80} cannot be read as mathematics"}
    given = _parse(library, answer)
    equal = bool(given) and library.verify(gold, given, float_rounding=digits, timeout_seconds=None)
    return {"equal": equal, "parsed": bool(given)}


def _parse(library: Any, text: str) -> list[Any]:
    return list(library.parse(text, parsing_timeout=None))


def _say(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()

"""Runs inside of the sandbox: the answer, then calls to its functions and asserts about them.

Input: one JSON job. Output: a line ``TOKEN [place, ok, value]`` for each call and then each assert; what the answer
prints goes elsewhere.
"""

import json
import os
import sys


def main() -> None:
    """Of a process of its own, as ``__main__``."""
    job = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names: dict[str, object] = {"__name__": "answer"}
    exec(compile(job["code"], "answer.py", "exec"), names)

    def reply(place: int, ok: bool, value: object) -> None:
        try:
            text = json.dumps([place, ok, value])
        except (TypeError, ValueError, RecursionError):  # a value that JSON does not have equals no expected one
            text = json.dumps([place, False, None])
        replies.write(f"{job['token']} {text}\n")
        replies.flush()

    place = 0
    for place, call in enumerate(job["calls"]):
        try:
            value = names[call["call"]](*call.get("args", ()), **call.get("kwargs", {}))  # type: ignore[operator]
        except BaseException:  # noqa: BLE001 whatever it raises, this test has failed and the next is tried
            reply(place, False, None)
        else:
            reply(place, True, value)
    for place, test in enumerate(job["asserts"], len(job["calls"])):
        try:
            exec(compile(test, "test.py", "exec"), names)
        except BaseException:  # noqa: BLE001 as above
            reply(place, False, None)
        else:
            reply(place, True, None)


if __name__ == "__main__":
    main()

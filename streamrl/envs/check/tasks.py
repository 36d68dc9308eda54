"""Tasks without a policy: are they the same every time, can they be split, and do they fit the model?

``python -m streamrl.envs.check.tasks`` reads a config as msgpack and writes the fingerprints of its tasks as JSON: what
depends on the process (hashes, ``random``, the order of a set) differs there.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.envs.check.findings import Finding, fine, problem, shortened, warning
from streamrl.envs.codec import Tokenizer
from streamrl.envs.environment import Environment, Task, load_environment
from streamrl.envs.split import Split
from streamrl.errors import ConfigError, EnvironmentFailed
from streamrl.schema import Config

TASKS = 64
"""Training tasks that are looked at."""

FEW_PROMPTS = 16
"""Distinct prompts among ``TASKS`` tasks below which a policy learns them by heart."""

OTHER_PROCESS_S = 120.0
"""Seconds that another process may take to make the tasks."""

SLOW_TASK_S = 0.05
"""Seconds that one task may take: it is made on the event loop, while no other episode goes on."""

_REPEATED = "tasks repeat"


def training_tasks(split: Split) -> list[Task]:
    """The first tasks that a run trains on. Raises ``ConfigError`` and ``EnvironmentFailed`` as a run would."""
    return [split.train(index) for index in range(TASKS)]


def fingerprints(tasks: Sequence[Task]) -> list[str]:
    """What each task consists of, as text; objects of unknown types stand as the names of these."""
    return [
        msgspec.json.encode(
            [each.index, each.prompt, each.answer, each.metadata, each.demonstration, each.tools],
            enc_hook=lambda value: type(value).__name__,
            order="deterministic",
        ).decode()
        for each in tasks
    ]


def check_repeated(config: Config, tasks: Sequence[Task]) -> Finding | None:
    """Whether another instance gives the same tasks, asked backwards; None where all is well so far."""
    split = Split.of(load_environment(config), config)
    again = [split.train(index) for index in reversed(range(len(tasks)))]
    return _difference(fingerprints(tasks), fingerprints(again[::-1]), "in a second instance, asked in another order")


async def check_in_another_process(config: Config, tasks: Sequence[Task]) -> Finding:
    """Whether another process gives the same tasks."""
    other = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        async with asyncio.timeout(OTHER_PROCESS_S):
            written, errors = await other.communicate(msgspec.msgpack.encode(config))
    except TimeoutError:
        return problem(_REPEATED, f"another process made none in {OTHER_PROCESS_S:g} s", "rollouters would not start")
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()
    if other.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return problem(_REPEATED, f"another process failed: {last}", "rollouters are other processes: they fail too")
    theirs = msgspec.json.decode(written, type=list[str])
    found = _difference(fingerprints(tasks), theirs, "in another process")
    return found or fine(_REPEATED, f"{len(tasks)} tasks are the same in a second instance and in another process")


def check_split(split: Split, config: Config, tasks: Sequence[Task]) -> list[Finding]:
    """Whether tasks can be held out, and whether there are enough."""
    check = "held-out split"
    if split.environment.make_task is None:
        return [fine(check, "by index: a function makes its own prompts, so a held-out one may come back in training")]
    try:
        held_out = split.held_out(config.eval.tasks)
    except (ConfigError, EnvironmentFailed) as error:
        return [problem(check, str(error), "the launch would be refused")]
    prompts = {each.prompt for each in tasks}
    if len(prompts) < FEW_PROMPTS:
        detail = f"{len(prompts)} distinct prompts in {len(tasks)} training tasks"
        return [warning(check, detail, "the policy will learn them by heart; give the environment more")]
    if len(held_out) < config.eval.tasks:
        detail = f"{len(held_out)} held-out tasks found, eval.tasks={config.eval.tasks}"
        return [warning(check, detail, "evaluation is coarser than asked for; more distinct prompts give more")]
    return [fine(check, f"{len(held_out)} tasks held out, {len(prompts)} distinct prompts in {len(tasks)} that train")]


def check_texts(tasks: Sequence[Task], tokenizer: Tokenizer, config: Config) -> list[Finding]:
    """Whether prompts and answers fit the tokenizer and the model."""
    texts = {text for each in tasks for text in (each.prompt, each.answer or "") if text}
    if not texts:
        return []
    return [_check_length(tasks, tokenizer, config), *_check_unknown(texts, tokenizer)]


def check_speed(environment: Environment, indices: Sequence[int]) -> Finding | None:
    """Whether a task is made fast enough."""
    began = time.perf_counter()
    for index in indices:
        environment.task(index)
    each_s = (time.perf_counter() - began) / len(indices)
    if each_s <= SLOW_TASK_S:
        return None
    consequence = "nothing else goes on meanwhile: make tasks in __init__, or load what they need there"
    return warning("making a task", f"takes {each_s:.2f} s", consequence)


def _check_length(tasks: Sequence[Task], tokenizer: Tokenizer, config: Config) -> Finding:
    check, limit = "prompt length", config.model.max_length
    lengths = {len(tokenizer.encode(each.prompt, add_special_tokens=False)): each for each in tasks}
    longest = max(lengths)
    detail = f"up to {longest} tokens of model.max_length={limit}"
    if longest >= limit:
        which = f"task {lengths[longest].index}"
        return problem(check, f"{which} has {longest} tokens, model.max_length={limit}", "such episodes fail: raise it")
    if longest + config.sampling.max_tokens > limit:
        consequence = f"an answer of sampling.max_tokens={config.sampling.max_tokens} is cut: raise model.max_length"
        return warning(check, detail, consequence)
    return fine(check, detail)


def _check_unknown(texts: set[str], tokenizer: Any) -> list[Finding]:
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return []
    wrong = sorted(text for text in texts if unknown in tokenizer.encode(text, add_special_tokens=False))
    if not wrong:
        return []
    strange = sorted({each for each in wrong[0] if unknown in tokenizer.encode(each, add_special_tokens=False)})
    detail = f"{len(wrong)} of {len(texts)} texts have characters that the tokenizer lacks, such as {strange[:3]}"
    consequence = "the policy cannot tell them apart, nor write them; use others, or another model"
    return [warning("characters", f"{detail} in {shortened(wrong[0])}", consequence)]


def _difference(ours: Sequence[str], theirs: Sequence[str], where: str) -> Finding | None:
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            return problem(
                _REPEATED,
                f"training task {place} is {shortened(one)}, and {shortened(other)} {where}",
                "a prompt that is issued again would be another one, and held-out prompts could train; "
                "make a task from its index alone, with random.Random(index)",
            )
    return None


def main() -> None:
    """Fingerprints of the tasks of the config on stdin."""
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # whatever user code prints is no answer
        config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Config)
        answer.write(msgspec.json.encode(fingerprints(training_tasks(Split.of(load_environment(config), config)))))


if __name__ == "__main__":
    main()

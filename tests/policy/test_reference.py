"""A reference policy in an engine of its own: its log-probs are those of a frozen copy in the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import VOCAB, batch, distance, reference_logprobs, settings, tiny_model, trajectory, varied_groups

from streamrl.actors.reference import ReferenceClient, ReferenceServer
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.wire.messages import LeaseRequest, ScoreRequest
from streamrl.buffers.wire.payload import Payload
from streamrl.clock import ManualClock
from streamrl.engines.embedded import EmbeddedEngine
from streamrl.errors import ConfigError, WireError
from streamrl.policy.learner import Learner
from streamrl.policy.reference import REFERENCE
from streamrl.types import Group, TrainGroup, Trajectory

TEMPERATURE = 0.7


class Served:
    """A reference on a socket, which can die and come back."""

    def __init__(self, endpoint: str, engine: EmbeddedEngine) -> None:
        self.endpoint = endpoint
        self.events: list[str] = []
        self._engine = engine
        self._links: list[ClientLink] = []
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        server = ReferenceServer(
            self.endpoint, self._engine, TEMPERATURE, ManualClock(), lambda name, fields: self.events.append(name),
            lambda error: pytest.fail(str(error)),
        )  # fmt: skip
        server.bind()
        self._task = asyncio.create_task(server.run())

    async def end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def link(self) -> ClientLink:
        self._links.append(ClientLink(self.endpoint, f"rollouter-{len(self._links)}", lambda: 0.0))
        return self._links[-1]

    def close(self) -> None:
        for link in self._links:
            link.close()


@contextlib.asynccontextmanager
async def reference(model: Any) -> AsyncIterator[Served]:
    engine = EmbeddedEngine(model, slots=1, max_length=32)
    await engine.start()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(f"ipc://{folder}/reference", engine)
        await served.begin()
        try:
            async with asyncio.timeout(20):
                yield served
        finally:
            served.close()
            await served.end()
            await engine.close()


def scored(model: Any, groups: list[TrainGroup]) -> list[TrainGroup]:
    """``groups`` as they come from rollouters that asked a reference with the weights of ``model``."""

    async def ask() -> None:
        async with reference(model) as served:
            client = ReferenceClient(served.link())
            async with asyncio.TaskGroup() as tasks:
                for index, each in enumerate(groups):
                    tasks.create_task(client.add(Group(index, index, each.env, each.trajectories)))

    asyncio.run(ask())
    return groups


def kl_settings(serve: str, place: str = "loss", folder: str = "initial") -> Any:
    config = settings(eps=0.1)
    config.sampling.temperature = TEMPERATURE
    kl = config.loss.kl
    kl.coefficient, kl.reference, kl.serve, kl.place = 0.5, folder, serve, place
    return config


def test_every_trajectory_gets_the_log_probs_of_its_tokens_under_the_reference():
    model = tiny_model(seed=3)
    for each in scored(model, varied_groups()):
        for one in each.trajectories:
            column = one.columns[REFERENCE]
            assert (column.dtype, column.shape, column[0]) == (np.float32, one.tokens.shape, 0.0)
            expected = reference_logprobs(model, one, TEMPERATURE).detach().numpy()
            np.testing.assert_allclose(column[1:], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_step_is_the_one_with_a_frozen_copy_in_the_trainer(place: str, tmp_path: Path):
    tiny_model(seed=3).save_pretrained(tmp_path)
    models = tiny_model(), tiny_model()
    copied = Learner(kl_settings("trainer", place, str(tmp_path)), models[0]).step(batch(varied_groups()))
    groups = scored(tiny_model(seed=3), varied_groups())
    served = Learner(kl_settings("engine", place, str(tmp_path)), models[1]).step(batch(groups))
    assert copied["policy/kl_reference"] > 0.01
    for key in ("policy/kl_reference", "policy/loss", "policy/grad_norm"):
        assert served[key] == pytest.approx(copied[key], rel=1e-5), key
    ours, theirs = (dict(model.named_parameters()) for model in reversed(models))
    assert distance(ours, theirs) < 1e-6


def test_with_an_engine_the_trainer_holds_no_second_model():
    learner = Learner(kl_settings("engine"), tiny_model())
    assert learner.columns == (REFERENCE,)
    assert learner._reference is None


def test_tokens_over_the_lag_bound_are_left_out_of_the_column_too():
    old = trajectory("abc", "defg", versions=[(2, 2), (5, 2)])
    old.columns[REFERENCE] = np.array([0, 0, 0, np.nan, np.nan, -1.0, -2.0], dtype=np.float32)
    one = TrainGroup(0, "letters", [old], np.ones(1), np.full(1, 0.5))
    metrics = Learner(kl_settings("engine"), tiny_model()).step(batch([one]))
    current = reference_logprobs(tiny_model(), old, TEMPERATURE).detach()[-2:]
    x = torch.tensor([-1.0, -2.0]) - current
    assert metrics["policy/kl_reference"] == pytest.approx(float((x.exp() - 1 - x).mean()), rel=1e-4)


def test_data_without_the_column_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"expected a column 'reference' \[5\] .* got none; .*loss.kl.serve=trainer"):
        Learner(kl_settings("engine"), tiny_model()).step(batch(varied_groups()))


def test_a_request_survives_a_reference_that_dies_and_comes_back():
    async def scenario() -> None:
        async with reference(tiny_model()) as served:
            client, group = ReferenceClient(served.link()), Group(0, 0, "letters", [trajectory("abc", "de")])
            await client.add(Group(1, 1, "letters", [trajectory("ab", "c")]))
            await served.end()
            asking = asyncio.create_task(client.add(group))
            await asyncio.sleep(0)  # it has asked, and there is nobody
            assert not asking.done()
            await served.begin()
            await asking
            assert len(group.trajectories[0].columns[REFERENCE]) == 5

    asyncio.run(scenario())


def test_a_group_that_cannot_be_scored_is_refused_and_the_next_one_is_scored():
    async def scenario() -> None:
        async with reference(tiny_model()) as served:
            client, good = ReferenceClient(served.link()), trajectory("ab", "c")
            foreign = trajectory("ab", "c")
            foreign.tokens[0] = VOCAB
            with pytest.raises(WireError, match="reference: score: token ids must be in 0 … 15, got"):
                await client.add(Group(0, 0, "letters", [good, foreign]))
            assert REFERENCE not in good.columns
            await client.add(Group(1, 1, "letters", [good]))
            assert REFERENCE in good.columns

    asyncio.run(scenario())


def test_a_column_of_the_environment_under_its_name_is_refused():
    taken = trajectory("ab", "c")
    taken.columns[REFERENCE] = np.zeros(1)

    async def scenario() -> None:
        async with reference(tiny_model()) as served:
            with pytest.raises(WireError, match="returned a column 'reference', .* rename it"):
                await ReferenceClient(served.link()).add(Group(0, 0, "letters", [taken]))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "tokens", "message"),
    [
        (ScoreRequest([3]), 2, "expected 12 bytes of tokens, as its lengths say, got 8"),
        (ScoreRequest([0]), 0, "Expected `int` >= 1"),
        (LeaseRequest(1), 0, "expected a score request, got LeaseRequest"),
    ],
)
def test_a_malformed_request_is_answered_with_what_is_wrong(body: Any, tokens: int, message: str):
    async def scenario() -> None:
        async with reference(tiny_model()) as served:
            with pytest.raises(WireError, match=message):
                await served.link().request(body, Payload([bytes(4 * tokens)]) if tokens else None)
            assert served.events == ["malformed_frame"]

    asyncio.run(scenario())


def test_the_reference_is_asked_with_whole_trajectories_of_an_agent():
    one: Trajectory = trajectory("aab", "cd", observation="ee", second="fg")
    scored(tiny_model(), [TrainGroup(0, "letters", [one], np.ones(1), np.ones(1))])
    assert len(one.columns[REFERENCE]) == len(one.tokens) == 9

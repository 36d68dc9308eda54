"""Engines that rollouters share: requests over sockets, failing over, pausing for long, vanishing rollouters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from shared_support import Scripted, Shared, sharing

from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.wire.messages import PublishedRequest
from streamrl.engines import serving
from streamrl.errors import EngineLost, StreamRLError, WireError
from streamrl.ports import StagesWeights, TellsDigests
from streamrl.types import Generation, SamplingParams

PARAMS = SamplingParams(max_tokens=2)


async def what_was_sent_has_arrived(shared: Shared) -> None:
    """Requests are taken in the order in which they come: this one is refused after those before it."""
    with pytest.raises(ValueError, match="the prompt is empty"):
        await shared.generate([], PARAMS)


def test_a_request_of_a_dead_engine_is_sampled_by_another():
    async def scenario() -> None:
        engines = [Scripted(0), Scripted(1)]
        async with sharing(*engines) as shared:
            asked = asyncio.create_task(shared.generate([1, 2, 3], PARAMS))
            await asyncio.wait([asyncio.create_task(each.holds(1)) for each in engines], return_when="FIRST_COMPLETED")
            first = next(i for i, each in enumerate(engines) if each.under_way)
            await shared.hosts[first].die()
            await engines[1 - first].holds(1)
            engines[1 - first].finish()
            assert (await asked).token_ids.tolist() == [1 - first] * 2

    asyncio.run(scenario())


def test_a_request_of_the_only_engine_waits_for_its_successor_and_its_first_weights():
    async def scenario() -> None:
        engine = Scripted()
        async with sharing(engine) as shared:
            asked = asyncio.create_task(shared.generate([1], PARAMS))
            await engine.holds(1)
            host = shared.hosts[0]
            await host.die()
            assert engine.under_way == {}
            host.begin(serve=False)
            host.engine.changed()
            assert not asked.done()
            assert engine.under_way == {}, "requests wait for the weights"
            engine.version = 7
            host.server.open()
            await engine.holds(1)
            engine.finish()
            assert (await asked).versions == [(7, 2)]

    asyncio.run(scenario())


def test_a_request_that_two_engines_died_with_is_lost_with_a_reason():
    async def scenario() -> None:
        engine = Scripted()
        async with sharing(engine) as shared:
            asked = asyncio.create_task(shared.generate([1], PARAMS))
            for _ in range(2):
                await engine.holds(1)
                await shared.hosts[0].die()
                shared.hosts[0].begin()
            with pytest.raises(EngineLost, match="engine-0 was lost with the requests that it had"):
                await asked

    asyncio.run(scenario())


def test_an_engine_that_pauses_for_long_is_as_alive_as_any_and_its_requests_go_on():
    async def scenario() -> None:
        engine = Scripted()
        async with sharing(engine) as shared:
            asked = asyncio.create_task(shared.generate([1], PARAMS))
            await engine.holds(1)
            heard = asyncio.Event()
            (remote,) = shared.remotes
            remote.changed = heard.set
            await shared.pause()
            await heard.wait()
            assert remote.state is not None
            assert remote.state.paused
            while_paused = [asyncio.create_task(shared.generate([seed], PARAMS)) for seed in range(20)]
            await engine.holds(21)  # it takes requests, and answers questions, however long it stands still
            assert not asked.done()
            await shared.load(1, {})
            await shared.resume()
            engine.finish()
            for each in (asked, *while_paused):
                assert (await each).versions == [(1, 2)]

    asyncio.run(scenario())


def test_cancelling_a_request_cancels_it_at_the_engine():
    async def scenario() -> None:
        engine = Scripted()
        async with sharing(engine) as shared:
            asked = [asyncio.create_task(shared.generate([seed], PARAMS)) for seed in (1, 2)]
            await engine.holds(2)
            asked[0].cancel()
            await asyncio.wait(asked[:1])
            await what_was_sent_has_arrived(shared)
            await what_was_sent_has_arrived(shared)
            assert list(engine.under_way.values()) == [[2]]
            engine.finish()
            assert len((await asked[1]).token_ids) == 2

    asyncio.run(scenario())


def test_the_requests_of_a_rollouter_that_died_are_forgotten_and_those_of_others_are_not():
    async def scenario() -> None:
        engine = Scripted()
        async with sharing(engine) as shared:
            other = shared.rollouter("rollouter-1.0")
            asked = asyncio.create_task(shared.generate([1], PARAMS)), asyncio.create_task(other.generate([2], PARAMS))
            await engine.holds(2)
            shared.hosts[0].server.forget("rollouter-1.0")
            await what_was_sent_has_arrived(shared)
            assert list(engine.under_way.values()) == [[1]]
            engine.finish()
            await asked[0]
            asked[1].cancel()
            await other.close()

    asyncio.run(scenario())


def test_what_the_engine_refuses_is_the_senders_error_and_no_event():
    async def scenario() -> None:
        async with sharing(Scripted()) as shared:
            with pytest.raises(ValueError, match="the prompt is empty"):
                await shared.generate([], PARAMS)
            assert shared.hosts[0].events == []

    asyncio.run(scenario())


def test_a_malformed_request_is_counted_and_ends_nothing():
    async def scenario() -> None:
        async with sharing(Scripted()) as shared:
            link = ClientLink(shared.hosts[0].endpoint, "a-trainer", lambda: 0.0)
            with pytest.raises(WireError, match="expected a request to an engine, got PublishedRequest"):
                await link.request(PublishedRequest(1), what="nonsense")
            link.close()
            assert [name for name, _ in shared.hosts[0].events] == ["malformed_frame"]
            await what_was_sent_has_arrived(shared)

    asyncio.run(scenario())


def test_every_sampling_parameter_arrives():
    params = SamplingParams(0.7, 5, 0.9, 0.1, 1.2, 0.3, -0.4, 9, (1, 2), ("a", "b"), 2**63 - 1)
    seen: list[tuple[list[int], SamplingParams]] = []

    class Recording(Scripted):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
            seen.append((list(prompt_ids), params))
            return Generation(np.ones(1, np.int32), np.zeros(1, np.float32), [(0, 1)], "stop")

    async def scenario() -> None:
        async with sharing(Recording()) as shared:
            answer = await shared.generate([3, 1], params)
            assert (answer.token_ids.tolist(), answer.finish_reason) == ([1], "stop")
            assert seen == [([3, 1], params)]

    asyncio.run(scenario())


def test_a_group_goes_to_one_engine_and_two_groups_to_two():
    async def scenario() -> None:
        engines = [Scripted(0), Scripted(1)]
        async with sharing(*engines, slots=64) as shared:
            prompts = [[group] * 20 for group in (7, 8) for _ in range(4)]
            asked = [asyncio.create_task(shared.generate(prompt, PARAMS)) for prompt in prompts]
            await asyncio.gather(engines[0].holds(4), engines[1].holds(4))
            assert all(len({each[0] for each in engine.under_way.values()}) == 1 for engine in engines)
            for engine in engines:
                engine.finish()
            await asyncio.gather(*asked)

    asyncio.run(scenario())


def test_a_pool_that_was_closed_says_so():
    async def scenario() -> None:
        async with sharing(Scripted()) as shared:
            await shared.pool.close()
            with pytest.raises(StreamRLError, match="nothing can be asked after close"):
                await shared.generate([1], PARAMS)

    asyncio.run(scenario())


def test_statistics_are_the_engines():
    async def scenario() -> None:
        engine = Scripted()
        async with sharing(engine) as shared:
            engine.preemptions, engine.version = 3, 5
            asked = asyncio.create_task(shared.generate([1], PARAMS))
            await engine.holds(1)
            engine.finish()
            await asked
            assert (shared.statistics().preemptions, shared.statistics().version) == (3, 5)

    asyncio.run(scenario())


def test_what_was_withdrawn_before_the_engine_has_weights_counts_until_then(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "HELD", 2)

    async def scenario() -> None:
        async with sharing(Scripted()) as shared:
            (host,), (remote,) = shared.hosts, shared.remotes
            heard = asyncio.Event()
            remote.changed = heard.set
            await host.die()
            while remote.state is not None:
                heard.clear()
                await heard.wait()
            host.begin(serve=False)
            while remote.state is None:
                heard.clear()
                await heard.wait()
            for _ in range(2):
                asked = asyncio.create_task(remote.generate([1], PARAMS))
                await asyncio.sleep(0)  # it is on its way
                asked.cancel()
                await asyncio.wait([asked])
            with pytest.raises(StreamRLError, match="2 requests wait for this engine already"):
                await remote.generate([1], PARAMS)

    asyncio.run(scenario())


class Telling(Scripted):
    async def digests(self) -> dict[str, int]:
        return {"weight": 7}


class Staging(Scripted):
    staged: int | None = None

    async def stage(self, version: int, tensors: Mapping[str, object]) -> None:
        self.staged = version

    def unstage(self) -> None:
        self.staged = None


class Both(Telling, Staging):
    pass


@pytest.mark.parametrize("kind", [Scripted, Telling, Staging, Both])
def test_an_engine_that_is_shared_can_what_it_could_alone(kind: type[Scripted]):
    async def scenario() -> None:
        engine = kind()
        shared = serving.hosted(engine)
        assert isinstance(shared, TellsDigests) == isinstance(engine, TellsDigests)
        assert isinstance(shared, StagesWeights) == isinstance(engine, StagesWeights)
        if isinstance(shared, TellsDigests):
            assert await shared.digests() == {"weight": 7}
        if isinstance(shared, StagesWeights):
            await shared.stage(3, {})
            assert engine.staged == 3
            shared.unstage()
            assert engine.staged is None

    asyncio.run(scenario())

"""Pause, cancel, count, end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from conformance_case import GREEDY, SLOTS, EngineCase, Serving, generate_all
from conformance_model import MAX_LENGTH

from streamrl.errors import StreamRLError
from streamrl.types import Generation, SamplingParams


class LifeConformance(Serving):
    """The last test ends the engine, so this comes last."""

    def test_pausing_twice_with_nothing_in_flight_keeps_what_comes_until_resume(self, engine_case: EngineCase) -> None:
        async def run() -> None:
            engine = engine_case.engine
            await engine.pause()
            await engine.pause()
            generated = engine.statistics().generated_tokens
            task = asyncio.ensure_future(engine.generate([9, 10], GREEDY))
            await asyncio.wait({task}, timeout=0.3)  # nothing to wait for: that nothing happens is the point
            assert not task.done()
            assert engine.statistics().generated_tokens == generated
            await engine.resume()
            await engine.resume()
            engine_case.check([9, 10], GREEDY, await task)

        engine_case.run(run())

    def test_a_paused_engine_stands_still_with_requests_in_flight(self, engine_case: EngineCase) -> None:
        params = SamplingParams(max_tokens=MAX_LENGTH - 50, seed=1)

        async def run() -> None:
            engine = engine_case.engine
            task = asyncio.ensure_future(engine.generate([9, 10], params))
            await engine.generate([11], replace(GREEDY, max_tokens=3))
            await engine.pause()
            assert not task.done(), "the request was to be in flight"
            await asyncio.wait({task}, timeout=0.3)
            assert not task.done()
            await engine.resume()
            answer = await task
            assert len(answer.token_ids) == params.max_tokens
            engine_case.check([9, 10], params, answer)

        engine_case.run(run())

    def test_cancelled_requests_leave_the_engine_and_disturb_no_other(self, engine_case: EngineCase) -> None:
        async def run() -> None:
            engine, long = engine_case.engine, SamplingParams(max_tokens=MAX_LENGTH - 10)
            generated = engine.statistics().generated_tokens
            tasks = [asyncio.ensure_future(engine.generate([9], replace(long, seed=seed))) for seed in range(2 * SLOTS)]
            kept = asyncio.ensure_future(engine.generate([10], replace(long, max_tokens=60)))
            await asyncio.wait(tasks, timeout=0.02)  # some have begun, others have not; no outcome hangs on which
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            cancelled = [result for result in results if not isinstance(result, Generation)]
            assert cancelled, "requests were to be under way"
            assert all(isinstance(result, asyncio.CancelledError) for result in cancelled)
            engine_case.check([10], replace(long, max_tokens=60), await kept)
            await engine.generate([11], replace(GREEDY, max_tokens=1))
            statistics = engine.statistics()
            assert (statistics.running, statistics.waiting) == (0, 0)
            assert statistics.generated_tokens - generated < 2 * SLOTS * long.max_tokens, "all ran to their ends"

        engine_case.run(run())

    def test_statistics_count_what_was_done(self, engine_case: EngineCase) -> None:
        async def run() -> None:
            before = engine_case.engine.statistics()
            await generate_all(engine_case, [([9, 10, 11], GREEDY), ([12], GREEDY)])
            after = engine_case.engine.statistics()
            assert after.generated_tokens - before.generated_tokens == 2 * GREEDY.max_tokens
            assert after.prefilled_tokens - before.prefilled_tokens == 4
            assert after.busy_s > before.busy_s
            assert after.version == engine_case.engine.version
            assert (after.running, after.waiting) == (0, 0)
            assert 0 <= after.kv_used < 0.1
            assert after.preemptions >= before.preemptions

        engine_case.run(run())

    def test_requests_in_flight_end_when_the_engine_is_closed_or_dies(self, engine_case: EngineCase) -> None:
        """The last test: a case whose engine lives in another process is started anew to be killed."""

        async def run(kill: bool) -> None:
            engine, long = engine_case.engine, SamplingParams(max_tokens=MAX_LENGTH - 10)
            tasks = [asyncio.ensure_future(engine.generate([9], replace(long, seed=seed))) for seed in range(2 * SLOTS)]
            await engine.generate([10], replace(GREEDY, max_tokens=1))
            if kill:
                assert engine_case.kill is not None
                engine_case.kill(engine)
            else:
                await engine.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [result for result in results if not isinstance(result, Generation)]
            assert failed, "the engine was to die in mid-request"
            kinds: Any = (StreamRLError, RuntimeError) if kill else asyncio.CancelledError
            assert [result for result in failed if not isinstance(result, kinds)] == []
            with pytest.raises((StreamRLError, RuntimeError)):
                await engine.generate([9], GREEDY)
            await engine.close()

        engine_case.run(run(kill=False))
        if engine_case.kill is not None:
            engine_case.restart()
            engine_case.run(run(kill=True))

"""The clocks that deadlines run on."""

from __future__ import annotations

import asyncio

from streamrl.clock import ManualClock, RealClock


def test_manual_time_wakes_exactly_the_sleepers_that_are_due() -> None:
    async def main() -> None:
        clock = ManualClock(5.0)
        early, late = (asyncio.create_task(clock.sleep_until(when)) for when in (6.0, 7.0))
        await asyncio.sleep(0)
        clock.advance(1.0)
        await early
        assert not late.done()
        clock.advance(1.0)
        await late
        await clock.sleep_until(7.0)  # already passed
        assert clock.now() == 7.0

    asyncio.run(main())


def test_real_time_is_over_the_deadline_when_the_sleep_returns() -> None:
    async def main() -> None:
        clock = RealClock()
        deadline = clock.now() + 0.002
        await clock.sleep_until(deadline)
        assert clock.now() >= deadline

    asyncio.run(main())

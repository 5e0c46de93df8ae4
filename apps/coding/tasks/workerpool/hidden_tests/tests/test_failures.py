import asyncio

import pytest

from workerpool import Pool, PoolClosed


def run(main):
    """Run a coroutine that must end, and leave no task. What hangs is an error, and is given up."""

    async def bounded():
        task = asyncio.ensure_future(main)
        for _ in range(2000):
            if task.done():
                break
            await asyncio.sleep(0)
        else:
            await asyncio.wait([task], timeout=0.1)
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            for one in 5 * [*left]:
                one.cancel()
                await rounds()
            raise AssertionError("hangs, or leaves tasks")
        return await task

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # else it logs what nobody awaited, at any later time
    try:
        return loop.run_until_complete(bounded())
    finally:
        loop.close()


async def rounds(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def fail(error):
    await asyncio.sleep(0)
    raise error


async def give(value):
    return value


class Gate:
    """A function that waits until it is opened, and notes what happens to it."""

    def __init__(self):
        self.open, self.notes = asyncio.Event(), []

    async def __call__(self, name="gate"):
        self.notes.append(f"{name} starts")
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            await rounds(3)
            self.notes.append(f"{name} cancelled")
            raise
        self.notes.append(f"{name} ends")
        return name


def test_workers_survive_failures():
    async def main():
        async with Pool(2) as pool:
            jobs = [await pool.submit(fail, KeyError(number)) for number in range(5)]
            jobs.append(await pool.submit(fail, asyncio.CancelledError()))
            assert await (await pool.submit(give, "on")) == "on"
            for number, job in enumerate(jobs[:5]):
                with pytest.raises(KeyError, match=str(number)):
                    await job
            with pytest.raises(asyncio.CancelledError):
                await jobs[5]
            assert [job.cancelled() for job in jobs] == [False] * 5 + [True]

    run(main())


def test_failures_that_nobody_awaits_do_not_hang_the_end():
    async def main():
        async with Pool(1) as pool:
            jobs = [await pool.submit(fail, ValueError(str(number))) for number in range(3)]
        assert [job.done() for job in jobs] == [True] * 3
        for job in jobs:
            with pytest.raises(ValueError):
                await job

    run(main())


def test_a_job_cancelled_before_it_starts():
    async def main():
        gate = Gate()
        async with Pool(1) as pool:
            first, second, third = [await pool.submit(gate, name) for name in "abc"]
            await rounds()
            assert second.cancel()
            gate.open.set()
            assert await third == "c"
            with pytest.raises(asyncio.CancelledError):
                await second
            assert (second.done(), second.cancelled(), await first) == (True, True, "a")
            assert not first.cancel()
        assert gate.notes == ["a starts", "a ends", "c starts", "c ends"]

    run(main())


def test_a_job_cancelled_while_it_runs():
    async def main():
        gate = Gate()
        async with Pool(1) as pool:
            first, second = [await pool.submit(gate, name) for name in "ab"]
            await rounds()
            assert first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert first.cancelled()
            gate.open.set()
            assert await second == "b"
        assert gate.notes == ["a starts", "a cancelled", "b starts", "b ends"]

    run(main())


def test_cancelling_one_who_waits_does_not_cancel_the_job():
    async def main():
        gate = Gate()

        async def wait(job):
            return await job

        async with Pool(1) as pool:
            job = await pool.submit(gate)
            impatient, patient = asyncio.create_task(wait(job)), asyncio.create_task(wait(job))
            await rounds()
            impatient.cancel()
            await rounds()
            assert (impatient.cancelled(), job.done()) == (True, False)
            gate.open.set()
            assert (await patient, await job) == ("gate", "gate")

    run(main())


def test_close_runs_what_submit_holds_back():
    async def main():
        gate, pool = Gate(), Pool(1, backlog=1)
        await pool.__aenter__()
        submits = [asyncio.create_task(pool.submit(gate, name)) for name in "abcd"]
        await rounds()
        closing = [asyncio.create_task(pool.close()) for _ in range(2)]
        await rounds()
        with pytest.raises(PoolClosed):
            await pool.submit(give, 1)
        assert not closing[0].done()
        gate.open.set()
        await asyncio.gather(*closing)
        assert [await (await submit) for submit in submits] == list("abcd")
        assert gate.notes[::2] == [f"{name} starts" for name in "abcd"]
        await pool.close()

    run(main())


def test_an_exception_in_the_block_cancels_all_jobs():
    async def main():
        gate, jobs, held = Gate(), [], []
        with pytest.raises(ZeroDivisionError):
            async with Pool(2, backlog=2) as pool:
                jobs += [await pool.submit(gate, name) for name in "ab"]
                await rounds()
                jobs += [await pool.submit(gate, name) for name in "cd"]
                held += [asyncio.create_task(pool.submit(gate, name)) for name in "ef"]
                await rounds()
                1 / 0
        assert sorted(gate.notes) == ["a cancelled", "a starts", "b cancelled", "b starts"]
        assert all(job.cancelled() for job in jobs)
        for submit in held:
            with pytest.raises((asyncio.CancelledError, PoolClosed)):
                await (await submit)

    run(main())


def test_map_cancels_what_comes_after_a_failure():
    async def main():
        gate = Gate()

        async def step(number):
            if number == 1:
                raise LookupError(number)
            return number if number < 2 else await gate(number)

        async with Pool(2) as pool:
            with pytest.raises(LookupError):
                await pool.map(step, range(6))
            await rounds()
            assert await pool.map(give, "xy") == ["x", "y"]
        assert not any("ends" in note for note in gate.notes)

    run(main())


def test_many_jobs_some_of_which_fail_or_are_cancelled():
    async def main():
        async def step(number):
            await rounds(number % 4)
            if number % 3 == 0:
                raise RuntimeError(number)
            return number

        async with Pool(3, backlog=4) as pool:
            jobs = [await pool.submit(step, number) for number in range(60)]
            gone = {number for number in range(50, 60, 2) if jobs[number].cancel()}
            results = await asyncio.gather(*map(outcome, jobs))
        for number, result in enumerate(results):
            assert result == ("cancelled" if number in gone else "failed" if number % 3 == 0 else number)

    async def outcome(job):
        try:
            return await job
        except RuntimeError:
            return "failed"
        except asyncio.CancelledError:
            return "cancelled"

    run(main())

import asyncio

import pytest

from workerpool import Pool, PoolClosed


def test_results():
    async def double(number):
        await asyncio.sleep(0)
        return 2 * number

    async def main():
        async with Pool(2) as pool:
            job = await pool.submit(double, 4)
            assert await pool.map(double, range(5)) == [0, 2, 4, 6, 8]
            assert (await job, await job, job.done(), job.cancelled()) == (8, 8, True, False)

    asyncio.run(main())


def test_no_more_than_workers_at_once_and_in_order():
    running, most, started = 0, 0, []

    async def count(number):
        nonlocal running, most
        started.append(number)
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1

    async def main():
        async with Pool(3, backlog=2) as pool:
            for number in range(10):
                await pool.submit(count, number)

    asyncio.run(main())
    assert (running, most, started) == (0, 3, list(range(10)))


def test_a_closed_pool_takes_no_jobs():
    async def main():
        async with Pool(1) as pool:
            pass
        with pytest.raises(PoolClosed):
            await pool.submit(asyncio.sleep, 0)

    asyncio.run(main())


def test_a_pool_has_workers():
    async def main():
        Pool(0)

    with pytest.raises(ValueError, match="at least one"):
        asyncio.run(main())

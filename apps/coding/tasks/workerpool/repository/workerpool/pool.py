"""The pool."""

import asyncio

from workerpool.job import Job


class PoolClosed(RuntimeError):
    """The pool takes no more jobs."""


class Pool:
    """Runs at most `workers` jobs at once."""

    def __init__(self, workers, backlog=100):
        if workers < 1 or backlog < 1:
            raise ValueError(f"a pool needs at least one worker and one place, not {workers} and {backlog}")
        self._queue = asyncio.Queue(backlog)
        self._size = workers
        self._workers = []
        self._closed = False

    async def __aenter__(self):
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._size)]
        return self

    async def __aexit__(self, *exception):
        await self.close()

    async def _work(self):
        while (job := await self._queue.get()) is not None:
            await job.run()

    async def submit(self, function, *arguments):
        """The job that calls the function, as soon as there is room for it."""
        if self._closed:
            raise PoolClosed("the pool is closed")
        job = Job(function, arguments)
        await self._queue.put(job)
        return job

    async def map(self, function, arguments):
        """The results of the function for each argument, in their order."""
        jobs = [await self.submit(function, argument) for argument in arguments]
        return [await job for job in jobs]

    async def close(self):
        """Wait for all jobs, and end the workers."""
        self._closed = True
        for _ in self._workers:
            await self._queue.put(None)
        await asyncio.gather(*self._workers)

"""A call that a worker makes."""

import asyncio


class Job:
    """An async function with its arguments, and its result once there is one."""

    def __init__(self, function, arguments):
        self._function = function
        self._arguments = arguments
        self._result = asyncio.get_running_loop().create_future()

    async def run(self):
        """Make the call; for the worker."""
        result = await self._function(*self._arguments)
        self._result.set_result(result)

    def cancel(self):
        """Cancel the call; False if it has ended."""
        return self._result.cancel()

    def done(self):
        """Whether there is a result, an exception or a cancellation."""
        return self._result.done()

    def cancelled(self):
        """Whether the job was cancelled."""
        return self._result.cancelled()

    def __await__(self):
        return self._result.__await__()

"""A pool of asyncio workers."""

from workerpool.job import Job
from workerpool.pool import Pool, PoolClosed

__all__ = ["Job", "Pool", "PoolClosed"]

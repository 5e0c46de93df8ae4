"""Token buckets per client."""

from ratelimit.bucket import Bucket
from ratelimit.clock import ManualClock
from ratelimit.limiter import Limiter

__all__ = ["Bucket", "Limiter", "ManualClock"]

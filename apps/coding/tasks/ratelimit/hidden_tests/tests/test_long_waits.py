import random

from ratelimit import Bucket, Limiter, ManualClock


def test_a_burst_after_a_long_wait():
    clock = ManualClock(50.0)
    limiter = Limiter(rate=3, burst=7, clock=clock)
    assert limiter.allow("a", cost=4)
    clock.advance(86_400)
    assert sum(limiter.allow("a") for _ in range(50)) == 7


def test_remaining_is_never_above_the_burst():
    clock = ManualClock()
    limiter = Limiter(rate=10, burst=4, clock=clock)
    for seconds in (0, 0.05, 0.1, 5, 1000):
        clock.advance(seconds)
        assert limiter.remaining("a") == 4


def test_a_bucket_alone_is_limited_too():
    bucket = Bucket(rate=1, burst=2, now=0)
    assert not bucket.take(10_000, 3)
    assert bucket.take(10_000, 2)
    assert bucket.wait(10_000, 2) == 2


def test_waiting_in_small_steps_is_the_same_as_at_once():
    bucket = Bucket(rate=1, burst=5, now=0)
    for second in range(1, 100):
        assert not bucket.is_full(second - 1) or bucket.tokens == 5
        bucket.refill(second)
    assert [bucket.take(99) for _ in range(6)] == [True] * 5 + [False]


def test_every_window_keeps_to_burst_and_rate():
    source, clock, sent = random.Random(11), ManualClock(), []
    limiter = Limiter(rate=2, burst=5, clock=clock)
    for _ in range(800):
        clock.advance(source.choice([0, 0, 0, 0.25, 0.5, 8]))
        if limiter.allow("a"):
            sent.append(clock())
    for first in range(len(sent)):
        for last in range(first, min(first + 60, len(sent))):
            assert last - first + 1 <= 5 + 2 * (sent[last] - sent[first])


def test_the_rate_is_kept_in_the_long_run():
    clock = ManualClock()
    limiter = Limiter(rate=2, burst=5, clock=clock)
    allowed = 0
    for _ in range(400):
        allowed += limiter.allow("a")
        clock.advance(0.25)
    assert allowed == 5 + 2 * 400 // 4 - 1

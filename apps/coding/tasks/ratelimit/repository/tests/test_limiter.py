import pytest

from ratelimit import Bucket, Limiter, ManualClock


@pytest.fixture
def clock():
    return ManualClock(100.0)


def test_a_burst_and_then_the_rate(clock):
    limiter = Limiter(rate=2, burst=3, clock=clock)
    assert [limiter.allow("a") for _ in range(4)] == [True, True, True, False]
    clock.advance(0.5)
    assert limiter.allow("a")
    assert not limiter.allow("a")


def test_clients_do_not_share(clock):
    limiter = Limiter(rate=1, burst=1, clock=clock)
    assert limiter.allow("a")
    assert limiter.allow("b")
    assert not limiter.allow("a")


def test_wait_is_the_time_until_the_next_request(clock):
    limiter = Limiter(rate=4, burst=2, clock=clock)
    assert limiter.wait("a") == 0
    assert limiter.allow("a", cost=2)
    assert limiter.wait("a") == pytest.approx(0.25)
    clock.advance(limiter.wait("a"))
    assert limiter.allow("a")


def test_full_buckets_are_swept(clock):
    limiter = Limiter(rate=1, burst=2, clock=clock)
    limiter.allow("a")
    assert limiter.sweep() == 0
    clock.advance(1)
    assert limiter.sweep() == 1
    assert limiter.remaining("a") == 2


def test_wrong_values(clock):
    for rate, burst in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="rate"):
            Bucket(rate, burst, 0)
    with pytest.raises(ValueError, match="never fit"):
        Limiter(rate=1, burst=2, clock=clock).wait("a", cost=3)

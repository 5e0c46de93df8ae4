import pytest

from ttlcache import Cache, cached


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_values_expire(clock):
    cache = Cache(2, ttl=10, clock=clock)
    cache.set("a", 1)
    cache.set("b", 2, ttl=20)
    clock.now = 10
    assert cache.get("a") is None
    assert cache.get("b") == 2
    assert cache.keys() == ["b"]


def test_the_least_recently_used_key_goes(clock):
    cache = Cache(2, ttl=10, clock=clock)
    cache.set("a", 1)
    cache.set("b", 2)
    cache.get("a")
    cache.set("c", 3)
    assert cache.keys() == ["a", "c"]
    assert (cache.stats.hits, cache.stats.misses, cache.stats.evictions) == (1, 0, 1)


def test_get_many_delete_and_contains(clock):
    cache = Cache(3, ttl=10, clock=clock)
    cache.set("a", None)
    cache.set("b", 2)
    assert cache.get_many(["b", "x", "a"]) == {"a": None, "b": 2}
    cache.delete("a")
    assert "a" not in cache
    assert "b" in cache


def test_cached_functions(clock):
    calls = []
    double = cached(Cache(5, ttl=10, clock=clock))(lambda number: calls.append(number) or 2 * number)
    assert [double(1), double(1), double(2)] == [2, 2, 4]
    assert calls == [1, 2]

import random

import pytest

from ttlcache import Cache


class Clock:
    now = 100

    def __call__(self):
        return self.now


class Model:
    """The rules in the plainest way: a list of [key, value, end] in the order of use."""

    def __init__(self, size, clock):
        self.size, self.clock, self.rows, self.stats = size, clock, [], [0, 0, 0]

    def live(self):
        return [row for row in self.rows if row[2] > self.clock.now]

    def set(self, key, value, ttl):
        self.rows = [row for row in self.live() if row[0] != key]
        if len(self.rows) >= self.size:
            self.rows.pop(0)
            self.stats[2] += 1
        self.rows.append([key, value, self.clock.now + ttl])

    def get(self, key):
        for row in self.live():
            if row[0] == key:
                self.rows.remove(row)
                self.rows.append(row)
                self.stats[0] += 1
                return row[1]
        self.stats[1] += 1
        return None


@pytest.fixture
def clock():
    return Clock()


def test_setting_a_key_again_evicts_nothing(clock):
    cache = Cache(3, ttl=10, clock=clock)
    for key in "abca":
        cache.set(key, key.upper())
    assert cache.keys() == ["b", "c", "a"]
    assert cache.stats.evictions == 0


def test_setting_an_expired_key_again_evicts_nothing(clock):
    cache = Cache(2, ttl=50, clock=clock)
    cache.set("old", 1, ttl=5)
    cache.set("live", 2)
    clock.now += 5
    cache.set("old", 3)
    assert cache.get_many(["old", "live"]) == {"old": 3, "live": 2}


def test_an_expired_entry_goes_before_a_live_one(clock):
    cache = Cache(3, ttl=100, clock=clock)
    cache.set("first", 1)
    cache.set("short", 2, ttl=3)
    cache.set("last", 3)
    clock.now += 3
    cache.set("new", 4)
    assert cache.keys() == ["first", "last", "new"]
    assert cache.stats.evictions == 0
    cache.set("newer", 5)
    assert cache.keys() == ["last", "new", "newer"]
    assert cache.stats.evictions == 1


def test_get_many_is_a_use_of_each_key_in_order(clock):
    cache = Cache(3, ttl=10, clock=clock)
    for key in "abc":
        cache.set(key, key)
    assert cache.get_many(["b", "none", "a"]) == {"b": "b", "a": "a"}
    assert cache.keys() == ["c", "b", "a"]
    assert (cache.stats.hits, cache.stats.misses) == (2, 1)


def test_random_use_as_in_the_model(clock):
    source = random.Random(2)
    for size in (1, 2, 4):
        cache, model = Cache(size, ttl=7, clock=clock), Model(size, clock)
        for step in range(1500):
            clock.now += source.choice([0, 0, 1])
            key, action = source.randrange(6), source.random()
            if action < 0.5:
                ttl = source.randint(1, 12)
                cache.set(key, step, ttl=ttl)
                model.set(key, step, ttl)
            elif action < 0.8:
                assert cache.get(key) == model.get(key)
            else:
                keys = source.sample(range(6), 2)
                expected = {one: model.get(one) for one in keys}
                assert cache.get_many(keys) == {one: value for one, value in expected.items() if value is not None}
            assert cache.keys() == [row[0] for row in model.live()]
            assert [cache.stats.hits, cache.stats.misses, cache.stats.evictions] == model.stats

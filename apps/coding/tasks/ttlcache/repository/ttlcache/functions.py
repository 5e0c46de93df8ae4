"""Functions whose results are kept."""

from functools import wraps

MISSING = object()


def cached(cache):
    """Keep the results of a function of hashable positional arguments in the cache."""

    def decorate(function):
        @wraps(function)
        def wrapper(*arguments):
            key = (function.__qualname__, arguments)
            value = cache.get(key, MISSING)
            if value is MISSING:
                value = function(*arguments)
                cache.set(key, value)
            return value

        return wrapper

    return decorate

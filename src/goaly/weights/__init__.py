"""Stage 6: versioned weight shards, from any layout to any layout. Useful without the rest of goaly: `docs/weights.md`.

store = mesh.spawn("weights", WeightStore)                     # one actor, anywhere

publisher = Publisher(store, tensors)                          # in each trainer rank
await publisher.publish(version)

subscriber = Subscriber(store, parameters)                     # in each reader
version = await subscriber.newest(after=version)
if await subscriber.prefetch(version):
    subscriber.apply()

version = await pull_into(store, parameters)                   # or all of that, once
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from goaly.weights.publisher import Publisher
    from goaly.weights.settings import WeightSettings
    from goaly.weights.store import WeightStore
    from goaly.weights.subscriber import Subscriber, pull_into

__all__ = ["Publisher", "Subscriber", "WeightSettings", "WeightStore", "pull_into"]

_MODULES = {
    "Publisher": "publisher",
    "Subscriber": "subscriber",
    "WeightSettings": "settings",
    "WeightStore": "store",
    "pull_into": "subscriber",
}


def __getattr__(name: str) -> Any:
    """Import each name's module at its first use: reading settings needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

"""Stage 6: versioned weight shards, from any layout to any layout. Useful without the rest of goaly: `docs/weights.md`.

store = mesh.spawn("weights", WeightStore)                     # one actor, anywhere

publisher = Publisher(store, tensors)                          # in each trainer rank
await publisher.publish(version)

subscriber = Subscriber(store, parameters)                     # in each reader
version = await subscriber.newest(after=version)
if await subscriber.prefetch(version):
    subscriber.apply()

version = await pull_into(store, parameters)                   # or all of that, once

They are in `store.py`, `publisher.py` and `subscriber.py`; this file imports nothing, so that settings need no torch.
"""

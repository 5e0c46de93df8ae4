"""Stage 6: versioned weight shards, from any layout to any layout. Useful without the rest of goaly: `docs/weights.md`.

`WeightStore` is in `store.py`, `Publisher` in `publisher.py` and `Subscriber` in `subscriber.py`. This file imports
nothing, so that settings need no torch.
"""

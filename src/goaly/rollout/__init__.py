"""Stage 2: episodes, run many at once, each ending as one trajectory."""

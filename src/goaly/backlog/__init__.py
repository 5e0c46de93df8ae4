"""Stage 4: what may start, in which order it is trained, and where every prompt went."""

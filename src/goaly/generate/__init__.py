"""Stage 2: sampling from the newest policy weights."""

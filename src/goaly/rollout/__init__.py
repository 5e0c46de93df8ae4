"""Stage 2: runs episodes, many at once, each to one trajectory."""

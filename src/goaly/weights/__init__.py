"""Stage 6: versioned weight shards, from any layout to any layout."""

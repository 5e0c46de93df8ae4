"""Stage 5: from packed batches to the next policy version."""

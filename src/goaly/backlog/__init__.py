"""Stage 4: admission, order of training, batches, and the state of every prompt."""

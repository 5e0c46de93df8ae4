"""Stage 5: the training objective, as pure functions of the trained tokens."""

"""Stage 5: what the trainer minimizes, as pure functions of the trained tokens."""

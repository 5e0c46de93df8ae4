"""Fully asynchronous RL post-training."""

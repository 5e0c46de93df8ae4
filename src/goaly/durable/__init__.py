"""Durable runs: the event log, checkpoints, and what is rebuilt from them."""

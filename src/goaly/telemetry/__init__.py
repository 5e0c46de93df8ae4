"""A run's records: metrics, spans, the rollout journal, the progress display, logs."""

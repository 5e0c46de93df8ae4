"""A run's records: metrics, spans, the progress display, logs."""

"""The episodes of a run as text: in the terminal, as one HTML page, or as JSON lines. They come from the run's log."""

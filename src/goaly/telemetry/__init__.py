"""What a run says about itself: metrics, spans, the rollout journal, the progress display."""

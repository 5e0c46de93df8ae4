"""Learning from live traffic, and the gate that decides which policy version is served."""

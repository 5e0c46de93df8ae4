class PointerError(ValueError):
    """A pointer that is malformed, or that leads nowhere."""

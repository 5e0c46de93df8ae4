"""Settings of the weight path."""

from dataclasses import dataclass

TRANSFER_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """How published weights are kept and moved."""

    slots: int = 3
    """How many versions the trainer's ring holds; its memory is slots x the size of the weights. With 3, readers may
    hold two different versions while the trainer writes the next. The trainer never waits for a reader."""

    transfer_dtype: str | None = None
    """Floating-point type that weights are cast to when they are published (float32, bfloat16, float16); none keeps
    each tensor's own."""

    copy_threads: int = 1
    """Threads that copy a rank's weights when it publishes or pulls."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each."""
        found = []
        if self.slots < 2:
            found.append(f"{prefix}slots={self.slots}: must be at least 2, one to read and one to write")
        if self.transfer_dtype is not None and self.transfer_dtype not in TRANSFER_DTYPES:
            known = ", ".join(TRANSFER_DTYPES)
            found.append(f"{prefix}transfer_dtype={self.transfer_dtype}: must be one of {known}, or null")
        if self.copy_threads < 1:
            found.append(f"{prefix}copy_threads={self.copy_threads}: must be at least 1")
        return found

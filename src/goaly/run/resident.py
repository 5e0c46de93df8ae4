"""An actor that says which process it is in, and that it lives. It has a file of its own: processes import no more than
this for it."""

from monarch.actor import Actor, endpoint

from goaly.weights.liveness import ProcessMark, this_process


class Resident(Actor):
    """Lives in every process of a run."""

    @endpoint
    def mark(self) -> ProcessMark:
        """The process."""
        return this_process()

    @endpoint
    def beat(self) -> bool:
        """True: the process can run Python."""
        return True

"""An actor that says which process it is in, and that it lives. It has a file of its own: processes import no more than
this for it."""

from typing import TYPE_CHECKING

from monarch.actor import Actor, endpoint

from goaly.liveness import ProcessMark, this_host, this_process

if TYPE_CHECKING:
    from goaly.run.cluster import Host


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

    @endpoint
    def machine(self) -> "tuple[str, Host]":
        """The machine that it is on: what tells it from others, and what it has."""
        from goaly.run.cluster import this_machine

        return this_host(), this_machine()

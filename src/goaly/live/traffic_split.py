"""Which replicas answer a conversation: those of the served version, or those of the candidate.

A share of the conversations that begin while there is a candidate goes to it. A conversation stays where it began as
long as that candidate is one; then it goes on with the served version, as all others do.
"""

from enum import StrEnum
from hashlib import blake2b

from goaly.generate.policy import TokenSampler
from goaly.generate.request import Sample, Sampling
from goaly.generate.streamed_answer import OnPart

CONVERSATIONS_REMEMBERED = 65_536
SHARES = 1 << 32


class Arm(StrEnum):
    """A policy version that answers requests. Its value is the name of the weight store's track."""

    SERVED = "served"
    """The version that was promoted last."""
    CANDIDATE = "candidate"
    """The version that is on trial."""


def arm_of_replica(name: str, replicas: int) -> Arm:
    """The arm of a generator replica with this name, of so many: the last one is the candidate's, also where
    `generator-1-2` has taken the place of `generator-1`."""
    return Arm.CANDIDATE if int(name.split("-")[1]) == replicas - 1 else Arm.SERVED


class TrafficSplit:
    """Samples for each conversation from the replicas of one arm; a `TokenSampler`."""

    def __init__(self, served: TokenSampler, candidate: TokenSampler, *, share: float):
        """`share` of the new conversations go to the candidate, while there is one."""
        self._samplers = {Arm.SERVED: served, Arm.CANDIDATE: candidate}
        self._share = share
        self._candidate: int | None = None
        self._began: dict[str, int | None] = {}
        """The candidate with which each conversation began; None for the served version. The newest are last."""

    def use(self, candidate: int | None) -> None:
        """Send new conversations to this candidate, whose replicas serve it; None: to none."""
        self._candidate = candidate

    def arm_of(self, conversation: str) -> Arm:
        """The arm that answers this conversation now."""
        if conversation not in self._began:
            self._began[conversation] = self._candidate if self._is_in_share(conversation) else None
            if len(self._began) > CONVERSATIONS_REMEMBERED:
                del self._began[next(iter(self._began))]
        candidate = self._began[conversation]
        is_on_trial = candidate is not None and candidate == self._candidate
        return Arm.CANDIDATE if is_on_trial else Arm.SERVED

    async def generate(
        self,
        request_id: str,
        tokens: list[int],
        sampling: Sampling,
        min_version: int = 0,
        session: str | None = None,
        on_part: OnPart | None = None,
        begun_at: int | None = None,
    ) -> Sample:
        """The sample of this request, from the arm of its session."""
        sampler = self._samplers[Arm.SERVED if session is None else self.arm_of(session)]
        return await sampler.generate(request_id, tokens, sampling, min_version, session, on_part, begun_at)

    def _is_in_share(self, conversation: str) -> bool:
        if self._candidate is None:
            return False
        drawn = blake2b(f"{self._candidate}/{conversation}".encode(), digest_size=4).digest()
        return int.from_bytes(drawn, "big") < self._share * SHARES

"""Guards a run against a collapse of its policy: does what `guard.action` says when the signals of one appear."""

from collections.abc import Awaitable, Callable, Iterable, Mapping

from goaly.backlog.collapse_guard import CollapseGuard, CollapseVerdict
from goaly.backlog.guard_settings import GuardSettings
from goaly.base.errors import RunFailed


class RunGuard:
    """Follows the steps of one run."""

    def __init__(
        self,
        settings: GuardSettings,
        earlier: Iterable[Mapping[str, float]],
        tighten: Callable[[int | None], Awaitable[None]],
        say: Callable[[str], None],
    ):
        """`earlier` are the metrics of the steps before the run was resumed. `tighten` lowers the staleness bound of
        admission to a number, or restores it with None."""
        self._settings = settings
        self._guard = CollapseGuard(settings)
        self._tighten = tighten
        self._say = say
        self._is_tightened = False
        self._healthy = 0
        """Steps without a signal since the last one with a signal."""
        if settings.action != "off":
            for step in earlier:
                self._guard.observe(step)

    def observe(self, metrics: Mapping[str, float]) -> CollapseVerdict:
        """The verdict about a new step; no signals if the guard is off."""
        return CollapseVerdict() if self._settings.action == "off" else self._guard.observe(metrics)

    async def act(self, policy_version: int, verdict: CollapseVerdict) -> None:
        """Do what the settings say about this verdict; a RunFailed with `guard.action=stop`."""
        action, signals = self._settings.action, "; ".join(verdict.reasons)
        self._healthy = 0 if verdict.is_collapse else self._healthy + 1
        if verdict.is_new:
            self._say(f"the policy seems to collapse at version {policy_version}: {signals}")
            if action == "stop":
                raise RunFailed(
                    f"guard.action=stop: the policy collapsed at version {policy_version}: {signals}. Lower the "
                    "learning rate or backlog.max_staleness; --resume with guard.action=report goes on as it is"
                )
        if action != "tighten":
            return
        if verdict.is_collapse and not self._is_tightened:
            self._is_tightened = True
            self._say(f"groups run ahead by at most {self._settings.tightened_staleness} versions until this is over")
            await self._tighten(self._settings.tightened_staleness)
        elif self._is_tightened and self._healthy >= self._settings.window:
            self._is_tightened = False
            self._say(f"no signal of a collapse for {self._healthy} steps: the staleness bound is restored")
            await self._tighten(None)

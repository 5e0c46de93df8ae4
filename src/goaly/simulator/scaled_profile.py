"""A profile whose episodes are longer or slower, to ask what would change a plan."""

from dataclasses import replace
from typing import Any

from goaly.simulator.profile import Distribution, EpisodeTimes, Profile


def scaled(profile: Profile, answers: float = 1.0, waits: float = 1.0) -> Profile:
    """The profile with answers and waits so many times as long."""

    def by(one: Distribution, factor: float) -> Distribution:
        return replace(
            one,
            samples=tuple(factor * value for value in one.samples),
            mean=factor * one.mean,
            most=None if one.most is None else factor * one.most,
        )

    episodes = profile.episodes
    if episodes.stated is not None:
        stated = episodes.stated
        changes: dict[str, Any] = {
            "answer_tokens": by(stated.answer_tokens, answers),
            **{key: by(getattr(stated, key), waits) for key in ("environment_seconds", "verifier_seconds")},
        }
        return replace(profile, episodes=replace(episodes, stated=replace(stated, **changes)))

    def changed(one: EpisodeTimes) -> EpisodeTimes:
        return replace(
            one,
            answer_tokens=tuple(max(1, round(answers * tokens)) for tokens in one.answer_tokens),
            environment_seconds=tuple(waits * seconds for seconds in one.environment_seconds),
            verifier_seconds=waits * one.verifier_seconds,
        )

    groups = tuple(tuple(map(changed, group)) for group in episodes.groups)
    return replace(profile, episodes=replace(episodes, groups=groups))

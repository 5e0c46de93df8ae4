"""The settings of a run that learns from live traffic."""

from collections.abc import Iterator
from dataclasses import field
from string import Formatter
from typing import Any, Literal

from goaly.agents.settings import UntrainedSettings
from goaly.base.access import is_loopback
from goaly.base.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Settings, Share
from goaly.live.gate_settings import GateSettings
from goaly.live.keys import KEYS, LOCAL, keys_of
from goaly.reward.settings import verifier_problems

GATE_SLOTS = 4
"""Versions in memory with a gate: the served one, the candidate, the newest, and the one being written."""


def _opt_out() -> UntrainedSettings:
    return UntrainedSettings(headers={"x-no-training": "*"}, metadata={"no_training": "*"})


class LiveJudgeSettings(Settings):
    """The judge of turns whose outcome is not a score: a verifier, a model behind an endpoint, or the policy itself."""

    kind: Literal["none", "verifier", "endpoint", "policy"] = "none"
    """`none`: only scores, corrected answers and malformed calls are rewards. `verifier`: a function. `endpoint`: a
    model behind an API of OpenAI's kind. `policy`: the policy that is served judges its own turns."""
    verifier: str | None = None
    """Function of `kind=verifier`, as `package.module:function`. It gets a Prompt and the answer's text; the prompt's
    messages are the conversation, and its `metadata` has the `outcome`: `kind`, `text` and `corrected`. It returns the
    reward, and raises if it cannot say."""
    workers: PositiveInt = 1
    """Child processes that run the verifier."""
    url: str | None = None
    """Base URL of `kind=endpoint`, such as `http://host:8000/v1`."""
    model: str = "judge"
    """The model's name there."""
    key_variable: str | None = None
    """Environment variable with the API key of that endpoint; null sends none."""
    votes: PositiveInt = 3
    """How often the model is asked about one turn. Each vote is +1, 0 or -1, and the majority is the reward; without a
    majority it is 0. If fewer than half of the votes can be read, the judge has failed."""
    question: str = (
        "An assistant answered a message, and then something happened.\n\nMessage:\n{question}\n\nAnswer:\n"
        "{answer}\n\nWhat happened next ({kind}):\n{outcome}\n\nDoes this show that the answer was good? Think "
        "briefly, and end with one line that has only +1 (good), 0 (it does not tell) or -1 (bad)."
    )
    """The message to the model. `{question}` becomes the last message before the answer, `{answer}` the answer,
    `{kind}` and `{outcome}` what happened next."""
    pattern: str = r"(?<![\d.])([+-]?1|0)(?!\.?\d)"
    """Regular expression of a vote. The last match in the reply counts."""
    max_tokens: PositiveInt = 256
    """Most tokens of a vote."""
    temperature: NonNegativeFloat = 0.6
    """Temperature of the votes; with 0 all of them are the same."""
    time_limit_seconds: PositiveFloat = 30.0
    """Time limit of one judgement."""
    parallel: PositiveInt = 8
    """Most judgements at the same time."""
    per_minute: PositiveInt | None = None
    """Most judgements that begin in a minute; null is no limit. Turns above it wait, and are left out as `unjudged`
    after `live.outcome_seconds`."""
    tries: PositiveInt = 3
    """A turn is left out as `unjudged` after this many failures of the judge. While the judge is silent, failures are
    not counted against turns."""
    silent_seconds: PositiveFloat = 60.0
    """The judge counts as silent when turns wait for it and it has answered nothing for this time. Then one turn is
    tried at a time, the others wait, and nothing is trained but what has a reward already."""

    def _problems(self, at: Section) -> Iterator[str]:
        if (self.kind == "verifier") != (self.verifier is not None):
            yield f"{at.verifier}: must name a function if, and only if, {at}kind is verifier"
        elif self.verifier is not None:
            yield from verifier_problems(self.verifier, at)
        if (self.kind == "endpoint") != (self.url is not None):
            yield f"{at.url}: must be set if, and only if, {at}kind is endpoint"
        elif self.url is not None and not self.url.startswith(("http://", "https://")):
            yield f"{at.url}: must begin with http:// or https://"
        if self.kind not in ("endpoint", "policy"):
            names = ("votes", "question", "pattern", "max_tokens", "temperature", "model", "key_variable")
            yield from at.idle(f"{at}kind is {self.kind}", *names)
        elif "{answer}" not in self.question or "{outcome}" not in self.question:
            yield f"{at}question: must contain {{answer}} and {{outcome}}"
        if self.kind != "verifier":
            yield from at.idle(f"{at}kind is {self.kind}", "workers")


HINT_FIELDS = ("question", "response", "reaction")


class LiveHintSettings(Settings):
    """The text that the teacher of `loss.distill` sees before a turn, and the policy did not: the reaction to it."""

    text: str = "{question}\n\n(An answer to this was: {response}\nWhat followed: {reaction})"
    """The last message before the answer, as the teacher sees it. `{question}` becomes the message as it was,
    `{response}` the answer, `{reaction}` the newest text that was said about it: a corrected answer, a reply, a tool's
    result. Turns without such a text have no hint."""

    def _problems(self, at: Section) -> Iterator[str]:
        known = ", ".join(f"{{{name}}}" for name in HINT_FIELDS)
        try:
            named = {name for _, name, _, _ in Formatter().parse(self.text) if name is not None}
        except ValueError as error:
            yield f"{at.text}: {error}; write {{{{ and }}}} for braces"
            return
        if unknown := named - {*HINT_FIELDS}:
            yield f"{at.text}: {{{min(unknown)}}} is unknown; known are {known}"
        elif "reaction" not in named:
            yield f"{at.text}: must have {{reaction}}, which the policy did not see"


class LiveSettings(Settings):
    """Learning from live traffic: the served requests that are recorded, and how they become training data."""

    keys_file: str | None = None
    """File with a line `NAME TOKEN` for each client. null: those of the environment variable `GOALY_KEYS`, as
    `NAME=TOKEN,NAME=TOKEN`. Without any, every client on this machine is served, under the name `local`."""
    trained_keys: tuple[str, ...] = ()
    """Names of the keys whose conversations are recorded and trained. All others are served, and not recorded."""
    opt_out: UntrainedSettings = field(default_factory=_opt_out)
    """Requests with one of the trained keys that are served and not recorded, by patterns of the model that they name,
    of HTTP headers, or of the request's `metadata`."""
    redact: str | None = None
    """Function `redact(text) -> text`, as `package.module:function`, which is called with each text before anything is
    written. A turn that has a text which it changes is served, and neither recorded nor trained; of what is said about
    a turn, the changed text is kept. null keeps all texts."""
    idle_seconds: PositiveFloat = 1800.0
    """A session ends when it has had no request for this time."""
    session_turns: PositiveInt = 256
    """A session ends when it has this many turns; the next request of the conversation begins another one."""
    outcome_seconds: PositiveFloat = 3600.0
    """Longest time for which a turn waits for its outcome, and with one for its judgement. Then it is left out."""
    most_turns: PositiveInt = 10_000
    """Most turns that wait at the same time. Above it the oldest one without a reward is left out."""
    batch_seconds: PositiveFloat = 60.0
    """A batch forms when `backlog.group_size` turns have a reward, or this time after the first of them had it."""
    retry_reward: float | None = None
    """Reward of a turn after which the client asked for another answer to the same request; null leaves it to the
    judge."""
    edit_reward: float | None = None
    """Reward of a turn after which the client changed its message; null leaves it to the judge."""
    malformed_reward: float | None = -1.0
    """Reward of a turn with a malformed tool call, unless a score says otherwise. Null leaves it to what follows:
    policies then learn to emit calls that cannot be read."""
    hint: LiveHintSettings | None = None
    """A hint for the teacher of `loss.distill`; null gives none. With `live.judge.kind=none`, a turn with a hint is
    trained without a reward, by the teacher alone."""
    judge: LiveJudgeSettings = field(default_factory=LiveJudgeSettings)
    """The judge of turns whose outcome is not a score."""
    gate: GateSettings | None = None
    """Serve a version only when a test on canary problems has shown that it is not worse; `{}` has the defaults. null
    serves every version as it comes."""
    candidate_share: Share = 0.1
    """Share of the new conversations that a version on trial may answer."""
    on_regression: Literal["roll_back", "hold", "stop"] = "roll_back"
    """Reaction to a version that is worse: `roll_back` gives the trainer the state of the served version, `hold` goes
    on training, `stop` ends training and goes on serving."""

    @property
    def keys(self) -> dict[str, str]:
        """The name of each token."""
        return keys_of(self.keys_file)

    def problems_beside(self, at: Section, config: Any, root: Section) -> Iterator[str]:
        """A line for each setting of the run that does not fit."""
        endpoint, backlog = config.rollout.endpoint, config.backlog
        if endpoint is None:
            yield f"{root}rollout.endpoint=null: must be a section: it has the address of the server"
        else:
            yield from self._key_problems(at, endpoint.host)
        if config.rollout.workers != 1:
            yield f"{root}rollout.workers={config.rollout.workers}: must be 1, which has the sessions of all clients"
        if backlog.groups_per_step != 1 or backlog.window != 1 or backlog.order != "windowed":
            yield f"{root}backlog.groups_per_step: must be 1, with window=1 and order=windowed: a group is a batch"
        if backlog.dynamic_sampling:
            yield f"{root}backlog.dynamic_sampling: must be false: a live batch is not sampled again"
        if self.hint is not None and config.loss.distill is None:
            yield f"{root}loss.distill: must be a section where {at}hint is set: its teacher sees the hint"
        if self.gate is None:
            yield from at.idle(f"{at}gate is null", "candidate_share", "on_regression")
        else:
            yield from self._gate_problems(self.gate, at, config, root)
        if config.moe.replays:
            yield f"{root}moe.routing: must be own: turns are trained in other trajectories than they were sampled in"

    def _gate_problems(self, gate: GateSettings, at: Section, config: Any, root: Section) -> Iterator[str]:
        replicas, slots, sets = config.generator.replicas, config.weights.slots, config.evaluation.named
        if replicas < 2:
            yield f"{root}generator.replicas={replicas}: must be at least 2 with {at}gate, one for the candidate"
        if slots < GATE_SLOTS:
            yield f"{root}weights.slots={slots}: must be at least {GATE_SLOTS} with {at}gate"
        if config.trainer.lora is not None:
            yield f"{root}trainer.lora: must be null with {at}gate: a replica cannot start from adapters"
        if gate.canary is not None and gate.canary not in sets:
            yield f"{at}gate.canary={gate.canary}: must be one of evaluation.sets, which are {', '.join(sets)}"
        if gate.shadow_pairs:
            yield f"{at}gate.shadow_pairs={gate.shadow_pairs}: must be 0: a live run keeps no prompts of ended sessions"

    def _key_problems(self, at: Section, host: str) -> Iterator[str]:
        try:
            names = {*self.keys.values()}
        except (OSError, ValueError) as error:
            yield f"{at.keys_file}: cannot be read: {error}"
            return
        if not names and not is_loopback(host):
            yield f"{at.keys_file}: must name the clients' keys where others than this machine can connect, or {KEYS}"
        known = names or {LOCAL}
        for name in self.trained_keys:
            if name not in known:
                yield f"{at}trained_keys: {name!r} is no key; known are {', '.join(sorted(known))}"

    def _problems(self, at: Section) -> Iterator[str]:
        if self.redact is not None:
            yield from _path_problems("redact", self.redact, at)


def _path_problems(name: str, path: str, at: Section) -> Iterator[str]:
    """One line if this setting is not the path of a function."""
    module, colon, function = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), function)):
        yield f"{at}{name}={path}: must be package.module:function"

"""The settings of a run: those of each stage, and the checks of their combination."""

from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from goaly.agents.settings import AgentSettings
from goaly.backlog.guard_settings import GuardSettings
from goaly.backlog.settings import BacklogSettings
from goaly.base.config import RUN_CONFIG, load
from goaly.base.config.settings import PositiveInt, Section, Settings
from goaly.base.errors import ConfigError
from goaly.base.telemetry.settings import TelemetrySettings
from goaly.coding.settings import CodingSettings
from goaly.generate.settings import NO_ADAPTERS, GeneratorSettings, SamplingSettings, vllm_device
from goaly.journal.checkpoint_settings import CheckpointSettings
from goaly.live.settings import LiveSettings
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings, MoeSettings
from goaly.numerics import SLICES
from goaly.plan.host_settings import HostSettings
from goaly.prompts.prompt import Split
from goaly.prompts.settings import CODING_READER, REASONING_GYM, SCORING, ChatSettings, PromptSettings, absent_files
from goaly.reward.settings import AdvantageSettings, RewardSettings
from goaly.rollout.evaluation_settings import EvaluationSettings
from goaly.rollout.settings import RolloutSettings
from goaly.sandboxes.settings import SandboxSettings
from goaly.train.settings import NOT_BITWISE, CriticSettings, RanksSettings, ReferenceSettings, TrainerSettings
from goaly.weights.settings import WeightSettings


class SaveSettings(Settings):
    """Policies that are kept as Hugging Face folders under `policies/` in the run folder. The final policy is saved as
    `policy/` in any case. The trainer waits while a policy is written."""

    every: PositiveInt | None = None
    """Save every N-th policy version, as `policies/VERSION`; null saves none of them. Set it to compare policies of
    a run, or to have weights of a run that takes days before it ends."""
    keep: PositiveInt | None = None
    """Number of the newest of these policies that are kept; null keeps all. Lower it if the disk is small."""
    best: bool = False
    """Keep the policy with the highest pass@1 on the first evaluation set as `policies/best`. Only evaluations of
    `evaluation.every` count; of equal ones the first is kept."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.every is None:
            yield from at.idle(f"{at}every is null", "keep")


class RunConfig(Settings):
    """An RL run."""

    switch: ClassVar[str] = "model.tiny"
    """The key that puts the values of `switched` in place of those of a config's files."""

    steps: PositiveInt
    """Number of training steps, each on one batch. The run ends after the last one."""
    run_dir: str = "runs/{time}"
    """The run's folder; `{time}` becomes the start time. A folder of another run is refused."""
    model: ModelSettings
    """The model that the run starts from."""
    moe: MoeSettings = field(default_factory=MoeSettings)
    """Experts of the model, if it has some."""
    prompts: PromptSettings = field(default_factory=PromptSettings)
    """Sources of prompts."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    """Chat template that turns prompts into text, and parsers of answers."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Rollout workers, which run the episodes."""
    agent: AgentSettings | None = None
    """Agent that the episodes of `apps.agent.main` run; null is none, as every other script needs it."""
    coding: CodingSettings | None = None
    """Coding agent that the episodes of `apps.coding.main` run; null is none, as every other script needs it. `{}` has
    the defaults."""
    live: LiveSettings | None = None
    """Live traffic that `apps.live.main` serves and learns from; null is none, as every other script needs it."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """Sandboxes in which a coding agent works."""
    generator: GeneratorSettings = field(default_factory=GeneratorSettings)
    """Inference engines that sample the policy."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """Sampling parameters of answers, unless an episode sets its own."""
    reward: RewardSettings = field(default_factory=RewardSettings)
    """Verifier of finished sequences."""
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    """Advantages of tokens, computed from rewards."""
    backlog: BacklogSettings = field(default_factory=BacklogSettings)
    """Batches, and how far generation runs ahead of training."""
    loss: LossSettings = field(default_factory=LossSettings)
    """Loss that the trainer minimizes."""
    guard: GuardSettings = field(default_factory=GuardSettings)
    """Guard against a collapse of the policy."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """Processes and optimizer of the trainer."""
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    """Model of the KL term, and the teacher of `loss.distill`; it is started only if one of `loss.kl_coef` and
    `advantages.kl_coef` is above 0 or `loss.distill` is set."""
    critic: CriticSettings | None = None
    """Model that predicts values, for advantages that use them; null is none. `critic: {}` has the defaults."""
    weights: WeightSettings = field(default_factory=WeightSettings)
    """Transfer of new weights to the generators."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """Checkpoints, from which the run can be resumed."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Evaluation of the policy: where the script asks for it, and every `evaluation.every` policy versions."""
    save: SaveSettings = field(default_factory=SaveSettings)
    """Policies that are kept as Hugging Face folders beside the final one."""
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    """Records and progress display of the run."""
    hosts: HostSettings = field(default_factory=HostSettings)
    """Hosts, GPUs and cores of the run's processes."""

    @classmethod
    def switched(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of a tiny run of this kind, by key."""
        from goaly.plan.tiny_run import tiny_values  # imports torch, which `--help` does not need

        return tiny_values(values)

    @property
    def uses_kl(self) -> bool:
        """Whether the loss or the advantages compare the policy with the reference model."""
        return self.loss.kl_coef > 0 or self.advantages.kl_coef > 0

    @property
    def uses_reference(self) -> bool:
        """Whether the run has a reference model, to compare with or as a teacher."""
        return self.uses_kl or self.loss.distill is not None

    @property
    def earlier_policies(self) -> int:
        """Older policy versions of which the trainer keeps the parameters to compare log-probs of their samples: with
        bitwise numerics as many as a token can be old, or if nothing bounds that `backlog.max_staleness`."""
        if self.model.numerics != "bitwise":
            return 0
        bound = self.backlog.max_age
        return self.backlog.max_staleness if bound is None else bound

    @property
    def max_context(self) -> int:
        """Most tokens of a trained prompt and answer: what a generator and a packed row both hold."""
        return min(self.generator.max_context, self.backlog.row_length)

    def absent_files(self, at: Section) -> Iterator[str]:
        """One line for each data file that does not exist."""
        yield from absent_files(self.prompts, at.prompts)
        yield from absent_files(self.evaluation, at.evaluation)

    def refused_changes(self, resumed: "RunConfig") -> Iterator[str]:
        """A line for each setting that the resumed run may not change."""
        from goaly.plan.resumed_settings import refused

        return refused(self, resumed)

    def _problems(self, at: Section) -> Iterator[str]:
        sampling = self.sampling
        yield from sampling.training_problems(at.sampling, f"{at}trainer.temperature", self.trainer.temperature)
        if sampling.max_tokens >= self.max_context:
            yield (
                f"{at.sampling.max_tokens}: must leave room for a prompt in {self.max_context} tokens, the least of "
                f"{at}generator.max_context and {at}backlog.row_length"
            )
        yield from self.evaluation.problems_beside(at.evaluation, self.prompts, sampling, self.generator.max_context)
        if self.trainer.minibatches > self.backlog.groups_per_step:
            most = at.backlog.groups_per_step
            yield f"{at.trainer.minibatches}: must be at most {most}, because groups are not split"
        agent = self.agent
        if agent is not None and self.rollout.endpoint is None and not (agent.problems("") or agent.is_episode):
            yield f"{at}rollout.endpoint=null: must be a section, because the agent asks there; `{{}}` has the defaults"
        if self.coding is not None and not self.coding.problems(""):
            yield from self.coding.problems_beside(
                at.coding, self.chat, f"{at}chat.", self.rollout.endpoint is not None
            )
        if self.coding is not None:
            yield from _reader_problems(self.prompts, at.prompts)
        if self.live is not None:
            yield from self.live.problems_beside(at.live, self, at)
        yield from self._device_problems(at)
        yield from self._prompt_problems(at)
        yield from self._idle_problems(at)
        yield from self._advantage_problems(at)
        yield from self._model_problems(at)

    def _device_problems(self, at: Section) -> Iterator[str]:
        device, elsewhere = self.hosts.device, self.hosts.job != "local"
        yield from self.generator.device_problems(f"{at}generator.", device=device)
        yield from self.trainer.device_problems(f"{at}trainer.", device=device, elsewhere=elsewhere)
        if self.uses_reference:
            yield from self.reference.device_problems(f"{at}reference.", device=device, elsewhere=elsewhere)

    def _prompt_problems(self, at: Section) -> Iterator[str]:
        from goaly.prompts.mixture import empty_split, unreadable, with_tools

        if self.hosts.imagine is None:  # else the files may be on the imagined hosts only
            yield from self.absent_files(at)
        if self.prompts.problems(""):
            return
        if not any(absent_files(self.prompts, at.prompts)):
            if (why := unreadable(self.prompts)) is not None:
                yield f"{at}prompts.files: {why}"
            elif (why := empty_split(self.prompts, Split.TRAIN)) is not None:
                yield f"{at.prompts.held_out_fraction}: must leave something to train on: {why}"
            elif self.agent is not None and self.agent.warning(self.chat) is not None and with_tools(self.prompts):
                yield f"{at.chat.tool_parser}: must name vLLM's parser of the model's calls, because prompts have tools"
        tasks = {source.task for source in self.prompts.sources or (self.prompts,)}
        if tasks == {REASONING_GYM} and self.reward.verifier == RewardSettings().verifier:
            yield f"{at.reward.verifier}: must be {SCORING} where {at}prompts.task is {REASONING_GYM}, or your own"

    def _idle_problems(self, at: Section) -> Iterator[str]:
        """One line for each setting that has no effect."""
        from goaly.losses.policy_losses import traits  # imports torch, which `--help` does not need

        loss, advantages = self.loss, self.advantages
        oldest = None if self.backlog.problems("") else self.backlog.max_age
        absent = {}
        if not self.uses_reference:
            absent["reference"] = f"{at}loss.kl_coef and {at}advantages.kl_coef are 0 and {at}loss.distill is null"
            yield from at.reference.idle(absent["reference"])
        if self.critic is None and not advantages.problems("") and not advantages.uses_values:
            absent["critic"] = f"{at}critic is null"
        for section, every in ((at.evaluation, self.evaluation.every), (at.save, self.save.every)):
            if every is not None and every > self.steps:
                yield from section.idle(f"the run ends after {at.steps}", "every")
        if self.evaluation.every is None:
            yield from at.save.idle(f"{at}evaluation.every is null", "best")
        if loss.distill is None:
            yield from at.rollout.idle(f"{at}loss.distill is null", "hint")
        if self.coding is None:
            yield from at.sandbox.idle(f"{at}coding is null")
        yield from self.guard.problems_beside(at.guard, at.backlog, self.backlog)
        for role, cores in self.hosts.bind.items():
            if role in absent:
                yield f"{at}hosts.bind.{role}={cores}: has no effect, {absent[role]}"
        if loss.max_age is not None and oldest is not None and loss.max_age >= oldest:
            yield from at.loss.idle(f"{at}backlog bounds the age of tokens to {oldest} versions", "max_age")
        of_itself = self.reference.refresh_every == self.trainer.minibatches == 1
        if loss.kl_coef > 0 and loss.kl_estimator != "k1" and of_itself:
            same = f"with {at.reference.refresh_every} and {at.trainer.minibatches} the reference is the policy itself"
            yield f"{at.loss.kl_coef}: has no effect, {same}"
        overlong = advantages.overlong
        if overlong is not None and overlong.limit - overlong.buffer >= self.max_context:
            most = f"a sequence has at most {self.max_context} tokens"
            yield f"{at.advantages.overlong.limit}: has no effect, {most}"
        if (
            not loss.problems("")
            and loss.proximal == "trainer"
            and self.trainer.minibatches == 1
            and traits(loss.name).bounds_ratio
        ):
            why = f"with {at.loss.proximal} and {at.trainer.minibatches} the ratio is 1"
            for option, value in loss.options.items():
                yield f"{at}loss.options.{option}={value}: has no effect, {why}"

    def _advantage_problems(self, at: Section) -> Iterator[str]:
        from goaly.reward.advantages import ESTIMATORS  # imports torch, which `--help` does not need

        critic, advantages = self.critic, self.advantages
        sound = not advantages.problems("")
        if sound and self.backlog.dynamic_sampling and not advantages.compares_groups:
            fit = [name for name in ESTIMATORS.names if AdvantageSettings(name=name).compares_groups]
            yield (
                f"{at.backlog.dynamic_sampling}: must be false where {at}advantages.name is {advantages.name}, which "
                f"also learns from groups of equal rewards; {', '.join(fit)} do not, nor do functions of your own with "
                "@compares_groups"
            )
        if self.loss.reward_weight == 0 and self.backlog.dynamic_sampling:
            yield f"{at.backlog.dynamic_sampling}: must be false where {at.loss.reward_weight}: rewards are not trained"
        if sound and self.backlog.group_size == 1 and advantages.compares_groups and self.loss.reward_weight:
            because = f"because {at.advantages.name} compares a sample with the others of its group"
            yield f"{at.backlog.group_size}: must be at least 2, {because}"
        if critic is not None and critic.value_clip is not None and critic.epochs * self.trainer.minibatches == 1:
            steps = f"{at}critic.epochs * {at}trainer.minibatches is 1"
            yield f"{at.critic.value_clip}: has no effect on a batch's first step, and {steps}"
        if sound and critic is None and advantages.uses_values:
            because = f"because {at.advantages.name} uses a critic's values"
            yield f"{at.critic}: must be a section, {because}; `critic: {{}}` has the defaults"
        if sound and critic is not None and not advantages.uses_values:
            because = f"because {at}critic is set"
            yield f"{at.advantages.name}: must be gae, or another that uses a critic's values, {because}"

    def _model_problems(self, at: Section) -> Iterator[str]:
        from goaly.models.catalog import shape_of  # imports torch, which `--help` does not need
        from goaly.models.definition import bitwise_problems
        from goaly.models.weight_files import weight_problems
        from goaly.plan.teacher import teacher_problems, top_problems
        from goaly.prompts.tokenizer import chat_problems, tokenizer_problems  # imports jinja

        model, device = None, self.hosts.device or vllm_device()
        for whose, (settings, divided) in self._folders().items():
            if settings.problems(""):
                continue  # the section's own problem
            where = f"{at}{whose}.path={settings.path}"
            try:
                shape = shape_of(settings, where)
            except ConfigError as error:
                yield from error.problems
                continue
            if self.hosts.imagine is None and (Path(settings.path) / "config.json").is_file():
                yield from weight_problems(settings.path, shape, where, head=whose != "critic")
                if whose == "model":
                    yield from tokenizer_problems(settings.path, shape.vocab_size, self.chat, where)
            if whose == "reference" and model is not None:
                yield from teacher_problems(self.loss, at, settings.path, shape, self.model.path, model)
            for section, ranks in divided.items():
                yield from ranks.shape_problems(Section(ranks, f"{at}{section}."), shape, whose)
            if self.model.numerics == "bitwise":
                own, lora = f"{at}{whose}.path={settings.path}: ", None
                if whose == "model":
                    own, lora = "", self.trainer.lora
                yield from (f"{own}{at.model.numerics}: {problem}" for problem in bitwise_problems(shape, lora))
            if whose == "model":
                model = shape
                yield from top_problems(self.loss, at, shape)
                yield from self.trainer.balance_problems(at.trainer, shape)
                if not shape.experts:
                    yield from at.moe.idle("the model has no experts", "routing")
                elif self.trainer.compile and self.model.dtype == "float32":
                    yield f"{at.trainer.compile}: needs {at.model}dtype=bfloat16 for a model with experts"
                if shape.experts and self.trainer.expert_balance and self.loss.denominator == "after":
                    why = "which divides the balance's gradient by the number of kept tokens, too"
                    yield f"{at.trainer.expert_balance}: must be 0 with {at}loss.denominator=after, {why}"
                if shape.experts and self.generator.engine == "native":
                    why = "vLLM packs its own ones after it has loaded them, so no update can be copied into them"
                    yield f"{at.generator.engine}: must be torchtitan for a model with experts: {why}"
                if self.trainer.lora is not None:
                    yield from self.trainer.lora.model_problems(at.trainer.lora, shape)
                    if self.generator.engine == "native":
                        yield f"{at.generator.engine}: {NO_ADAPTERS}"
                dtype, device_here = self.model.dtype, self.hosts.device
                yield from self.generator.model_problems(at.generator, at.model.path, shape, dtype, device=device_here)
                if self.model.numerics == "bitwise":
                    yield from self._bitwise_problems(at, device)
            if model is not None and model.experts and whose != "critic":  # which routes by its own scores
                yield from self.moe.shape_problems(at.moe, whose, shape, model)
        if not self.model.problems(""):
            yield from chat_problems(self.chat, self.model.path, f"{at}chat.")

    def _bitwise_problems(self, at: Section, device: str) -> Iterator[str]:
        """One line for each setting with which trainer and sampler would not compute the same bits."""
        because = f"with {at}model.numerics=bitwise"
        if self.trainer.compile:
            yield f"{at.trainer.compile}: must be false {because}: the compiler would fuse its operations into others"
        if self.generator.engine == "native":
            yield f"{at.generator.engine}: must be torchtitan {because}: vLLM's own models compute in their own order"
        if self.generator.on_update == "keep":
            yield (
                f"{at.generator.on_update}: must be recompute or drain {because}: a cache of older weights is not what "
                "the trainer computes"
            )
        if self.weights.transfer_dtype not in (None, self.model.dtype, "float32"):
            yield (
                f"{at.weights.transfer_dtype}: must be null or float32 {because}: the sampler's weights would be "
                "rounded otherwise than the trainer's"
            )
        if self.moe.replays and self.generator.on_update == "recompute" and self.backlog.max_staleness:
            yield (
                f"{at.moe.routing}: must be own {because}, or {at}generator.on_update drain, or "
                f"{at}backlog.max_staleness 0: after an update in the middle of an answer the sampler computes the "
                "tokens before it again, with other experts than it recorded for them; bitwise routers need no replay"
            )
        others = [(at.reference, self.reference), *([] if self.critic is None else [(at.critic, self.critic)])]
        for section, ranks in [(at.trainer, self.trainer), *others]:
            if ranks.cp > 1:
                yield f"{section.cp}: {NOT_BITWISE}"
        for section, ranks in [(at.trainer, self.trainer), (at.generator, self.generator), *others]:
            if ranks.tp > 1 and device == "cuda":
                untried = "where its kernels have not been tried with a part of a layer yet"
                yield f"{section.tp}: must be 1 {because} on GPUs, {untried}"
            elif ranks.tp > SLICES:
                yield f"{section.tp}: must be at most {SLICES} {because}: its sums have {SLICES} parts"

    def _folders(self) -> dict[str, tuple[ModelSettings, dict[str, RanksSettings | GeneratorSettings]]]:
        """Each model, by section, with the sections whose ranks divide it."""
        folders: dict[str, tuple[ModelSettings, dict[str, RanksSettings | GeneratorSettings]]] = {
            "model": (self.model, {"trainer": self.trainer, "generator": self.generator})
        }
        others = {"critic": self.critic, "reference": self.reference if self.uses_reference else None}
        for section, other in others.items():
            if other is not None:
                own = self.model if other.path is None else ModelSettings(path=other.path)
                ranks = other.engine_settings(self.trainer) if section == "reference" else other  # it may have adapters
                folders.setdefault("model" if other.path is None else section, (own, {}))[1][section] = ranks
        return folders


def config_of(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in the folder of a run, with these overrides; ConfigError if it is no such folder."""
    file = run_dir / RUN_CONFIG
    if not file.exists():
        raise ConfigError([f"{run_dir}: must be the folder of a run, which has a {RUN_CONFIG}"])
    return load(RunConfig, ["--config", str(file), *overrides], prog="", description="").config


def _reader_problems(prompts: PromptSettings, at: Section) -> Iterator[str]:
    """One line for each source of files that are not read as coding tasks."""
    inner = {f"{at}sources.{number}.": one for number, one in enumerate(prompts.sources)}
    for path, one in {str(at): prompts, **inner}.items():
        if one.files and one.reader is None:
            yield f"{path}reader=null: must be {CODING_READER} where coding is set"

"""The settings of a run: those of each stage, and the checks of their combination."""

from dataclasses import field

from goaly.backlog.settings import BacklogSettings
from goaly.config.settings import PositiveInt, settings
from goaly.config.wording import idle
from goaly.evaluation.settings import EvaluationSettings
from goaly.generate.settings import FLIP_UNDER_GRAPHS, GeneratorSettings, SamplingSettings
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.prompts.prompt import Split
from goaly.prompts.settings import ChatSettings, PromptSettings
from goaly.reward.settings import AdvantageSettings, RewardSettings
from goaly.rollout.settings import RolloutSettings
from goaly.run.settings import HostSettings
from goaly.telemetry.settings import TelemetrySettings
from goaly.train.settings import CriticSettings, ReferenceSettings, TrainerSettings
from goaly.weights.settings import WeightSettings


@settings
class RunConfig:
    """An RL run."""

    steps: PositiveInt
    """Training steps, each on one batch: the run ends after so many policy versions."""

    run_dir: str = "runs/{time}"
    """The run's folder; `{time}` becomes the start time. A folder of another run is refused."""

    model: ModelSettings
    """The model that the run starts from."""

    prompts: PromptSettings = field(default_factory=PromptSettings)
    """Sources of prompts."""

    chat: ChatSettings = field(default_factory=ChatSettings)
    """Chat template that turns prompts into text."""

    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Rollout workers, which run the episodes."""

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

    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """Processes and optimizer of the trainer."""

    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    """Model of the KL term; it is started only if `loss.kl_coef` or `advantages.kl_coef` is above 0."""

    critic: CriticSettings | None = None
    """Model that predicts values, for advantages that use them; null is none. `critic: {}` has the defaults."""

    weights: WeightSettings = field(default_factory=WeightSettings)
    """Transfer of new weights to the generators."""

    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Evaluation of the policy before and after training."""

    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    """Records and progress display of the run."""

    hosts: HostSettings = field(default_factory=HostSettings)
    """Hosts, GPUs and cores of the run's processes."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss or the advantages use the reference model's log-probs."""
        return self.loss.kl_coef > 0 or self.advantages.kl_coef > 0

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its answer together: a generator and a packed row must both hold them."""
        return min(self.generator.max_context, self.backlog.row_length)

    def problems(self, prefix: str) -> list[str]:
        """One line for each combination of sections that cannot work."""
        sampling = self.sampling
        found = sampling.training_problems(
            f"{prefix}sampling.", f"{prefix}trainer.temperature", self.trainer.temperature
        )
        if sampling.max_tokens >= self.max_context:
            found.append(
                f"{prefix}sampling.max_tokens={sampling.max_tokens}: must leave room for a prompt in "
                f"{self.max_context} tokens, the least of {prefix}generator.max_context and {prefix}backlog.row_length"
            )
        found += self.evaluation.problems_beside(f"{prefix}evaluation.", self.prompts, sampling, self.max_context)
        found += self._signal_problems(prefix)
        if self.trainer.minibatches > self.backlog.groups_per_step:
            found.append(
                f"{prefix}trainer.minibatches={self.trainer.minibatches}: must be at most "
                f"{prefix}backlog.groups_per_step={self.backlog.groups_per_step}, because groups are not split"
            )
        found += self._training_problems(prefix)
        found += self._idle_problems(prefix)
        found += self._group_problems(prefix)
        found += self._critic_problems(prefix)
        found += self._shape_problems(prefix)
        return found

    def _training_problems(self, prefix: str) -> list[str]:
        from goaly.prompts.mixture import empty_split, unreadable

        elsewhere = self.hosts.job != "local"
        found = self.trainer.device_problems(f"{prefix}trainer.", elsewhere=elsewhere)
        if self.uses_reference:
            found += self.reference.device_problems(f"{prefix}reference.", elsewhere=elsewhere)
        if self.prompts.problems(""):
            return found
        if (why := unreadable(self.prompts)) is not None:
            found.append(f"{prefix}prompts.files: {why}")
        elif (why := empty_split(self.prompts, Split.TRAIN)) is not None:
            fraction = f"{prefix}prompts.held_out_fraction={self.prompts.held_out_fraction}"
            found.append(f"{fraction}: must leave something to train on: {why}")
        return found

    def _idle_problems(self, prefix: str) -> list[str]:
        """One line for each setting that has no effect."""
        found, loss = [], self.loss
        oldest = None if self.backlog.problems("") else self.backlog.max_age
        no_reference = f"{prefix}loss.kl_coef and {prefix}advantages.kl_coef are 0"
        no_critic = f"{prefix}critic is null"
        found += [] if self.uses_reference else idle(self.reference, f"{prefix}reference.", no_reference)
        absent = {"reference": no_reference} if not self.uses_reference else {}
        wants_critic = self.critic is not None or self.advantages.problems("") or self.advantages.uses_values
        absent |= {} if wants_critic else {"critic": no_critic}
        for role in (role for role in self.hosts.bind if role in absent):
            found.append(f"{prefix}hosts.bind.{role}={self.hosts.bind[role]}: has no effect, {absent[role]}")
        if loss.max_age is not None and oldest is not None and loss.max_age >= oldest:
            found.append(
                f"{prefix}loss.max_age={loss.max_age}: has no effect, {prefix}backlog bounds the age of tokens to "
                f"{oldest} versions"
            )
        if (
            loss.kl_coef > 0
            and loss.kl_estimator != "k1"
            and self.reference.refresh_every == self.trainer.minibatches == 1
        ):
            found.append(
                f"{prefix}loss.kl_coef={loss.kl_coef}: has no effect, with {prefix}reference.refresh_every=1 and "
                f"{prefix}trainer.minibatches=1 the reference is the policy itself"
            )
        overlong = self.advantages.overlong
        if overlong is not None and overlong.limit - overlong.buffer >= self.max_context:
            found.append(
                f"{prefix}advantages.overlong.limit={overlong.limit}: has no effect, a sequence has at most "
                f"{self.max_context} tokens"
            )
        if loss.problems("") or not loss.options_have_no_effect(self.trainer.minibatches):
            return found
        return found + [
            f"{prefix}loss.options.{option}={value}: has no effect, with {prefix}loss.proximal=trainer and "
            f"{prefix}trainer.minibatches=1 the ratio is 1"
            for option, value in loss.options.items()
        ]

    def _group_problems(self, prefix: str) -> list[str]:
        size, advantages = self.backlog.group_size, self.advantages
        if size != 1 or advantages.problems("") or not advantages.compares_groups:
            return []
        return [
            f"{prefix}backlog.group_size={size}: must be at least 2, because {prefix}advantages.name={advantages.name} "
            "compares a sample with the others of its group"
        ]

    def _critic_problems(self, prefix: str) -> list[str]:
        critic = self.critic
        if critic is not None and critic.value_clip is not None and critic.epochs * self.trainer.minibatches == 1:
            clip = f"{prefix}critic.value_clip={critic.value_clip}"
            first = "has no effect on a batch's first step, and"
            return [f"{clip}: {first} {prefix}critic.epochs * {prefix}trainer.minibatches is 1"]
        name = self.advantages.name
        if self.advantages.problems("") or self.advantages.uses_values == (self.critic is not None):
            return []
        if self.critic is None:
            return [
                f"{prefix}critic=null: must be a section, because {prefix}advantages.name={name} uses a critic's "
                f"values; `critic: {{}}` has the defaults"
            ]
        return [
            f"{prefix}advantages.name={name}: must be gae, or another that uses a critic's values, because "
            f"{prefix}critic is set"
        ]

    def _signal_problems(self, prefix: str) -> list[str]:
        if not self.backlog.dynamic_sampling or self.advantages.problems("") or self.advantages.compares_groups:
            return []
        from goaly.reward.advantages import ESTIMATORS  # imports torch, which `--help` does not need

        fit = [name for name in ESTIMATORS.names if AdvantageSettings(name=name).compares_groups]
        return [
            f"{prefix}backlog.dynamic_sampling=true: must be false where {prefix}advantages.name is "
            f"{self.advantages.name}, which also learns from groups of equal rewards; {', '.join(fit)} do not, nor "
            "do functions of your own with @compares_groups"
        ]

    def _shape_problems(self, prefix: str) -> list[str]:
        from goaly.errors import ConfigError
        from goaly.models.spec import architecture, read_config  # imports torch, which `--help` does not need

        found = []
        for whose, (path, degrees) in self._folders().items():
            if ModelSettings(path=path).problems(""):
                continue  # the section's own problem
            try:
                shape = architecture(read_config(path), where=f"{prefix}{whose}.path={path}")
            except ConfigError as error:
                found += error.problems
                continue
            for key, tp in degrees.items():
                for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
                    if count % tp:
                        found.append(f"{prefix}{key}={tp}: must divide the {whose}'s {count} {what}")
            if whose == "model":
                found += self.generator.model_problems(f"{prefix}generator.", f"{prefix}model.path={path}", shape)
        return found + self._chat_problems(prefix) + self._flip_problems(prefix)

    def _chat_problems(self, prefix: str) -> list[str]:
        from goaly.prompts.tokenizer import chat_problems  # imports jinja, which `--help` does not need

        return [] if self.model.problems("") else chat_problems(self.chat, self.model.path, f"{prefix}chat.")

    def _folders(self) -> dict[str, tuple[str, dict[str, int]]]:
        """Each folder of a model, by section, with the tensor-parallel degrees that must divide the model's heads."""
        folders = {"model": (self.model.path, {"trainer.tp": self.trainer.tp, "generator.tp": self.generator.tp})}
        others = {"critic": self.critic, "reference": self.reference if self.uses_reference else None}
        for section, other in others.items():
            if other is not None:
                whose = "model" if other.path is None else section
                path = self.model.path if other.path is None else other.path
                folders.setdefault(whose, (path, {}))[1][f"{section}.tp"] = other.tp
        return folders

    def _flip_problems(self, prefix: str) -> list[str]:
        import torch

        if self.weights.apply == "flip" and self.generator.cuda_graphs and torch.cuda.is_available():
            return [f"{prefix}weights.apply=flip: {FLIP_UNDER_GRAPHS}"]
        return []

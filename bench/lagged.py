"""A run in which every group is as old as the staleness bound allows, in one process: same inputs, same numbers.

In a run of actors the age of what is trained depends on how fast the machine generates, and the bound is seldom
reached. Here step k is sampled, to the last token, by the oldest weights that admission allows, max(0, k - S).
The parts are those of a run: admission's arithmetic, prompts, vLLM's engine, verifier, episodes, advantages, packing,
losses and the training engine. Only the actors around them are not there.

Invariants
    LA-1  Every token of step k is drawn by version `StalenessBound.min_version` of the step's first group.
    LA-2  Nothing depends on the machine's speed, nor on the runs that came before.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from goaly.backlog.batch import Batch, build_batch
from goaly.backlog.settings import BacklogSettings
from goaly.backlog.staleness import StalenessBound
from goaly.generate.policy import Completion
from goaly.generate.request import Sample, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.losses.tokens import Tokens
from goaly.models.settings import ModelSettings
from goaly.prompts.prompt import Prompt, Split
from goaly.prompts.settings import ArithmeticSettings, PromptSettings
from goaly.prompts.stream import PromptStream
from goaly.prompts.tasks import arithmetic
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.settings import AdvantageSettings
from goaly.rollout.episode import Episode
from goaly.train.settings import OptimizerSettings, ScheduleSettings, TrainerSettings
from goaly.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from goaly.train.train_engine import TrainEngine

Verify = Callable[[Prompt, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggedSettings:
    """What all runs of an experiment share."""

    model: str = "runs/sft-tiny"
    """The warm start."""
    steps: int = 80
    groups_per_step: int = 4
    group_size: int = 8
    max_tokens: int = 40
    digits: int = 3
    """Of both numbers to add: answers of one length, so that the generator's batches stay full."""
    warmup_steps: int = 5
    evaluate_every: int = 20
    evaluation_prompts: int = 64
    """Held-out prompts of the evaluations under way."""
    final_prompts: int = 256
    """Those of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run came to."""

    curve: list[tuple[int, float]]
    """Policy version, held-out pass@1."""
    metrics: list[dict[str, float]]
    """What the trainer and the batch report, a step each."""
    stopped_at: int | None = None
    """The version whose step had a loss or gradient that was not finite: it stayed the last one."""

    @property
    def pass_at_1(self) -> float:
        """Held-out pass@1 of the last version."""
        return self.curve[-1][1]

    @property
    def area(self) -> float:
        """Mean pass@1 over the run: the area under the curve, over its length."""
        pairs = zip(self.curve, self.curve[1:], strict=False)
        return sum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairs) / self.curve[-1][0]


def uncorrected(tokens: Tokens) -> torch.Tensor:
    """`-A log p`: the policy gradient as if the tokens came from the current policy."""
    return -tokens.advantages_P * tokens.logprobs_P


class Laboratory:
    """One generator, which all runs share, one after the other."""

    def __init__(self, settings: LaggedSettings, verify: Verify = arithmetic.verify):
        from goaly.generate.vllm_engine import VllmEngine

        self._settings = settings
        self._verify = verify
        self._model = ModelSettings(path=settings.model)
        self._tokenizer = ChatTokenizer(settings.model)
        self._generator = VllmEngine(
            GeneratorSettings(on_update="drain", max_running=128, max_context=256, kv_cache_gib=0.25), self._model
        )
        self._backlog = BacklogSettings(
            groups_per_step=settings.groups_per_step, group_size=settings.group_size, row_length=1024
        )
        self._sampling = Sampling(max_tokens=settings.max_tokens, stop_token_ids=self._tokenizer.stop_token_ids)

    def run(self, loss: LossSettings, max_staleness: int, seed: int, lr: float) -> Outcome:
        """Train from the warm start, every group as old as the bound allows; `lr` decays linearly to a tenth."""
        from goaly.train.train_engine import TrainEngine

        settings = self._settings
        torch.manual_seed(seed)  # LA-2
        trainer, objective = TrainEngine(self._model, self._trainer_settings(lr)), PolicyObjective(loss)
        tickets_by_version = self._tickets_by_version(max_staleness)
        prompts = PromptStream(self._prompt_settings(seed))
        held_out = self._held_out()
        waiting: deque[Group] = deque()
        curve: list[tuple[int, float]] = []
        metrics: list[dict[str, float]] = []
        stopped_at = None
        for version in range(settings.steps):
            self._load(trainer)
            if version % settings.evaluate_every == 0:
                curve.append((version, self._pass_at_1(held_out[: settings.evaluation_prompts])))
            if stopped_at is not None:
                continue
            waiting += self._groups({ticket: prompts.next() for ticket in tickets_by_version[version]})
            batch = self._batch(version, [waiting.popleft() for _ in range(settings.groups_per_step)])
            try:
                metrics.append(batch.handle.metrics | trainer.train_step(batch.ranks[0], objective))
            except FloatingPointError:  # the parameters are as they were
                stopped_at = version
        self._load(trainer)
        curve.append((settings.steps, self._pass_at_1(held_out)))
        return Outcome(curve=curve, metrics=metrics, stopped_at=stopped_at)

    def _tickets_by_version(self, max_staleness: int) -> dict[int, list[int]]:
        """The tickets, in order, by the oldest version that may sample them (LA-1)."""
        settings = self._settings
        admission = StalenessBound(settings.groups_per_step, max_staleness, settings.steps)
        tickets: dict[int, list[int]] = defaultdict(list)
        for ticket in range(settings.steps * settings.groups_per_step):
            tickets[admission.min_version(ticket)].append(ticket)
        return tickets

    def _batch(self, version: int, groups: Sequence[Group]) -> Batch:
        return build_batch(
            version,
            groups,
            settings=self._backlog,
            advantage_settings=AdvantageSettings(),
            dp_ranks=1,
            pad_token=self._tokenizer.pad_token,
        )

    def _groups(self, asked: dict[int, Prompt]) -> list[Group]:
        size = self._settings.group_size
        questions = {ticket: self._tokenizer.render(prompt.messages) for ticket, prompt in asked.items()}
        samples = self._sample([question for question in questions.values() for _ in range(size)])
        groups = []
        for place, (ticket, prompt) in enumerate(asked.items()):
            trajectories = tuple(
                self._trajectory(prompt, questions[ticket], index, samples[place * size + index])
                for index in range(size)
            )
            groups.append(Group(ticket=ticket, prompt_id=prompt.id, source=prompt.source, samples=trajectories))
        return groups

    def _sample(self, questions: Sequence[list[int]]) -> list[Sample]:
        for number, question in enumerate(questions):
            self._generator.add(str(number), question, self._sampling)
        ended: dict[str, Sample] = {}
        while self._generator.running:
            ended |= dict(self._generator.step())
        return [ended[str(number)] for number in range(len(questions))]

    def _trajectory(self, prompt: Prompt, question: list[int], index: int, sample: Sample) -> Trajectory:
        text = self._tokenizer.decode(sample.tokens.tolist())
        completion = Completion(
            prompt=tuple(question),
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish=sample.finish,
            text=text,
        )
        return Episode(prompt, question, index).wrote(completion).finish(self._verify(prompt, text))

    def _pass_at_1(self, prompts: Sequence[Prompt]) -> float:
        samples = self._sample([self._tokenizer.render(prompt.messages) for prompt in prompts])
        texts = [self._tokenizer.decode(sample.tokens.tolist()) for sample in samples]
        return fmean(self._verify(prompt, text) for prompt, text in zip(prompts, texts, strict=True))

    def _load(self, trainer: "TrainEngine") -> None:
        """The trainer's weights and version into the generator."""

        def fill() -> int:
            weights = trainer.named_tensors()
            for name, tensor in self._generator.named_tensors().items():
                tensor.copy_(weights[name])
            return trainer.policy_version

        self._generator.apply(fill)

    def _held_out(self) -> list[Prompt]:
        stream = PromptStream(self._prompt_settings(0), Split.HELD_OUT)
        return [stream.next() for _ in range(self._settings.final_prompts)]

    def _prompt_settings(self, seed: int) -> PromptSettings:
        settings = self._settings
        return PromptSettings(
            arithmetic=ArithmeticSettings(min_digits=settings.digits, max_digits=settings.digits), seed=seed
        )

    def _trainer_settings(self, lr: float) -> TrainerSettings:
        return TrainerSettings(
            optimizer=OptimizerSettings(lr=lr),
            schedule=ScheduleSettings(
                warmup_steps=self._settings.warmup_steps,
                decay="linear",
                total_steps=self._settings.steps,
                min_lr_factor=0.1,
            ),
        )

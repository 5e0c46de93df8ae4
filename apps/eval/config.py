"""The settings of an evaluation."""

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

from goaly.agents.settings import AgentSettings
from goaly.base.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings
from goaly.base.errors import ConfigError
from goaly.coding.settings import CodingSettings
from goaly.generate.settings import GeneratorSettings, SamplingSettings
from goaly.models.settings import ModelSettings
from goaly.prompts.settings import ChatSettings, PromptSettings, absent_files
from goaly.reward.settings import RewardSettings
from goaly.rollout.evaluation_settings import EvaluationSettings
from goaly.sandboxes.settings import SandboxSettings

NO_LIMIT = 1 << 40
"""More tokens than any context has."""


class EvalGeneratorSettings(GeneratorSettings):
    """A vLLM engine in this process, whose weights never change."""

    def _problems(self, at: Section) -> Iterator[str]:
        yield from super()._problems(at)
        yield from self.device_problems(str(at), updates=False)
        for name in ("replicas", "tp"):
            if getattr(self, name) > 1:
                yield f"{at}{name}={getattr(self, name)}: must be 1, an evaluation has one process"
        yield from at.idle("an evaluation has no other process to wait for", "start_minutes")
        yield from at.idle("the weights never change", "on_update")


class RemoteSettings(Settings):
    """An API of OpenAI's kind, such as vLLM's own server or `apps.serve.main`."""

    url: str
    """Address of the API, with its version: `http://HOST:PORT/v1`."""
    model: str | None = None
    """Name of the model there; null: the first one that the API lists."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; if it is not set, none is sent."""

    def _problems(self, at: Section) -> Iterator[str]:
        if not self.url.startswith(("http://", "https://")):
            yield f"{at.url}: must be an address such as http://127.0.0.1:8000/v1"


class EvalConfig(Settings):
    """An evaluation."""

    path: str | None = None
    """Folder of the policy: a Hugging Face folder, or a run's folder, of which the final policy is evaluated. null: the
    policy is at `endpoint`."""
    endpoint: RemoteSettings | None = None
    """API that the policy is reached by, in place of a folder; `generator` and `chat` have no effect then."""
    agent: AgentSettings | None = None
    """Agent whose final answers are scored, or a script's episode, which rewards itself; a function runs in this
    process. null: the policy's own answers."""
    coding: CodingSettings | None = None
    """Coding agent that works on the problems, which must be coding tasks; `{}` has the defaults."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """Sandboxes in which a coding agent works."""
    concurrency: PositiveInt = 64
    """Most attempts at once of an `agent` or a `coding` agent, or at an `endpoint`."""
    episode_seconds: PositiveFloat | None = 3600.0
    """Time limit of an agent's attempt, whose reward is 0 after that; null is no limit."""
    episode_retries: NonNegativeInt = 0
    """How often an agent's attempt may begin again after its environment or sandbox died, or its patch could not be
    graded. An attempt that fails for good has reward 0."""
    prompts: PromptSettings = field(default_factory=PromptSettings)
    """Prompts of the training run. Copy the section from the run: it decides which problems are held out."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Sets of problems; the section has the same keys as in a run, of which `every` has no effect here."""
    by: str | None = None
    """Also report by this metadata column of the prompts, such as `digits`."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """Sampling parameters of the answers; a set may override some of them."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    """Chat template options. Copy the section from the run."""
    reward: RewardSettings = field(default_factory=RewardSettings)
    """Verifier that scores the answers, and its limits; the keys are those of a run, of which `placement` has no effect
    here."""
    generator: EvalGeneratorSettings = field(default_factory=EvalGeneratorSettings)
    """vLLM engine that generates the answers: its memory, context length and threads. `on_update` and `start_minutes`
    have no effect here."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations."""
    output: str | None = None
    """JSON file to write the results to."""
    attempts: str | None = None
    """JSONL file with a line for each attempt of an agent: its reward, and all that its script noted, such as the
    commands of a coding agent with their outputs, its patch and its grade."""
    predictions: str | None = None
    """JSONL file to write the patches of a `coding` agent to, in SWE-bench's form. With several samples a prompt there
    is a file for each: `NAME.1.jsonl`, and so on."""

    def _problems(self, at: Section) -> Iterator[str]:
        yield from at.reward.idle("an evaluation has one process", "placement")
        yield from at.evaluation.idle("nothing is trained here", "every")
        for name in ("prompts", "evaluation"):
            yield from absent_files(getattr(self, name), getattr(at, name))
        if self.agent is not None and self.coding is not None:
            yield f"{at}agent: must be null where {at}coding is set"
        if self.coding is None:
            yield from at.sandbox.idle(f"{at}coding is null")
            yield from at.idle(f"{at}coding is null", "predictions")
        elif not self.coding.problems("") and self.path is not None:
            yield from self.coding.problems_beside(at.coding, self.chat, f"{at}chat.", has_endpoint=True)
        if not self.runs_episodes:
            idle = f"{at}agent and {at}coding are null"
            yield from at.idle(idle, "episode_seconds", "episode_retries", "attempts")
        if (self.path is None) == (self.endpoint is None):
            yield f"{at.path}: set either path, a folder of the policy, or endpoint, an API that answers for it"
            return
        max_context = NO_LIMIT if self.path is None else self.generator.max_context
        yield from self.evaluation.problems_beside(at.evaluation, self.prompts, self.sampling, max_context)
        if self.path is None:
            yield from at.idle(f"the policy is at {at}endpoint", "dtype")
            return
        if not self.runs_episodes:
            yield from at.idle(f"{at}agent, {at}coding and {at}endpoint are null", "concurrency")
        if problems := self.model.problems(str(at)):
            yield from problems
            return
        from goaly.models.catalog import shape_of  # imports torch, which `--help` does not need
        from goaly.models.weight_files import weight_problems
        from goaly.prompts.tokenizer import chat_problems, tokenizer_problems  # imports jinja

        yield from chat_problems(self.chat, self.model.path, f"{at}chat.")
        try:
            shape = shape_of(self.model, at.path)
        except ConfigError as error:
            yield from error.problems
        else:
            yield from self.generator.model_problems(at.generator, at.path, shape, self.dtype)
            yield from weight_problems(self.model.path, shape, at.path)
            yield from tokenizer_problems(self.model.path, shape.vocab_size, self.chat, at.path)

    @property
    def runs_episodes(self) -> bool:
        """Whether an agent tries the problems."""
        return self.agent is not None or self.coding is not None

    @property
    def policy_name(self) -> str:
        """The API's address, or the policy's folder."""
        return self.endpoint.url if self.endpoint is not None else self.model.path

    @property
    def model(self) -> ModelSettings:
        """The model that `path` means."""
        from pathlib import Path

        assert self.path is not None
        policy = Path(self.path) / "policy"
        folder = policy if (policy / "config.json").is_file() else Path(self.path)
        return ModelSettings(path=str(folder), dtype=self.dtype)

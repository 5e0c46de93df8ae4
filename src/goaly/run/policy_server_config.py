"""The settings of a server that serves a policy outside of training."""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from goaly.base.access import token_problems, tokens_of
from goaly.base.config.settings import Section, Settings
from goaly.base.errors import ConfigError
from goaly.generate.settings import GeneratorSettings, SamplingSettings
from goaly.models.settings import ModelSettings, folder_problems
from goaly.plan.host_settings import HostSettings
from goaly.prompts.settings import ChatSettings
from goaly.run.policy_source import RunModel

TOKENS = "GOALY_TOKENS"
"""Environment variable with the tokens of clients, separated by commas."""


class PolicyServerConfig(Settings):
    """A server of a policy."""

    path: str | None = None
    """Hugging Face folder of the policy; null: the policy is that of `run`."""
    run: str | None = None
    """Folder of a run on this machine. While the run is under way its newest policy is served, and each version that
    follows; otherwise the policy that it saved last. null: the policy is that of `path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations of `path`; that of a run is its own."""
    host: str = "127.0.0.1"
    """Address that the server listens on. Others than loopback need tokens, and traffic is not encrypted."""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port that it listens on; 0 lets the system choose."""
    tokens_file: str | None = None
    """File with a token in each line, one of which a client must send as its API key. null: those of the environment
    variable `GOALY_TOKENS`, separated by commas; without any, every client on this machine is served."""
    generator: GeneratorSettings = field(default_factory=GeneratorSettings)
    """Inference engines that generate the answers. `on_update` has no effect with `path`."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """Sampling parameters that a request does not name."""
    chat: ChatSettings | None = None
    """Chat template and parsers of answers; null: those of the run, or the model folder's template without parsers."""
    hosts: HostSettings = field(default_factory=HostSettings)
    """GPUs and CPU cores of the generators."""
    folder: str = "runs/serve-{time}"
    """Folder of the server's log files; `{time}` becomes the start time."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens, of which a client needs one; empty if it needs none."""
        return tokens_of(self.tokens_file, TOKENS)

    @property
    def start_model(self) -> ModelSettings:
        """The model of `path`, or the one that the run's training started from."""
        return RunModel.of(Path(self.run)).model if self.run else ModelSettings(path=self.path or "", dtype=self.dtype)

    @property
    def chat_settings(self) -> ChatSettings:
        """How chats are rendered and answers read."""
        if self.chat is not None:
            return self.chat
        return RunModel.of(Path(self.run)).chat if self.run else ChatSettings()

    def _problems(self, at: Section) -> Iterator[str]:
        yield from token_problems(at, self.host, self.tokens_file, TOKENS)
        if self.hosts.imagine is not None:
            yield f"{at}hosts.imagine: is for dry runs of runs; a server uses this machine"
        yield from self.generator.device_problems(f"{at}generator.", updates=self.run is not None)
        if (self.path is None) == (self.run is None):
            yield f"{at.path}: set either path, a model's folder, or run, the folder of a run"
            return
        if self.run is None:
            yield from folder_problems(self.path, at)
            yield from at.generator.idle("the weights of a folder never change", "on_update")
        else:
            yield from at.idle("the run has its own", "dtype")
        try:
            model, chat = self.start_model, self.chat_settings
        except ConfigError as error:
            yield from error.problems
            return
        yield from self._model_problems(at, model, chat)

    def _model_problems(self, at: Section, model: ModelSettings, chat: ChatSettings) -> Iterator[str]:
        from goaly.models.catalog import shape_of  # imports torch, which `--help` does not need
        from goaly.models.weight_files import weight_problems
        from goaly.prompts.tokenizer import chat_problems, tokenizer_problems  # imports jinja

        if list(folder_problems(model.path, at)):
            return
        yield from chat_problems(chat, model.path, f"{at}chat.")
        try:
            shape = shape_of(model)
        except ConfigError as error:
            yield from error.problems
        else:
            yield from self.generator.shape_problems(at.generator, shape, "model")
            yield from self.generator.model_problems(at.generator, model.path, shape, model.dtype)
            yield from weight_problems(model.path, shape, model.path)
            yield from tokenizer_problems(model.path, shape.vocab_size, chat, model.path)

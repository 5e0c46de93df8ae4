"""vLLM's engine in this process, in terms of requests, steps and weight versions. No other file knows vLLM's engine.

Not thread-safe: one thread owns an engine and makes every call after construction. With tp > 1 each rank has an engine,
and all of them must get the same calls in the same order.

    generate-4: No KV block that was cached under other weights is reused after a weight update, except with `keep` by
        requests that began under them: a running request keeps its blocks, and a conversation those of its earlier
        turns.
    generate-5: A request that is running at an update continues with its tokens: none is lost or drawn again.
"""

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import set_num_threads  # by this name: vLLM replaces the other by a function that does nothing

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLMEngine
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason

from goaly.base.errors import ConfigError
from goaly.base.process import frozen
from goaly.generate.expert_choices import ChoiceRecorder
from goaly.generate.grammars import ENDED, Grammars, refused
from goaly.generate.request import (
    Finish,
    InvalidRequest,
    Sample,
    Sampling,
    StopStrings,
    check_prompt,
    decoder,
    duplicate_request,
)
from goaly.generate.sampling_parameters import limits_of, parameters
from goaly.generate.scheduling_counter import PreemptionCounter, SchedulingCounter
from goaly.generate.settings import GeneratorSettings
from goaly.generate.versioned_tokens import VersionedTokens
from goaly.generate.vllm_setup import engine_arguments, leave_no_named_shared_memory, unname_semaphores
from goaly.models.definition import versioned_tensors
from goaly.models.device import keep_pinned_sizes
from goaly.models.families import architecture, read_config
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.models.vllm_naming import vllm_naming, without_padding
from goaly.numerics.cpu_sampling import adapt_sampling
from goaly.prompts.settings import ChatSettings
from goaly.weights.naming import Naming

FINISHES = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


@dataclass(slots=True)
class _Running:
    """A running request and the tokens sampled so far."""

    name: str
    prompt: list[int]
    sampling: Sampling
    begun_at: int | None
    """As in `Request`."""
    written: VersionedTokens = field(default_factory=VersionedTokens)
    form_weights: list[float] = field(default_factory=list)
    """As in `Sample`, if its answer has a form."""
    choices: torch.Tensor | None = None
    """The experts chosen for its tokens, once it has ended; None: they are not recorded."""
    stops: StopStrings | None = None
    """Searches the answer for the request's stop strings; None: it has none."""
    streams: bool = False
    """Whether `VllmEngine.parts` gives its tokens."""
    given: int = 0
    """The number of tokens that `VllmEngine.parts` has given."""

    def wrote(self, tokens: list[int], logprobs: list[float], version: int, free_logprob: float | None) -> None:
        """Add the tokens that a step sampled. A form has changed the log-prob of one that would have `free_logprob`."""
        if self.sampling.structured_outputs:
            drawn, logprobs = logprobs[0], logprobs if free_logprob is None else [free_logprob]
            self.form_weights.append(math.exp(min(0.0, logprobs[0] - drawn)))
        self.written.stamp(tokens, logprobs, version)  # generate-3

    def stopped_by(self, tokens: list[int]) -> str | None:
        """The stop string that these newest tokens complete, if they do."""
        if self.stops is None:
            return None
        return next(filter(None, map(self.stops.wrote, tokens)), None)

    def sample(self, finish: Finish, stop: str | None = None) -> Sample:
        """The answer so far."""
        made = self.written
        weights = self.form_weights or None
        return Sample.of(made.tokens, made.logprobs, made.versions, finish, stop, self.choices, weights)


class VllmEngine:
    """A vLLM engine over one Hugging Face folder, at policy version 0 until weights are applied."""

    def __init__(
        self,
        settings: GeneratorSettings,
        model: ModelSettings,
        *,
        seed: int = 0,
        records_choices: bool = False,
        lora: LoraSettings | None = None,
        chat: ChatSettings | None = None,
    ):
        """With `records_choices`, samples have the experts that were chosen for their tokens. With `lora`, the weights
        that are applied are those of adapters. A grammar begins after the reasoning that the parser of `chat` finds."""
        set_num_threads(settings.threads)
        self._shape = architecture(read_config(model.path))
        self._has_adapters = lora is not None
        self._settings = settings
        self._model_folder = model.path
        self.version = 0
        """The policy version of the weights that the next step uses."""
        self._requests: dict[str, _Running] = {}
        self._names: dict[str, str] = {}
        self._streamed: set[str] = set()
        self._ended: list[tuple[str, Sample | InvalidRequest]] = []
        """Results of steps that `apply` read and `step` has yet to return."""
        arguments = engine_arguments(
            settings, model, self._shape, seed=seed, records_choices=records_choices, lora=lora
        )
        self.records_graphs = not arguments.enforce_eager
        """Whether decode steps are recorded as CUDA graphs, which contain the addresses of the parameters."""
        unname_semaphores()
        if settings.tp > 1:
            leave_no_named_shared_memory()
            os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # one rank could take longer, another less
        self._vllm = LLMEngine.from_engine_args(arguments)
        self._core = cast(Any, self._vllm.engine_core)  # its class in one process has more than the declared one
        self._core._finalizer.detach()
        self._end = cast(Any, weakref.finalize(self._core, frozen()(self._core.engine_core.shutdown)))
        self._end.atexit = False  # the end of the process releases everything; vLLM would collect first
        self._scheduler = self._core.engine_core.scheduler
        self._preemptions = PreemptionCounter(self._scheduler)
        self._grammars = Grammars(self._core, Path(model.path), chat or ChatSettings())
        runner = self._vllm.model_executor.driver_worker.worker.model_runner
        self._beyond_runner = limits_of(self._device() == "cuda" and self._vllm.vllm_config.use_v2_model_runner)
        if self._device() == "cpu":
            adapt_sampling(runner)
        else:
            keep_pinned_sizes()
            if model.numerics == "bitwise":
                from goaly.numerics.bitwise_backend import use_exact_logprobs

                use_exact_logprobs(runner.sampler)
        self._supported_tasks = self._vllm.get_supported_tasks()
        self._vocabulary = self._vllm.model_config.get_vocab_size()
        self._recorder = ChoiceRecorder(self._scheduler, self._model().choices) if records_choices else None
        self._stream = torch.cuda.current_stream() if self._device() == "cuda" else None

    @property
    def running(self) -> int:
        """How many requests `step` has yet to return. It returns no cancelled ones."""
        return len(self._requests) + len(self._ended)

    def enter_thread(self) -> None:
        """Prepare the calling thread for other calls: each has its own number of threads, and its own current device
        and stream of CUDA. vLLM reads its samples on the stream of the thread that built it."""
        set_num_threads(self._settings.threads)
        if self._stream is not None:
            torch.cuda.set_device(self._vllm.model_executor.driver_worker.worker.device)
            torch.cuda.set_stream(self._stream)

    def counter(self) -> SchedulingCounter:
        """Counts what vLLM's scheduler does from now on."""
        return SchedulingCounter(self._scheduler)

    def counts(self) -> tuple[int, int]:
        """How many requests vLLM runs, and how many wait in vLLM."""
        return self._scheduler.get_request_counts()

    @property
    def cache_tokens(self) -> int:
        """The tokens that the key-value cache holds."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks * self._scheduler.block_size

    @property
    def cache_load(self) -> tuple[float, int]:
        """The share of the cache that running requests use, and how many of them have been preempted so far."""
        return self._scheduler.kv_cache_manager.usage, self._preemptions.count

    def check(self, name: str, prompt: list[int]) -> None:
        """Raise ValueError if this prompt cannot be served. May be called from any thread."""
        check_prompt(name, prompt, vocabulary=self._vocabulary, max_context=self._settings.max_context)

    def add(
        self,
        name: str,
        prompt: list[int],
        sampling: Sampling,
        *,
        streams: bool = False,
        written: int = 0,
        begun_at: int | None = None,
    ) -> None:
        """Start a request. With `streams`, `parts` has its tokens. The last `written` tokens of the prompt are the
        beginning of its answer, and its conversation was `begun_at` this version. Raises ValueError if it cannot be
        served."""
        if name in self._names:
            raise duplicate_request(name)
        stops = None
        if sampling.stop:
            before, begun = prompt[: len(prompt) - written], prompt[len(prompt) - written :]
            fewest = (sampling.min_tokens or 0) + written
            stops = StopStrings(sampling.stop, decoder(str(self._model_folder)), before, fewest)
            for token in begun:
                stops.wrote(token)
        self._add(_Running(name, prompt, sampling, begun_at, stops=stops, streams=streams))

    def cancel(self, names: list[str]) -> list[tuple[str, Sample]]:
        """End these requests and return their samples so far. Names of ended requests are ignored."""
        keys = [self._names[name] for name in names if name in self._names]
        self._core.abort_requests(keys)
        return [(request.name, request.sample(Finish.CANCELLED)) for request in map(self._forget, keys)]

    def step(self) -> list[tuple[str, Sample | InvalidRequest]]:
        """Compute one step; the samples that it ended, by request name, and the errors of requests. With
        `generator.async_scheduling` launch it, and read the one before."""
        ended, self._ended = self._ended, []
        if self._requests:
            # Read from vLLM's core: its front end would add text and nested records to each token, without use here.
            outputs = self._core.get_output().outputs
            if not outputs and not self._scheduler.running:
                self._grammars.wait()
            ended += self._read(outputs)
        return ended

    @property
    def streams(self) -> int:
        """How many requests have not ended and are streamed."""
        return len(self._streamed)

    def parts(self) -> list[tuple[str, VersionedTokens]]:
        """The tokens that streamed requests have since the last call, by request name."""
        parts = []
        for request in map(self._requests.__getitem__, self._streamed):
            if request.given < len(request.written.tokens):
                parts.append((request.name, request.written.since(request.given)))
                request.given = len(request.written.tokens)
        return parts

    def apply(self, fill: Callable[[], int]) -> int:
        """Overwrite the weights by `fill`, which returns their version. The next step decodes with that version."""
        self._read_launched()  # generate-3, generate-5
        version = fill()
        if self._settings.engine == "torchtitan":
            self._model().weights_changed()
        if self._has_adapters:
            from goaly.models.lora import check_base

            check_base(self.decoder)
        match self._settings.on_update:
            case "keep":
                self.version = version  # the restarted requests are added under it
                self._restart_waiting()
            case "recompute":
                self._vllm.reset_prefix_cache(reset_running_requests=True)  # generate-4, generate-5
            case "drain":
                if not self._vllm.reset_prefix_cache():
                    raise AssertionError("weights were applied in mode `drain` while requests were running")
        self.version = version
        return version

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's live parameters, which weight updates overwrite, by torchtitan's names or those of `naming`."""
        if self._settings.engine == "torchtitan":
            return self._model().named_tensors()
        if problems := self._settings.device_problems("generator.", device=self._device()):
            raise ConfigError(problems)
        return {name: tensor.detach() for name, tensor in self.live_tensors().items()}

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters that the model computes with, by the same names: this rank's part of each."""
        if self._settings.engine == "torchtitan":
            return versioned_tensors(self.decoder)
        return without_padding(dict(self._model().named_parameters()), self.naming())

    @property
    def decoder(self) -> torch.nn.Module:
        """torchtitan's model on this rank."""
        return self._model().model

    def naming(self) -> Naming:
        """How parameters with vLLM's names are made of tensors with torchtitan's. Empty if they have torchtitan's."""
        if self._settings.engine == "torchtitan":
            return {}
        return vllm_naming(self._shape, tp=self._settings.tp, rank=get_tensor_model_parallel_rank())

    def close(self) -> None:
        """Release the model, the cache and vLLM's process groups."""
        self._end()

    def _add(self, request: _Running) -> None:
        begun_at = self.version if request.begun_at is None else request.begun_at
        salt = f"version {begun_at}" if self._settings.on_update == "keep" else None  # generate-4
        inputs = self._vllm.input_processor
        if problem := self._beyond_runner(request.sampling):
            raise InvalidRequest(f"request {request.name}: {problem}")
        try:
            core_request = inputs.process_inputs(
                request.name,
                tokens_input(request.prompt, cache_salt=salt),
                parameters(request.sampling),
                supported_tasks=self._supported_tasks,
            )
        except (VLLMClientError, TypeError) as error:  # the request's own error; neither is a ValueError
            raise InvalidRequest(f"request {request.name}: {request.sampling}: {error}") from error
        inputs.assign_request_id(core_request)
        if request.sampling.structured_outputs:
            self._grammars.add(core_request, request.sampling.structured_outputs)
        else:
            self._core.add_request(core_request)
        if self._recorder is not None:
            self._recorder.begin(core_request.request_id)
        self._requests[core_request.request_id] = request
        self._names[request.name] = core_request.request_id
        if request.streams:
            self._streamed.add(core_request.request_id)

    def _read(self, outputs: Sequence[Any]) -> list[tuple[str, Sample | InvalidRequest]]:
        """Take vLLM's outputs of a step; the samples that it ended, and errors."""
        ended: list[tuple[str, Sample | InvalidRequest]] = []
        stopped = []
        free = self._grammars.unmasked_logprobs(outputs, lambda key: self._requests[key].sampling.temperature)
        for output in outputs:
            request = self._requests[output.request_id]
            if output.finish_reason is FinishReason.ERROR:
                self._forget(output.request_id)
                ended.append((request.name, refused(request.sampling.structured_outputs, ENDED)))
                continue
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            request.wrote(output.new_token_ids, logprobs, self.version, free.get(output.request_id))
            finish = None if output.finish_reason is None else FINISHES[output.finish_reason]
            stop = None if finish is Finish.STOP else request.stopped_by(output.new_token_ids)
            if stop is not None:
                if finish is None:
                    stopped.append(output.request_id)
                finish = Finish.STOP
            if finish is not None:
                self._forget(output.request_id)
                ended.append((request.name, request.sample(finish, stop)))
        self._core.abort_requests(stopped)  # the same on every rank: all ranks sample the same tokens
        return ended

    def _read_launched(self) -> None:
        """Read every step that was launched, and launch none."""
        core = self._core.engine_core
        if not core.batch_queue:
            return
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            self._ended += self._read(self._core.get_output().outputs)
        self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def _forget(self, key: str) -> _Running:
        request = self._requests.pop(key)
        del self._names[request.name]
        self._streamed.discard(key)
        if self._recorder is not None:
            request.choices = self._recorder.take(key)[: len(request.prompt) + len(request.written.tokens) - 1]
        return request

    def _restart_waiting(self) -> None:
        """Add requests that vLLM has not started once more, unless they go on with a conversation: with their old salt
        they would find blocks of the version under which they were added."""
        fresh = [
            r.request_id
            for r in self._scheduler.waiting
            if r.num_computed_tokens == 0 and r.num_output_tokens == 0 and self._requests[r.request_id].begun_at is None
        ]
        self._core.abort_requests(fresh)
        for request in [self._forget(key) for key in fresh]:
            self._add(request)

    def _model(self) -> Any:
        return self._vllm.model_executor.driver_worker.worker.get_model()

    def _device(self) -> str:
        return cast(torch.device, self._vllm.vllm_config.device_config.device).type

"""The one file that knows vLLM's engine: builds it in this process, and speaks of requests, steps and weight versions.

Not thread-safe: one thread owns an engine and makes every call after construction. With tp > 1 each rank has an engine,
and all of them must be given the same calls in the same order.

Invariants
    EN-1  A token's version is that of the weights that produced its logits: the weights change only between two steps
          (no asynchronous scheduling), and what a step samples is stamped with the version set before it.
    EN-2  No KV block that was cached under other weights is reused after a weight update, in any mode; with `keep`,
          only requests that were under way keep the blocks they have.
    EN-3  A request that was under way at an update goes on with the tokens it has: none is lost or drawn again.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.v1.engine import FinishReason
from vllm.v1.sample import sampler

from goaly.errors import ConfigError
from goaly.generate.ranks import name_shared_memory_for_this_run, unlink_what_all_hold_open, unname_semaphores
from goaly.generate.request import Finish, Sample, Sampling, check_prompt
from goaly.generate.settings import GeneratorSettings
from goaly.generate.stops import StopStrings, decoder
from goaly.models.settings import ModelSettings
from goaly.models.spec import architecture, prepare_torchtitan, read_config
from goaly.models.vllm_naming import vllm_naming, without_padding
from goaly.weights.mapping import Naming

FINISHES = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}
GIB = 1 << 30
CPU_BLOCK_TOKENS = 32
"""The smallest that the CPU kernels take (vLLM would take 128): prefixes are shared by whole blocks."""
FREE_ENOUGH = 0.01
"""Share of a GPU's memory that vLLM asks to be free before it starts. The cache's size is set, so it uses the share for
nothing else; by default it would refuse a GPU that another role holds memory of."""


@dataclass(slots=True)
class _Request:
    """A request under way, and what was sampled for it so far."""

    name: str
    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stretches: list[tuple[int, int]] = field(default_factory=list)
    """Where the tokens of a version begin, and which it is."""
    stops: StopStrings | None = None
    """What looks for its stop strings, where it has some."""

    def wrote(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Take note of what a step sampled."""
        if not self.stretches or self.stretches[-1][1] != version:
            self.stretches.append((len(self.tokens), version))
        self.tokens += tokens
        self.logprobs += logprobs

    def stopped_by(self, tokens: list[int]) -> str | None:
        """The stop string that these newest tokens complete."""
        if self.stops is None:
            return None
        return next(filter(None, map(self.stops.wrote, tokens)), None)

    def sample(self, finish: Finish, stop: str | None = None) -> Sample:
        """All of it, as the answer."""
        versions = torch.empty(len(self.tokens), dtype=torch.int32)
        for start, version in self.stretches:
            versions[start:] = version
        return Sample(
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=versions,
            finish=finish,
            stop=stop,
        )


class Engine:
    """A vLLM engine over one Hugging Face folder, at policy version 0 until weights are applied."""

    def __init__(self, settings: GeneratorSettings, model: ModelSettings, *, seed: int = 0):
        on_cuda = torch.cuda.is_available()
        self._settings = settings
        self._model_folder = model.path
        self._version = 0
        self._requests: dict[str, _Request] = {}
        self._names: dict[str, str] = {}
        overrides: dict[str, Any] = {}
        if settings.engine == "torchtitan":
            prepare_torchtitan()
            from goaly.generate import vllm_model

            vllm_model.register()
            overrides["hf_overrides"] = {"architectures": [vllm_model.ARCHITECTURE]}
        unname_semaphores()
        if not on_cuda:
            sampler.batched_count_greater_than = _ranks  # vLLM compiles these two operators, for seconds
        if settings.tp > 1:
            name_shared_memory_for_this_run()
        whole = settings.max_context
        arguments = EngineArgs(
            model=str(model.path),
            dtype=model.dtype,
            seed=seed,
            runner="generate",
            skip_tokenizer_init=True,
            generation_config="vllm",
            tensor_parallel_size=settings.tp,
            distributed_executor_backend="external_launcher" if settings.tp > 1 else "uni",
            max_num_seqs=settings.max_running,
            max_model_len=settings.max_context,
            max_num_batched_tokens=settings.max_step_tokens if on_cuda else max(settings.max_step_tokens, whole),
            enable_chunked_prefill=on_cuda,  # on CPU vLLM can't take back the draw of a seeded, partial prefill
            kv_cache_memory_bytes=int(settings.kv_cache_gib * GIB),
            **({"gpu_memory_utilization": FREE_ENOUGH} if on_cuda else {}),
            block_size=None if on_cuda else CPU_BLOCK_TOKENS,
            enable_prefix_caching=settings.prefix_caching,
            enforce_eager=not (on_cuda and settings.cuda_graphs),
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if on_cuda else {},
            logprobs_mode="processed_logprobs",
            async_scheduling=False,  # EN-1
            disable_log_stats=True,
            **overrides,
        )
        self._vllm = LLMEngine.from_engine_args(arguments)
        if settings.tp > 1:
            unlink_what_all_hold_open()
        self._core: Any = self._vllm.engine_core
        self._scheduler = self._core.engine_core.scheduler
        self._supported_tasks = self._vllm.get_supported_tasks()
        self._vocabulary = self._vllm.model_config.get_vocab_size()

    @property
    def version(self) -> int:
        """The policy version of the weights that the next step uses."""
        return self._version

    @property
    def under_way(self) -> int:
        """How many requests have not ended."""
        return len(self._requests)

    def enter_thread(self) -> None:
        """Prepare the calling thread for other calls: CUDA's current device is each thread's own."""
        if self._device() == "cuda":
            torch.cuda.set_device(self._vllm.model_executor.driver_worker.worker.device)

    @property
    def records_graphs(self) -> bool:
        """Whether decode steps are CUDA graphs, which hold the addresses of the parameters."""
        return self._device() == "cuda" and self._settings.cuda_graphs

    def counts(self) -> tuple[int, int]:
        """Requests under way, and requests that wait for room."""
        return self._scheduler.get_request_counts()

    def check(self, name: str, prompt: list[int]) -> None:
        """ValueError if this prompt can't be served. May be called from any thread."""
        check_prompt(name, prompt, vocabulary=self._vocabulary, max_context=self._settings.max_context)

    def add(self, name: str, prompt: list[int], sampling: Sampling) -> None:
        """Take a request up; ValueError if it can't be served."""
        if name in self._names:
            raise ValueError(f"request_id={name!r}: a request of that id is under way here; ids must be unique")
        stops = None
        if sampling.stop:
            stops = StopStrings(sampling.stop, decoder(str(self._model_folder)), prompt, sampling.min_tokens or 0)
        self._add(_Request(name, prompt, sampling, stops=stops))

    def cancel(self, names: list[str]) -> list[tuple[str, Sample]]:
        """End these requests; their samples so far. Names of requests that have ended are ignored."""
        keys = [self._names[name] for name in names if name in self._names]
        self._core.abort_requests(keys)
        return [(request.name, request.sample(Finish.CANCELLED)) for request in map(self._forget, keys)]

    def step(self) -> list[tuple[str, Sample]]:
        """Compute one step; the samples that it ended, by request name."""
        # Straight from vLLM's core: what its front end makes of a token is text and nested records, of no use here.
        ended, stopped = [], []
        for output in self._core.get_output().outputs:
            request = self._requests[output.request_id]
            request.wrote(output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist(), self._version)  # EN-1
            finish = None if output.finish_reason is None else FINISHES[output.finish_reason]
            stop = None if finish is Finish.STOP else request.stopped_by(output.new_token_ids)
            if stop is not None and finish is None:
                stopped.append(output.request_id)
            if stop is not None or finish is not None:
                self._forget(output.request_id)
                ended.append((request.name, request.sample(finish if stop is None else Finish.STOP, stop)))
        if stopped:
            self._core.abort_requests(stopped)  # every rank finds the same ones: all of them sample the same tokens
        return ended

    def apply(self, fill: Callable[[], int]) -> int:
        """Let `fill` overwrite the weights and say their version; from here on that version decodes."""
        version = fill()
        match self._settings.apply:
            case "keep":
                self._version = version  # what waits comes back under it
                self._restart_those_that_wait()
            case "recompute":
                self._vllm.reset_prefix_cache(reset_running_requests=True)  # EN-2, EN-3
            case "drain":
                if not self._vllm.reset_prefix_cache():
                    raise AssertionError("weights were applied in mode `drain` with requests under way")
        self._version = version
        return version

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's live parameters: what weight updates overwrite. Under torchtitan's names, or see `naming`."""
        if self._settings.engine == "torchtitan":
            return self._model().named_tensors()
        if problems := self._settings.problems("generator.", device=self._device(), updates=True):
            raise ConfigError(problems)
        return {name: tensor.detach() for name, tensor in self.live_tensors().items()}

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """The objects that the model computes with, by the same names: this rank's part of each parameter."""
        if self._settings.engine == "torchtitan":
            return dict(self._model().model.named_parameters())
        return without_padding(dict(self._model().named_parameters()), self.naming())

    def naming(self) -> Naming:
        """Of which tensors with torchtitan's names these are made, where they have other names."""
        if self._settings.engine == "torchtitan":
            return {}
        shape = architecture(read_config(self._model_folder))
        return vllm_naming(shape, tp=self._settings.tp, rank=get_tensor_model_parallel_rank())

    def close(self) -> None:
        """Let go of the model, the cache and vLLM's process groups."""
        self._vllm.engine_core.shutdown()

    def _add(self, request: _Request) -> None:
        salt = f"version {self._version}" if self._settings.apply == "keep" else None  # EN-2
        inputs = self._vllm.input_processor
        try:
            core_request = inputs.process_inputs(
                request.name,
                tokens_input(request.prompt, cache_salt=salt),
                _parameters(request.sampling),
                supported_tasks=self._supported_tasks,
            )
        except (VLLMClientError, TypeError) as error:  # the request's own fault, and neither is a ValueError
            raise ValueError(f"request {request.name}: {request.sampling}: {error}") from error
        inputs.assign_request_id(core_request)
        self._core.add_request(core_request)
        self._requests[core_request.request_id] = request
        self._names[request.name] = core_request.request_id

    def _forget(self, key: str) -> _Request:
        request = self._requests.pop(key)
        del self._names[request.name]
        return request

    def _restart_those_that_wait(self) -> None:
        """Hand requests that vLLM has not begun to it anew: they would find blocks of the version they came at."""
        fresh = [
            r.request_id for r in self._scheduler.waiting if r.num_computed_tokens == 0 and r.num_output_tokens == 0
        ]
        self._core.abort_requests(fresh)
        for request in [self._forget(key) for key in fresh]:
            self._add(request)

    def _model(self) -> Any:
        return self._vllm.model_executor.driver_worker.worker.get_model()

    def _device(self) -> str:
        return self._vllm.vllm_config.device_config.device.type


def _parameters(sampling: Sampling) -> SamplingParams:
    """What vLLM is asked for. It looks for stop strings in its front end only: those are ours (`StopStrings`)."""
    distribution = sampling.distribution
    if distribution["allowed_token_ids"] is not None:
        distribution["allowed_token_ids"] = list(sampling.allowed_token_ids or ())  # a tuple breaks the engine's step
    return SamplingParams(
        **distribution,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids or ()),
        seed=sampling.seed,
        logprobs=0,
        ignore_eos=True,  # only what the caller names stops an answer
        detokenize=False,
        skip_clone=True,
    )


def _ranks(logprobs_TV: torch.Tensor, sampled_T1: torch.Tensor) -> torch.Tensor:
    return (logprobs_TV >= sampled_T1).sum(-1)

"""Grammars that answers follow, in an engine of vLLM's that starts without a tokenizer: vLLM's structured outputs.

A form that cannot be compiled, or that leaves no token to draw, fails its own request only. All replicas, and all ranks
of one, accept and refuse the same forms, whatever requests came before. Several ranks compile in the step's thread and
without a time limit, so that they stay alike, and accept only forms that are quick to compile.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest

from goaly.generate.request import AT_ONCE, TEMPLATE_ARGS, InvalidRequest
from goaly.prompts.settings import ChatSettings

BACKEND = "xgrammar"
"""With "auto" vLLM would use the one that the first request needs, for all others too."""


SLOW = ("regex", "grammar", "pattern", "patternProperties")
"""Keys of regular expressions and grammars. With 105,000 tokens xgrammar took 64 s for a schema with the pattern
`^([a-z]{1,80}[0-9]{1,80}){1,80}$`, and had not compiled `[a-z]?`, 2,700 times, after two minutes. Schemas of names,
types and lengths, up to 34 kB, took at most 0.4 s (with 18,000 tokens)."""
SHOWN = 1000
"""Characters of a form in an error."""
MOST_CHARACTERS = 16_384
"""Of a form as JSON, with generator.tp > 1."""
ENDED = "cannot be compiled, or no token can be drawn that follows it"
"""Why vLLM ends a request."""


def refused(asked: Mapping[str, Any] | None, why: object) -> InvalidRequest:
    """The error of a request for this form."""
    shown = str(asked)
    return InvalidRequest(f"structured_outputs={shown[:SHOWN]}{'...' * (len(shown) > SHOWN)}: {why}")


def refuse_slow(asked: Mapping[str, Any]) -> None:
    """Raise ValueError for a form whose compilation could stop all requests for minutes."""
    text = json.dumps(asked)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"has {len(text)} characters, must have at most {MOST_CHARACTERS} with generator.tp > 1")
    if (slow := next(_slow_parts(asked), None)) is not None:
        raise ValueError(f"{slow}: must not be used with generator.tp > 1, where a slow compilation stops all requests")


def _slow_parts(form: Any) -> Iterator[str]:
    """The keys of regular expressions and grammars in a form, which may be JSON in a text."""
    if isinstance(form, str) and form.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):
            form = json.loads(form)
    if isinstance(form, Mapping):
        if form.get("type") in ("regex", "grammar"):  # a part of a structural tag
            yield form["type"]
        for key, value in form.items():
            if key in SLOW and (isinstance(value, str) or key == "patternProperties"):
                yield key
            else:
                yield from _slow_parts(value)
    elif isinstance(form, list):
        for value in form:
            yield from _slow_parts(value)


class Grammars:
    """The grammars of one engine's requests. The tokenizer is read when the first request has one."""

    def __init__(self, core: Any, folder: Path, chat: ChatSettings):
        """`core` is vLLM's. A grammar begins after the reasoning that the parser of `chat` finds."""
        self._core = core
        self._folder = folder
        self._chat = chat
        self._tokenizer: Any = None
        self._compiling: set[Future[Any]] = set()
        self._unmasked: UnmaskedLogprobs | None = None

    def add(self, request: EngineCoreRequest, asked: Mapping[str, Any]) -> None:
        """Start this request, whose answer follows these `Sampling.structured_outputs` until one of its stop tokens;
        InvalidRequest if it cannot."""
        parameters = cast(SamplingParams, request.sampling_params)
        if not parameters.stop_token_ids:
            raise InvalidRequest(f"stop_token_ids=(): must have one with structured_outputs={asked}, to end the answer")
        parameters._all_stop_token_ids = set(parameters.stop_token_ids)  # vLLM adds the model's, which end no answer
        config = self._core.engine_core.vllm_config
        try:
            if self._tokenizer is None:
                self._load()
            if config.parallel_config.tensor_parallel_size > 1:
                refuse_slow(asked)
            form = dict(asked)
            request.reasoning_ended = form.pop(AT_ONCE, None)
            template_args = {**self._chat.template_args, **form.pop(TEMPLATE_ARGS, {})}
            reasoner = self._reasoner(template_args)
            parameters.structured_outputs = StructuredOutputsParams(**form)
            parameters._validate_structured_outputs(
                config.model_config, config.structured_outputs_config, self._tokenizer
            )
            self._core.add_request(request)
        except Exception as error:  # whatever readers of tokenizers and compilers of grammars raise
            raise refused(asked, error) from error
        started = self._core.engine_core.scheduler.requests[request.request_id].structured_output_request
        started.reasoner = reasoner
        made = started.grammar
        if isinstance(made, Exception):
            self._core.abort_requests([request.request_id])
            raise refused(asked, made) from made
        if isinstance(started._grammar, Future):
            self._compiling.add(started._grammar)

    def unmasked_logprobs(self, outputs: Sequence[Any], temperature: Callable[[str], float | None]) -> dict[str, float]:
        """The log-probs that the tokens of the last step have without a grammar, by request."""
        return {} if self._unmasked is None else self._unmasked.of(outputs, temperature)

    def wait(self) -> None:
        """Wait until a grammar is compiled, if one is being: nothing else is under way."""
        if self._compiling:
            _, self._compiling = wait(self._compiling, return_when=FIRST_COMPLETED)

    def _load(self) -> None:
        manager = self._core.engine_core.structured_output_manager
        manager.executor = ThreadPoolExecutor(1)  # for one rank; several compile in the step's thread, all alike
        manager.tokenizer = get_tokenizer(str(self._folder))
        if self._chat.reasoning_parser is not None:
            manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser(self._chat.reasoning_parser)
        self._unmasked = self._unmasked or UnmaskedLogprobs(self._core.engine_core)
        self._tokenizer = manager.tokenizer

    def _reasoner(self, template_args: Mapping[str, Any]) -> Any:
        """The parser that finds the end of a request's reasoning. vLLM would make it in a step, where its error would
        end the engine."""
        made = self._core.engine_core.structured_output_manager.reasoner_cls
        return made and made(tokenizer=self._tokenizer, chat_template_kwargs=dict(template_args))


class UnmaskedLogprobs:
    """The log-probs that tokens of answers with a form would have without it, on every rank.

    They are the ones that the trainer computes: over all tokens, at the request's temperature. So the logits of each
    step are copied before a grammar masks them, and kept until the tokens that were drawn from them are read."""

    def __init__(self, engine_core: Any):
        """`engine_core` is vLLM's."""
        self._launched: dict[int, tuple[list[str], torch.Tensor]] = {}
        """The requests of steps that were launched and not read, and their rows."""
        self._read: tuple[list[str], torch.Tensor] | None = None
        self._step: Any = None
        """The step that is launched now."""
        self._runner = runner = engine_core.model_executor.driver_worker.worker.model_runner
        self._log_softmax = getattr(runner.sampler, "compute_logprobs", partial(torch.log_softmax, dim=-1))
        self._execute, runner.execute_model = runner.execute_model, self._launch
        if hasattr(runner, "structured_outputs_worker"):  # vLLM's second model runner, which exists on GPUs
            masks = runner.structured_outputs_worker
            self._mask, masks.apply_grammar_bitmask = masks.apply_grammar_bitmask, self._keep_and_mask
        else:
            self._sample, runner.sample_tokens = runner.sample_tokens, self._keep_and_sample
        scheduler = engine_core.scheduler
        self._update, scheduler.update_from_output = scheduler.update_from_output, self._read_step

    def of(self, outputs: Sequence[Any], temperature: Callable[[str], float | None]) -> dict[str, float]:
        """The log-probs of the tokens in vLLM's outputs of the step that was read last, by request; none where no form
        was in force."""
        if self._read is None:
            return {}
        (requests, rows_RV), self._read = self._read, None
        drawn = {one.request_id: one.new_token_ids[0] for one in outputs if one.new_token_ids}
        divisors_R = rows_RV.new_tensor([(one in drawn and temperature(one)) or 1.0 for one in requests])
        rows_RV = rows_RV / divisors_R[:, None]  # a GPU would multiply by a number's reciprocal
        logprobs_RV = self._log_softmax(rows_RV)
        tokens_R = torch.tensor([drawn.get(request, 0) for request in requests], device=rows_RV.device)
        logprobs_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0].tolist()
        return {one: logprob for one, logprob in zip(requests, logprobs_R, strict=True) if one in drawn}

    def _launch(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        self._step = step
        return self._execute(step, *args, **kwargs)

    def _keep_and_sample(self, grammar_output: Any) -> Any:
        if grammar_output is not None and self._runner.execute_model_state is not None:
            self._keep(
                self._runner.execute_model_state[1],
                self._runner.input_batch.req_ids,
                grammar_output.structured_output_request_ids,
            )
        return self._sample(grammar_output)

    def _keep_and_mask(self, logits: torch.Tensor, batch: Any, with_form: Sequence[str], *args: Any) -> Any:
        self._keep(logits, batch.req_ids, with_form)
        return self._mask(logits, batch, with_form, *args)

    def _keep(self, logits_RV: torch.Tensor, requests: Sequence[str], with_form: Sequence[str]) -> None:
        places = {request: place for place, request in enumerate(requests)}
        known = [request for request in with_form if request in places]
        if not known:
            return
        rows_RV = logits_RV[[places[request] for request in known]].float()  # a copy
        self._launched[id(self._step)] = known, rows_RV

    def _read_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        self._read = self._launched.pop(id(step), None)
        return self._update(step, *args, **kwargs)

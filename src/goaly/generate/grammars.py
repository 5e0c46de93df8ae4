"""Grammars that answers follow, in an engine of vLLM's that starts without a tokenizer: vLLM's structured outputs.

Invariants
    GM-1  A form that cannot be compiled, or that leaves no token to draw, is its request's own error: it fails alone.
    GM-2  All replicas, and all ranks of one, take and refuse the same forms, whatever they were asked before.
"""

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest

from goaly.generate.request import AT_ONCE, TEMPLATE_ARGS, InvalidRequest
from goaly.prompts.settings import ChatSettings

BACKEND = "xgrammar"
"""With "auto" vLLM would use the one that the first request needs, for all others too (GM-2)."""


ENDED = "cannot be compiled, or no token can be drawn that follows it"
"""Why vLLM ends a request."""


def refused(asked: Mapping[str, Any] | None, why: object) -> InvalidRequest:
    """The error of a request for this form."""
    return InvalidRequest(f"structured_outputs={asked}: {why}")


class Grammars:
    """The grammars of one engine's requests. The tokenizer is read when the first request has one."""

    def __init__(self, core: Any, folder: Path, chat: ChatSettings):
        """`core` is vLLM's. A grammar begins after the reasoning that the parser of `chat` finds."""
        self._core = core
        self._folder = folder
        self._chat = chat
        self._tokenizer: Any = None
        self._compiling: set[Future[Any]] = set()

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

    def wait(self) -> None:
        """Wait until a grammar is compiled, if one is being: nothing else is under way."""
        if self._compiling:
            _, self._compiling = wait(self._compiling, return_when=FIRST_COMPLETED)

    def _load(self) -> None:
        manager = self._core.engine_core.structured_output_manager
        manager.executor = ThreadPoolExecutor(1)  # for one rank; several compile in the step's thread, all alike (GM-2)
        manager.tokenizer = get_tokenizer(str(self._folder))
        if self._chat.reasoning_parser is not None:
            manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser(self._chat.reasoning_parser)
        self._tokenizer = manager.tokenizer

    def _reasoner(self, template_args: Mapping[str, Any]) -> Any:
        """The parser that finds the end of a request's reasoning. vLLM would make it in a step, where its error would
        end the engine."""
        made = self._core.engine_core.structured_output_manager.reasoner_cls
        return made and made(tokenizer=self._tokenizer, chat_template_kwargs=dict(template_args))

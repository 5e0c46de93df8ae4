"""Grammars that answers follow, in an engine of vLLM's that starts without a tokenizer: vLLM's structured outputs.

Invariants
    GM-1  What cannot be compiled is the request's own error: it fails alone, before it starts, on every rank.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest

from goaly.generate.request import InvalidRequest


class Grammars:
    """The grammars of one engine's requests. The tokenizer is read when the first request has one."""

    def __init__(self, core: Any, folder: Path, reasoning_parser: str | None):
        """`core` is vLLM's. After the reasoning that this parser finds, the grammar begins."""
        self._core = core
        self._folder = folder
        self._reasoning_parser = reasoning_parser
        self._tokenizer: Any = None

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
            parameters.structured_outputs = StructuredOutputsParams(**asked)
            parameters._validate_structured_outputs(
                config.model_config, config.structured_outputs_config, self._tokenizer
            )
            self._core.add_request(request)
        except Exception as error:  # whatever readers of tokenizers and compilers of grammars raise
            raise InvalidRequest(f"structured_outputs={asked}: {error}") from error
        made = self._core.engine_core.scheduler.requests[request.request_id].structured_output_request.grammar
        if isinstance(made, Exception):
            self._core.abort_requests([request.request_id])
            raise InvalidRequest(f"structured_outputs={asked}: {made}") from made

    def _load(self) -> None:
        manager = self._core.engine_core.structured_output_manager
        manager._use_async_grammar_compilation = False  # GM-1
        manager.tokenizer = get_tokenizer(str(self._folder))
        if self._reasoning_parser is not None:
            manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser(self._reasoning_parser)
            manager.reasoner_cls(tokenizer=manager.tokenizer)  # in a step its error would end the engine
        self._tokenizer = manager.tokenizer

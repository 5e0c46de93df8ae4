"""The OpenAPI schema of the agents' endpoint: vLLM's own types, without the parameters that the endpoint refuses."""

from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from openai.types.shared import ErrorObject
from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from goaly.agents.parameters import refused_parameters

KEYS = [Security(HTTPBearer(auto_error=False)), Security(APIKeyHeader(name="x-api-key", auto_error=False))]
"""Dependencies of a route that needs a key, which the gateway has checked before."""


class OpenAIErrorResponse(BaseModel):
    """An error in the format of OpenAI's API."""

    error: ErrorObject


def answers(model: type[BaseModel], *, errors: type[BaseModel] = OpenAIErrorResponse, streams: bool = True) -> Any:
    """The responses of a route: this type, or server-sent events, or an error."""
    content = {"content": {"text/event-stream": {}}} if streams else {}
    return {200: {"model": model, **content}, "default": {"model": errors, "description": "The request failed"}}


def published(routes: FastAPI) -> dict[str, Any]:
    """The schema of these routes. Takes seconds."""
    schema = routes.openapi()
    for request in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        properties = schema["components"]["schemas"][request.__name__]["properties"]
        for refused in refused_parameters(request):
            properties.pop(refused, None)
    return schema

"""The messages of a client's request, of any API, as vLLM's own server gives them to chat templates.

vLLM's parser knows each kind of part: `text` of OpenAI's chats, `input_text`, `output_text` and `refusal` of its
Responses API. It takes pictures and sounds as well, which are refused before.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages

from goaly.agents.conversation import canonical_call


def read_messages(
    messages: Sequence[Mapping[str, Any]], model: ModelConfig, in_parts: bool
) -> Sequence[Mapping[str, Any]]:
    """The messages with their contents as texts, or as lists of parts if the template reads these (`in_parts`)."""
    try:
        sent: Any = [{**message, **_listed(message)} for message in messages]
    except ValidationError as error:  # parts are checked when they are read
        why = error.errors()[0]["msg"]
        wrong = f"messages: each part of a content must be an object with type text and its text: {why}"
        raise VLLMValidationError(wrong, parameter="messages") from error
    if has_non_text_content(sent):
        raise VLLMValidationError("messages: must have text only, the policy reads no images", parameter="messages")
    conversation, _, _ = parse_chat_messages(sent, model, "openai" if in_parts else "string")
    return cast(Sequence[Mapping[str, Any]], conversation)


def _listed(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message's iterators, which can be read only once, as lists, and its calls that vLLM's parser may change."""
    listed: dict[str, Any] = {}
    if not isinstance(content := message.get("content"), str | None):
        listed["content"] = list(content)
    if (calls := message.get("tool_calls")) is not None:
        listed["tool_calls"] = [canonical_call(call) for call in calls]
    return listed

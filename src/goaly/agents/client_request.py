"""A client's request, of any API: its messages, sampling parameters and tool choice, and refusals of all others.

vLLM's parser reads the messages, as its own server gives them to chat templates. It knows each kind of part: `text` of
OpenAI's chats, `input_text`, `output_text` and `refusal` of the Responses API.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

from openai.types.responses.tool_choice_allowed import ToolChoiceAllowed
from openai.types.responses.tool_choice_function import ToolChoiceFunction
from pydantic import ValidationError
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages

from goaly.agents.answer_parser import FREE, ToolChoice
from goaly.agents.conversation import canonical_call
from goaly.agents.refusals import Refusal
from goaly.generate.request import Sampling

MOST_DIGITS = 18
"""Of a token's id."""
NEUTRAL_REQUEST: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "background": (None, False),
    "bad_words": ([],),
    "chat_template": (None,),
    "continue_final_message": (False,),
    "documents": (None,),
    "echo": (False, None),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logprob_token_ids": (None,),
    "prompt": (None,),
    "prompt_logprobs": (None,),
    "suffix": (None,),
    "thinking_token_budget": (None,),
    "top_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
    "truncation": (None, "disabled", "auto"),
    "use_beam_search": (False,),
}
"""Parameters that this endpoint does not have, with the values that have no effect."""
GIVEN: Mapping[str, str] = {
    **{key: key for key in ("temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "stop", "stop_token_ids")},
    **{key: key for key in ("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids")},
    **{key: "max_tokens" for key in ("max_tokens", "max_completion_tokens", "max_output_tokens")},
}
"""Parameters of requests, and what `Sampling` calls them."""
_PROMPT_IS_TEXT = (CompletionRequest, "prompt")


def refused_parameters(request: type) -> Mapping[str, tuple[Any, ...]]:
    """The parameters that this kind of request cannot have, with the values that have no effect."""
    return {name: neutral for name, neutral in NEUTRAL_REQUEST.items() if (request, name) != _PROMPT_IS_TEXT}


def refuse_unknown(request: Any) -> None:
    """Raise a Refusal for a parameter of a client's request that would have no effect."""
    for name, neutral in refused_parameters(type(request)).items():
        if (value := getattr(request, name, neutral[0])) not in neutral:
            raise refusal(name, "this endpoint has no such parameter", value)
    if isinstance(request, CompletionRequest) and (request.logprobs or 0) > 1:
        raise refusal("logprobs", "must be 0 or 1; only sampled tokens have log-probs here", request.logprobs)


def refusal(parameter: str, problem: str, value: Any = None) -> Refusal:
    """The refusal of a request for the value of this parameter."""
    named = parameter if value is None else f"{parameter}={value!r}"
    return Refusal(f"{named}: {problem}", HTTPStatus.BAD_REQUEST, parameter=parameter)


def choice_of(request: Any) -> ToolChoice:
    """The tool choice of a request, of any API."""
    if request.tool_choice not in FREE and not request.tools:
        raise refusal("tool_choice", "must be auto or none without tools", _shown(request.tool_choice))
    match request.tool_choice:
        case None | "auto" | "none" | "required" as choice:
            return choice or "auto"
        case ChatCompletionNamedToolChoiceParam() as named:
            return named.model_dump()
        case ToolChoiceFunction(name=name):
            return {"type": "function", "function": {"name": name}}
        case other:
            raise refusal("tool_choice", "must be auto, none, required or a function", _shown(other))


def _shown(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def allowed(request: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """The request and its tools as they are for the answer, which may call the allowed tools only. The prompt has all
    tools, so that it stays the same while the choice changes."""
    choice = request.tool_choice
    if not isinstance(choice, ToolChoiceAllowed):
        return request, tools
    names = {tool.get("name") for tool in choice.tools}
    kept = [tool for tool in request.tools if getattr(tool, "name", None) in names]
    chosen = request.model_copy(update={"tool_choice": choice.mode, "tools": kept})
    return chosen, [tool for tool in tools if tool["function"]["name"] in names]


def given(request: Any) -> dict[str, Any]:
    """The sampling parameters that the request names."""
    sent = {theirs: getattr(request, theirs) for theirs in GIVEN.keys() & request.model_fields_set}
    named = {GIVEN[theirs]: value for theirs, value in sent.items() if value not in (None, [])}
    if bias := getattr(request, "logit_bias", None):
        if not all(token.isdecimal() and len(token) <= MOST_DIGITS for token in bias):
            raise refusal("logit_bias", "must have ids of tokens as keys")
        named["logit_bias"] = {int(token): value for token, value in bias.items()}
    Sampling(**named)  # a bad value is the client's error
    return named


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

"""Requests of real clients get the same status and the same prompt from the endpoint as from vLLM's own server.

`requests/` has what the clients sent, recorded and cut down: long texts are replaced, tools and limits of tokens are
fewer. vLLM's server is its own app with all of its routes, over an engine that answers one token. Each request is the
first of a session, because a later one continues what the policy sampled.
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import pytest
import pytest_asyncio
from chat_templates import PARTS, QWEN3, chat_of
from http_sessions import serving, started
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.hf import _detect_content_format
from vllm.utils.argparse_utils import FlexibleArgumentParser

from goaly.prompts.template import ChatTemplate
from goaly.prompts.tokenizer import ChatTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTEXT = 4096
MODEL = "policy"
TOOL_PARSER, REASONING_PARSER = "hermes", "qwen3"  # as in `started`

GUARDED = QWEN3.replace("{% set content = m.content %}", "{% set content = m.content if m.content is string else '' %}")
SYSTEM_FIRST = QWEN3.replace(
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}",
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('a system message must be the first') }}"
    "{% elif m.role == 'user' %}",
)
DEVELOPER = QWEN3.replace("m.role == 'user' or", "m.role in ['user', 'developer'] or")
TEMPLATES = {"guarded": GUARDED, "system first": SYSTEM_FIRST, "parts": PARTS, "developer": DEVELOPER}


class Sent(NamedTuple):
    """A request."""

    path: str
    body: dict[str, Any]


RECORDED = {
    f"{file.stem} {number}": Sent(**request)
    for file in sorted((Path(__file__).parent / "requests").glob("*.json"))
    for number, request in enumerate(json.loads(file.read_text()))
}


def _item(role: str, *parts: Any) -> Any:
    return {"type": "message", "role": role, "content": list(parts)}


def _part(kind: str, text: str) -> Any:
    return {"type": kind, "refusal" if kind == "refusal" else "text": text}


_CALLED = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
_QUESTION = {"role": "user", "content": "17+25?"}
WRITTEN = {
    "a user's parts": ("responses", [_item("user", _part("input_text", "a"), _part("input_text", "b"))]),
    "an answer's parts": ("responses", [_QUESTION, _item("assistant", _part("output_text", "a")), _QUESTION]),
    "a refusal": ("responses", [_QUESTION, _item("assistant", _part("refusal", "no")), _QUESTION]),
    "parts of a result": (
        "responses",
        [
            _QUESTION,
            _CALLED,
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [_part("input_text", "4"), _part("input_text", "2")],
            },
        ],
    ),
    "an empty part": ("responses", [_item("user", _part("input_text", ""), _part("input_text", "b"))]),
    "systems everywhere": (
        "responses",
        [_item("system", _part("input_text", "a")), _QUESTION, _item("developer", _part("input_text", "b"))],
    ),
    "a picture": ("responses", [_item("user", {"type": "input_image", "image_url": "https://localhost/a.png"})]),
    "a chat's refusal": ("chat", [_QUESTION, {"role": "assistant", "content": [_part("refusal", "no")]}, _QUESTION]),
    "texts in a chat": ("chat", [{"role": "system", "content": [_part("text", "a"), _part("text", "b")]}, _QUESTION]),
    "no content": ("chat", [_QUESTION, {"role": "assistant", "content": None, "refusal": None}, _QUESTION]),
    "a name": ("chat", [{"role": "user", "content": "17+25?", "name": "me"}]),
    "a chat's picture": (
        "chat",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://localhost/a.png"}}]}],
    ),
}
REQUESTS = RECORDED | {
    name: Sent("/v1/responses", {"input": said})
    if api == "responses"
    else Sent("/v1/chat/completions", {"messages": said})
    for name, (api, said) in WRITTEN.items()
}


_TOOLS = [{"type": "function", "name": name, "strict": False, "parameters": {"type": "object"}} for name in ("a", "b")]
_ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}
_THINKS = {"type": "enabled", "budget_tokens": 1024}
REQUESTS |= {
    "bare tools": Sent(
        "/v1/chat/completions", {"messages": [_QUESTION], "tools": [{"type": "function", "function": {"name": "add"}}]}
    ),
    "a bare tool of the responses": Sent(
        "/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "a"}]}
    ),
    "allowed tools": Sent(
        "/v1/responses", {"input": "hi", "tools": _TOOLS, "tool_choice": _ALLOWED, "max_tool_calls": 2}
    ),
    "a thinking budget": Sent("/v1/messages", {"messages": [_QUESTION], "max_tokens": 2000, "thinking": _THINKS}),
    "no thinking": Sent(
        "/v1/messages", {"messages": [_QUESTION], "max_tokens": 2000, "thinking": {"type": "disabled"}}
    ),
}
REQUESTS["a limit above the context"] = Sent(
    "/v1/chat/completions", {"messages": [_QUESTION], "max_tokens": CONTEXT + 1}
)
_MERGED = "vLLM gives a template that reads parts the merged text of several system messages, of which it shows nothing"
DIFFERENCES = {
    **{
        (template, "a limit above the context"): "the endpoint lowers the limit, vLLM refuses it"
        for template in TEMPLATES
    },
    **{
        (template, "a refusal"): "status 400: vLLM's code cannot read it, and its server answers 500"
        for template in TEMPLATES
    },
    **{("parts", name): _MERGED for name in ("codex 0", "codex 1", "systems everywhere")},
}
"""Why requests differ, by template and name."""


class _Engine(EngineClient):
    """Answers one token, and keeps the prompts."""

    is_running = True  # type: ignore[bad-override]
    is_stopped = errored = False  # type: ignore[bad-override]
    dead_error = None  # type: ignore[bad-override]

    def __init__(self, config: VllmConfig):
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = None  # type: ignore[bad-assignment]
        self.prompts: list[list[int]] = []

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """It is never full."""

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        tokens = list(prompt["prompt_token_ids"])
        self.prompts.append(tokens)
        answer = CompletionOutput(0, "4", [50], None, None, finish_reason="stop")
        yield RequestOutput(request_id, None, tokens, None, [answer], finished=True)


_Engine.__abstractmethods__ = frozenset()  # type: ignore[missing-attribute]


@asynccontextmanager
async def vllms_server(chat: ChatTokenizer) -> AsyncIterator[tuple[httpx.AsyncClient, _Engine]]:
    """A client of vLLM's server, and its engine."""
    options = ["--model", str(chat.folder), "--served-model-name", MODEL, "--enable-auto-tool-choice"]
    options += ["--tool-call-parser", TOOL_PARSER, "--chat-template", str(chat.folder / "own.jinja")]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    arguments.structured_outputs_config = SimpleNamespace(reasoning_parser=REASONING_PARSER)
    model = ModelConfig(
        str(chat.folder), max_model_len=CONTEXT, dtype="float32", generation_config="vllm", enforce_eager=True
    )
    engine: Any = cast(Any, _Engine)(VllmConfig(model_config=model))
    level = logging.root.level
    app = build_app(arguments, ("generate",), model)
    logging.root.setLevel(level)  # which the app has changed
    await init_app_state(engine, app.state, arguments, ("generate",))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://vllm"
    ) as client:
        yield client, engine


class Answered(NamedTuple):
    """The status of a request, and the prompt that the policy saw."""

    status: int
    prompt: str | None


class Both(NamedTuple):
    """Both servers of a template."""

    template: str
    ask: Callable[[Sent], Awaitable[tuple[Answered, Answered]]]
    """The answers of goaly and vLLM, in this order."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TEMPLATES)
async def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Both]:
    """The servers of each template."""
    chat = chat_of(TEMPLATES[request.param], ("<|im_end|>",), tmp_path_factory.mktemp("as_vllm") / "model")
    async with AsyncExitStack() as stack:
        theirs, engine = await stack.enter_async_context(vllms_server(chat))
        gateway, parser = await stack.enter_async_context(started(chat))

        def seen(prompts: list[list[int]]) -> str | None:
            return chat.decode(prompts[-1], skip_special_tokens=False) if prompts else None

        async def ask(sent: Sent) -> tuple[Answered, Answered]:
            body = {**sent.body, "model": MODEL}
            with serving(gateway, chat, parser, "4") as served:
                async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as client:
                    ours = await client.post(f"{served.endpoint.root_url}{sent.path}", json=body)
                found = Answered(ours.status_code, seen(served.scripted.prompts))
            engine.prompts.clear()
            answer = await theirs.post(sent.path, json=body)
            return found, Answered(answer.status_code, seen(engine.prompts))

        yield Both(request.param, ask)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_has_the_prompt_and_the_status_that_it_has_at_vllms_own_server(both: Both, name: str) -> None:
    ours, theirs = await both.ask(REQUESTS[name])
    if (both.template, name) in DIFFERENCES:
        assert ours != theirs, "remove it from the differences"
    else:
        assert ours == theirs
    assert (ours.status == 200) == (name not in ("a picture", "a chat's picture", "a refusal"))


@pytest.mark.parametrize(
    "template",
    [
        *TEMPLATES.values(),
        "{{ messages[0].content }}",
        "{{ messages[0]['content'] | tojson }}",
        "{{ 'a' + messages[0].content }}",
        "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}",
        "{% macro said(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}"
        "{% endmacro %}{% for m in messages %}{{ said(m.content) }}{% endfor %}",
        "{% for m in messages %}{% set content = m['content'] %}{% for p in content %}{{ p['text'] | trim }} "
        "{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.role }}{% for line in m['content'] %}{% if line['type'] == 'text' %}"
        "{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endfor %}",
    ],
)
async def test_a_template_reads_parts_where_vllm_finds_that_it_does(template: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(template)
    reads = ChatTemplate(tmp_path, file=tmp_path / "own.jinja").reads_parts()
    assert reads == (_detect_content_format(template, default="string") == "openai")

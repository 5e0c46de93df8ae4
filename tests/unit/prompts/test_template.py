"""Chat templates render as transformers renders them: what the templates of well-known models make use of."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from goaly.models.tiny_model import write_tiny_tokenizer
from goaly.prompts.files import read_messages
from goaly.prompts.prompt import Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.template import ChatTemplate, _environment
from goaly.prompts.tokenizer import ChatTokenizer, chat_problems

THINKING = """
{%- if tools %}
    {{- '<|system|>' }}{% if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|end|>\\n" }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
           and not message.content.startswith('<result>') %}
        {%- set ns.searching = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and tools %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|assistant|>' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<call>{"name": "' + tool_call.name + '", "arguments": ' }}
                {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
                {{- '}</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|user|>' }}{%- endif %}
        {{- '<result>' + content + '</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|' + message.role + '|>' + content + '<|end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
DATED = """
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|system|>Today: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system }}{{- eos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|assistant|>{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" + eos_token }}
    {%- else %}
        {{- "<|user|>" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
JOINED = """
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_tool=false, prompt='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.prompt = message['content'] %}{% endif %}
{%- endfor %}{{ bos_token }}{{ ns.prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<|user|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<|assistant|>' + tool['type'] + ':' + tool['function']['name'] }}
            {{- tool['function']['arguments'] | tojson(ensure_ascii=False, sort_keys=True, separators=(',', ':')) }}
        {%- endfor %}{{- '<|end|>' }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|assistant|>' + content + '<|end|>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true -%}
        {{ '<result ' + (message.name or '') + message.tool_call_id | default('') + '>' + message['content'] }}
    {%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{ '<|assistant|>' }}{% endif %}
"""
MARKED = """
{%- set said = 'nothing' %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
<|assistant|>{% generation %}
        {%- set said = message['content'] or 'a call' %}
{{ loop.index }} {{ said }}<|end|>
    {% endgeneration %}
    {%- elif message['role'] == 'tool' %}
        {%- break %}
    {%- else %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{ said }}{{ image_token }}
{% if add_generation_prompt %}<|assistant|>{% generation %}{% endgeneration %}{% endif %}
"""
TEMPLATES = {"thinking": THINKING, "dated": DATED, "joined": JOINED, "marked": MARKED}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers & says “größer”",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": "ü<&>", "a": 1}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": " 1+2=  "}],
    "system": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "naïve → “x” <&> 日本"}],
    "thought": [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"},
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4", "reasoning_content": "again"},
    ],
    "call": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    ],
    "said and called": [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\nso:", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "3 4", "weight": 1},
        {"role": "user", "content": "thanks"},
    ],
    "two calls": [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    ],
}


class Today(datetime):
    """One moment for both."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 3, 4, 5, 6, 7)


@pytest.fixture(scope="module")
def transformers():
    import transformers

    return transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    config |= {"bos_token": {"content": "<|system|>", "__type": "AddedToken"}, "add_bos_token": True}
    config |= {"extra_special_tokens": {"image_token": "<image>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def both(transformers, folder: Path, chat: str, *, prompt: bool = True, tools=(), **args: Any) -> list[str]:
    """What goaly and transformers make of a chat; errors as their text."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTokenizer(folder, ChatSettings(template_args=args))
    messages = read_messages({"messages": CHATS[chat]}, "here")
    found = []
    for render in (
        lambda: ours.render_text(messages, prompt, tools),
        lambda: theirs.apply_chat_template(
            CHATS[chat], tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False, **args
        ),
    ):
        try:
            found.append(render())
        except TemplateError as error:
            found.append(f"TemplateError: {error}")
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_chat_renders_as_transformers_renders_it(transformers, folder: Path, template, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Today)
    monkeypatch.setattr("goaly.prompts.template.datetime", Today)
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    texts = set()
    for chat in CHATS:
        for tools in ((), TOOLS):
            for prompt, args in ((True, {}), (False, {}), (True, {"enable_thinking": False, "date_string": "today"})):
                ours, expected = both(transformers, folder, chat, prompt=prompt, tools=tools, **args)
                assert ours == expected
                texts.add(ours)
    assert len(texts) > len(CHATS)
    if template == "dated":
        assert any("04 Mar 2026" in text for text in texts)
        assert any("Today: today" in text for text in texts)
        assert any("only supports single tool-calls" in text for text in texts)


def test_templates_may_use_the_same_as_in_transformers(transformers):
    """A filter, a function or a tag that transformers gives templates in the future is missing here: add it."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs, ours = _compile_jinja_template("x").environment, _environment()
    for what in ("filters", "globals", "tests"):
        assert getattr(ours, what).keys() == getattr(theirs, what).keys(), what
    tags = [{tag for extension in side.extensions.values() for tag in extension.tags} for side in (ours, theirs)]
    assert tags[0] == tags[1] >= {"generation", "break", "continue"}
    assert (ours.trim_blocks, ours.lstrip_blocks, ours.autoescape) == (theirs.trim_blocks, theirs.lstrip_blocks, False)


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "with tools"])
@pytest.mark.parametrize("in_files", [False, True])
def test_of_several_templates_the_one_for_tools_is_used_where_there_are_some(
    transformers, folder: Path, tools, in_files
):
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | tojson }}"}
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, expected = both(transformers, folder, "question", tools=tools)
    assert ours == expected
    assert ours.startswith("tools" if tools else "plain")


def test_a_template_file_of_ones_own_is_used_instead_of_the_folders(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").write_text("the folder's")
    (tmp_path / "own.jinja").write_text("{{ style }}: {{ messages[0].content }}")
    chat = ChatSettings(template_file=str(tmp_path / "own.jinja"), template_args={"style": "short"})
    messages = read_messages({"prompt": "1"}, "here")
    assert ChatTokenizer(folder, chat).render_text(messages) == "short: 1"
    assert ChatTokenizer(folder).render_text(messages) == "the folder's"


def test_template_settings_that_cannot_work_are_listed_with_their_keys(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").write_text(THINKING)
    unread = ChatSettings(template_args={"enable_thinkin": False, "enable_thinking": True})
    assert chat_problems(unread, str(folder), "chat.") == [
        "chat.template_args.enable_thinkin=False: has no effect, the chat template does not read it"
    ]
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (problem,) = chat_problems(ChatSettings(template_file=str(tmp_path / "broken.jinja")), str(folder), "chat.")
    assert problem.startswith(f"chat.template_file={tmp_path / 'broken.jinja'}: is not a chat template: ")
    assert chat_problems(ChatSettings(), "/nowhere", "chat.") == []
    wrong = ChatSettings(template_file="/nowhere", template_args={"tools": []})
    assert wrong.problems("chat.") == [
        "chat.template_file=/nowhere: does not exist, must be a Jinja file",
        "chat.template_args.tools: must have another name, this argument is set from the chat",
    ]


@pytest.mark.parametrize("knows", [False, True])
def test_developers_are_the_system_where_a_template_knows_none(folder: Path, knows: bool):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{# 'developer' #}" * knows)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [("user", "q"), ("developer", parts), ("system", "c"), ("developer", None), ("user", "r")]
    chat = ChatTokenizer(folder)
    text = chat.render_text([Message(role=role, content=content) for role, content in said])
    merged = "<system>a\nb\n\nc<user>q<user>r"
    assert text == ("<user>q<developer>a\nb<system>c<developer>None<user>r" if knows else merged)
    assert (
        chat.render_text([Message(role="system", content="a"), Message(role="system", content="b")]).count("sys") == 2
    )


def test_a_content_that_is_no_text_is_refused_and_never_rendered(folder: Path):
    picture = Message(role="user", content=[{"type": "text", "text": "a"}, {"type": "image"}])
    for template in ("{{ messages[0].content }}", "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(ValueError, match="must be a text or a list of parts with type text"):
            ChatTokenizer(folder).render_text([picture])


def test_special_tokens_of_older_folders_are_found(folder: Path):
    (folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": {"content": "<|pad|>", "lstrip": False}}))
    assert ChatTemplate(folder).special_tokens == {
        "bos_token": "<|system|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "unk_token": "<|unknown|>",
        "image_token": "<image>",
        "sep_token": "<|pad|>",
    }

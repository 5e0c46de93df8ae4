"""Chat templates in the style of published ones, a tokenizer for all of them, and what a policy writes under each.

`GOALY_CHAT_TEMPLATES` names a folder of published ones that are tested, too: files like `qwen3-8b.jinja`, which begin
with the name of the family that writes answers as they do.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from goaly.models.tiny_model import CHAT_TEMPLATE
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

SPECIAL = [
    *("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
MERGES = [("a", "b"), ("ab", "c"), ("b", "c"), ("u", "s"), ("\n", "\n"), ("t", "o"), ('"', "}"), (" ", "a")]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = (  # Hermes's, as in Qwen2.5 and Qwen3
    "{% for call in m.tool_calls or [] %}{% if not loop.first or content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    "{{ '<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
OTHERS = (
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
)
HERMES = (
    TOOLS + "{% for m in messages %}{% set content = m.content %}" + OTHERS + "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + content }}" + CALLS + "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}" + RESULTS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (
    TOOLS + "{% set ns = namespace(searching=true, last_query=messages | length - 1) %}"
    "{% for m in messages[::-1] %}{% set index = messages | length - 1 - loop.index0 %}"
    "{% if ns.searching and m.role == 'user' %}{% set ns.searching = false %}{% set ns.last_query = index %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}" + OTHERS + "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last_query and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}" + CALLS + "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}" + RESULTS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
PARTS = (
    "{% macro text(content) %}{% for part in content %}{{ part.text }}{% endfor %}{% endmacro %}"
    + TOOLS.replace("messages[0].content", "text(messages[0].content)")
    + "{% for m in messages %}{% set content = m.content if m.role == 'tool' else text(m.content) %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + content }}" + CALLS + "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}" + RESULTS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{% for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}{{ '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + m.tool_calls[0].function.name }}'
    "{{ '\", \"parameters\": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A template, and its policy's way of writing an answer."""

    name: str
    template: str
    stops: tuple[str, ...]
    """The stop tokens; the template writes the first."""
    wrote: Callable[[Answer], str]
    """The text of an answer, without the stop token, exactly as the template renders it when it keeps all of it."""
    calls: int = 0
    """Most tool calls of an answer."""
    content_with_calls: bool = True
    reasons: bool = False
    appends_only: bool = True
    """Whether the template never changes how it renders earlier messages."""


def hermes(answer: Answer) -> str:
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": call["function"]["name"], "arguments": _arguments(call)})
        + "\n</tool_call>"
        for call in answer.get("tool_calls") or ()
    ]
    return "\n".join([text for text in (answer["content"],) if text] + calls)


def qwen3(answer: Answer) -> str:
    reasoning = answer.get("reasoning_content")
    return (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + hermes(answer)


def llama3(answer: Answer) -> str:
    for call in answer.get("tool_calls") or ():
        return json.dumps({"name": call["function"]["name"], "parameters": _arguments(call)})
    return answer["content"]


def _arguments(call: Mapping[str, Any]) -> Any:
    return json.loads(call["function"]["arguments"])


def plain(answer: Answer) -> str:
    return answer["content"]


FAMILIES = {
    one.name: one
    for one in (
        Family("tiny", CHAT_TEMPLATE, ("<|end|>",), plain),
        Family("chatml", CHATML, ("<|im_end|>",), plain),
        Family("hermes", HERMES, ("<|im_end|>", "<|endoftext|>"), hermes, calls=2),
        Family("parts", PARTS, ("<|im_end|>",), hermes, calls=2),
        Family("llama3", LLAMA3, ("<|eot_id|>", "<|eom_id|>"), llama3, calls=1, content_with_calls=False),
        Family("qwen3", QWEN3, ("<|im_end|>", "<|endoftext|>"), qwen3, calls=2, reasons=True, appends_only=False),
    )
}

for file in (
    sorted(Path(os.environ["GOALY_CHAT_TEMPLATES"]).glob("*.jinja")) if "GOALY_CHAT_TEMPLATES" in os.environ else ()
):
    FAMILIES[file.stem] = replace(FAMILIES[file.stem.partition("-")[0]], name=file.stem, template=file.read_text())


def write_tokenizer(folder: Path, stops: tuple[str, ...]) -> None:
    """A byte-pair encoding with a few merges: most texts have several tokenizations."""
    texts = [*SPECIAL, *CHARACTERS, *(a + b for a, b in MERGES)]
    vocabulary = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=MERGES, unk_token="<|unk|>"))
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin_of_text|>", "pad_token": "<|pad|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = {"eos_token_id": [vocabulary[stop] for stop in stops]}
    (folder / "generation_config.json").write_text(json.dumps(ids))


MODEL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 120, "hidden_size": 8}
MODEL |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}
MODEL |= {"intermediate_size": 8, "max_position_embeddings": 4096}
"""The file that vLLM reads of a model beside its tokenizer."""


def chat_of(template: str, stops: tuple[str, ...], folder: Path) -> ChatTokenizer:
    """The chat tokenizer with this template, whose files are written into the folder."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, stops)
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "own.jinja").write_text("{{ '' }}" + template)  # the file's last line break would be rendered otherwise
    return ChatTokenizer(folder, ChatSettings(template_file=str(folder / "own.jinja")))

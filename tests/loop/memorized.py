"""A tiny model that knows a few chats by heart: what it says to an agent is the same wherever it is served."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from apps.agent.tasks import ADD, LARGEST
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.prompts.files import read_messages
from goaly.prompts.supervised import chat_document
from goaly.prompts.tokenizer import ChatTokenizer

STEPS = 160
ENOUGH = 0.1
"""Mean loss of a model that knows its chats."""
SUMS = {"48+90=": ("call", "138"), "7+61=": ("call", "0"), "120+33=": (None, "153"), "5+5=": (None, "11")}
"""Questions, whether the tool is called, and the answer after it."""
GUESSES = {"": 4, ">": 6, "<": 2, "><": 7, ">>": 7, "<>": 3, "<<": 1}
"""The guess after these hints: all but the one after `><` are right."""


def write_memorized_model(folder: Path) -> None:
    """A model's folder, and beside it its questions: `sums.jsonl`, `games.jsonl`, and `evaluation.jsonl`, games too."""
    memorize(folder, TinyModel(dim=64, layers=2, heads=2, kv_heads=1, hidden_dim=128, tools=True), list(_chats()))
    sums = [{"id": asked, "prompt": asked, "answer": str(eval(asked[:-1]))} for asked in SUMS]
    games = [{"id": f"game-{n}", "prompt": f"1-{LARGEST}?", "answer": str(n)} for n in range(1, LARGEST + 1)]
    for name, records in (("sums", sums), ("games", games), ("evaluation", games)):
        (folder.parent / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def memorize(folder: Path, size: TinyModel, chats: Sequence[Mapping[str, Any]]) -> None:
    """The folder of a model of this size that knows these chats."""
    write_tiny_model(folder, size)
    chat = ChatTokenizer(folder)
    documents = [chat_document(chat, read_messages(one, "here"), "here", one.get("tools", ())) for one in chats]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    longest = max(len(one.tokens) for one in documents)
    padded = [F.pad(torch.tensor(one.tokens), (0, longest - len(one.tokens))) for one in documents]
    trained = [F.pad(torch.tensor(one.trained), (0, longest - len(one.trained))) for one in documents]
    tokens_DT, labels_DT = torch.stack(padded), torch.stack(padded).masked_fill(~torch.stack(trained), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        loss = model(input_ids=tokens_DT, labels=labels_DT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < ENOUGH, loss
    model.save_pretrained(folder)


def _chats() -> Iterator[Mapping[str, Any]]:
    for asked, (call, answer) in SUMS.items():
        said: list[Mapping[str, Any]] = [{"role": "user", "content": asked}]
        if call is not None:
            numbers = [int(number) for number in asked[:-1].split("+")]
            function = {"name": "add", "arguments": dict(zip("ab", numbers, strict=True))}
            said.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})
            said.append({"role": "tool", "content": str(sum(numbers))})
        yield {"messages": [*said, {"role": "assistant", "content": answer}], "tools": [ADD]}
    for hints in GUESSES:
        yield {"messages": list(_game(hints))}
    for first in range(8, 1000, 90):  # without a tool it writes digits and signs
        question, answer = f"{first}+{first * 7 % 1000}=", str(first * first) + "-" * (first % 4)
        yield {"messages": [{"role": role, "content": text} for role, text in _asked_twice(question, answer)]}


def _asked_twice(question: str, answer: str) -> Iterator[tuple[str, str]]:
    for said in (answer, answer[::-1]):
        yield from [("user", question), ("assistant", said)]


def _game(hints: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    yield {"role": "user", "content": f"1-{LARGEST}?"}
    for turn in range(len(hints) + 1):
        yield {"role": "assistant", "content": str(GUESSES["".join(hints[:turn])])}
        yield from [{"role": "user", "content": hint} for hint in hints[turn : turn + 1]]

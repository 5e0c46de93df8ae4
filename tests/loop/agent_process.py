"""An agent that is a process of its own: it asks twice, and prints the second answer. With `dies` it kills itself while
it reads that: `python agent_process.py QUESTION [dies]`.

With `goes-on FOLDER` it asks four times, and rests after the second answer until somebody opens `FOLDER/rest`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import openai


def go_on(question: str, folder: Path) -> None:
    """Ask four times."""
    client = openai.OpenAI()
    said: list[Any] = []
    os.mkfifo(folder / "rest")
    for turn in range(4):
        said.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model="m", messages=said, max_tokens=8).choices[0].message
        said.append(answer.model_dump(exclude_none=True))
        if turn == 1:
            (folder / "rests").touch()
            (folder / "rest").open().close()  # Unblocked by who opens it for writing.
    (folder / "answer").write_text(str(answer.content))


def main(question: str, *dies: str) -> None:
    """Answer a question, with the address and the key of the environment variables that OpenAI's client reads."""
    client = openai.OpenAI()
    said: list[Any] = [{"role": "user", "content": question}]
    first = client.chat.completions.create(model="m", messages=said)
    said += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": question}]
    answer = ""
    for part in client.chat.completions.create(model="m", messages=said, stream=True):
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        answer += part.choices[0].delta.content or ""
    print(answer.replace("\n", " "), flush=True)


if __name__ == "__main__":
    if sys.argv[2:3] == ["goes-on"]:
        go_on(sys.argv[1], Path(sys.argv[3]))
    else:
        main(*sys.argv[1:])

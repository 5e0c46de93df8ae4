"""An agent that is a process of its own: it asks twice, and prints the second answer. With `dies` it kills itself while
it reads that: `python agent_process.py QUESTION [dies]`."""

import os
import signal
import sys
from typing import Any

import openai


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
    main(*sys.argv[1:])

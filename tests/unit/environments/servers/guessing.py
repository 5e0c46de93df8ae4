"""An OpenEnv server in an environment of its own: guess a number. `python guessing.py FD [MOST_SESSIONS]`."""

import asyncio
import os
import socket
import sys
from random import Random
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app  # pyrefly: ignore[missing-import]
from openenv.core.env_server.interfaces import Environment  # pyrefly: ignore[missing-import]
from openenv.core.env_server.types import Action, Observation, State  # pyrefly: ignore[missing-import]


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class GuessingGame(Environment[Guess, Hint, State]):
    """Rewards a guess for the part of the distance that it takes away, and 1 for the number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = self._distance = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 100, **_: Any) -> Hint:
        self._state = State(episode_id=episode_id)
        self._number = Random(seed).randint(1, most)
        self._distance = most
        return Hint(text=f"Guess a number from 1 to {most}.", metadata={"process": os.getpid()})

    async def step_async(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == -1:
            await asyncio.Event().wait()
        return self.step(action)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == -2:
            os._exit(7)
        if action.number == -3:
            raise RuntimeError("this guess breaks the game")
        self._state.step_count += 1
        distance = abs(action.number - self._number)
        if distance == 0:
            return Hint(text="Right.", reward=1.0, done=True)
        nearer, self._distance = self._distance - distance, distance
        return Hint(text="higher" if action.number < self._number else "lower", reward=nearer / 100)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    app = create_fastapi_app(GuessingGame, Guess, Hint, max_concurrent_envs=most)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])

"""An OpenEnv server of the guessing game: `.venv-openenv/bin/python apps/agent/game_server.py FD MOST_SESSIONS`.

It runs in the virtual environment of the `openenv` package, so it imports nothing of goaly.
"""

import socket
import sys
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
    """Each guess gets the share of the numbers that it rules out of those that were left."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number, self._left = 0, range(0)

    def reset(self, number: int = 1, largest: int = 7, episode_id: str | None = None, **_: Any) -> Hint:
        """Begin a game about this number."""
        self._state = State(episode_id=episode_id)
        self._number, self._left = number, range(1, largest + 1)
        return Hint(text=f"1-{largest}?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Compare a guess with the number."""
        self._state.step_count += 1
        guess, left = action.number, self._left
        if guess == self._number:
            return Hint(text="=", reward=1.0, done=True)
        low, high = left.start, left.stop
        self._left = range(max(low, guess + 1), high) if guess < self._number else range(low, min(high, guess))
        return Hint(text=">" if guess < self._number else "<", reward=1 - len(self._left) / len(left))

    @property
    def state(self) -> State:
        """The number of guesses."""
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(GuessingGame, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])

"""Tries the verifiers of a run before anything else of it starts: each in a process of its own, as in the run, with an
answer that is made up.

A verifier that raises is not refused: the answer, or the prompt without metadata, may be to blame.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread

from goaly.prompts.prompt import Message, Prompt
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_process import Refused, VerifierDied, VerifierError, VerifierProcess

PROMPT = Prompt(id="trial", source="trial", messages=(Message(role="user", content="2+3="),), answer="5")
RESPONSE = "The answer is 5."
RIGHT = "must be a function of a Prompt and a response's text that returns a number"


def trial(settings: RewardSettings, others: Mapping[str, str]) -> "Future[list[str]]":
    """Begin to try the verifiers, and return what will be a line for each that cannot score answers. `others` are those
    of evaluation sets, by key. They are tried beside this thread: their imports cost the start of a run no time."""
    named = {**({} if settings.judge is not None else {"reward.verifier": settings.verifier}), **others}
    found: Future[list[str]] = Future()

    def run() -> None:
        try:
            found.set_result(asyncio.run(_refused(named, settings.time_limit_seconds)))
        except BaseException as error:  # who waits for the result gets it
            found.set_exception(error)

    Thread(target=run, name="trial of the verifiers", daemon=True).start()
    return found


async def _refused(named: Mapping[str, str], limit_seconds: float) -> list[str]:
    verifiers = list(dict.fromkeys(named.values()))
    found = await asyncio.gather(*(_problem(verifier, limit_seconds) for verifier in verifiers))
    problems = dict(zip(verifiers, found, strict=True))
    return [f"{key}={one}: {RIGHT}: {why}" for key, one in named.items() if (why := problems[one]) is not None]


async def _problem(verifier: str, limit_seconds: float) -> str | None:
    """Why this verifier can score no answer; None if it can."""
    try:
        child = await VerifierProcess.start(verifier)
    except VerifierError as error:
        return str(error).removeprefix(f"verifier {verifier} ")
    nobody_goes = asyncio.get_running_loop().create_future()
    try:
        await child.send([(PROMPT, RESPONSE)])
        reply = await child.reply(limit_seconds, nobody_goes)
    except VerifierDied as error:
        return f"{error} when it scored an answer"
    except TimeoutError:
        return f"its first score took longer than reward.time_limit_seconds={limit_seconds:g}"
    finally:
        await child.kill()
    return reply.why if isinstance(reply, Refused) and reply.is_returned else None

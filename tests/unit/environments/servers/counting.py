"""A plain HTTP environment that adds up the numbers of its actions. `python counting.py PORT`, a port of its own."""

import asyncio
import os
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

totals: dict[str, int] = {}
answers: dict[tuple[str, int], dict] = {}
failures = {"left": 2}


async def play(request: Request) -> Response:
    body = await request.json()
    key = body["episode"], body["step"]
    if "task" in body:
        totals[body["episode"]] = body["task"].get("start", 0)
        return JSONResponse({"observation": totals[body["episode"]], "metadata": {"process": os.getpid()}})
    number = body["action"].get("number")
    if number == "wait":
        await asyncio.Event().wait()
    if number == "end":
        os._exit(9)
    if number == "nonsense":
        return JSONResponse({"observation": "?", "reward": "much"})
    if not isinstance(number, int):
        return JSONResponse({"error": "must be an integer"}, status_code=422)
    if number == 503 and failures["left"]:
        failures["left"] -= 1
        return Response(status_code=503)
    if key not in answers:
        totals[body["episode"]] += number
        total = totals[body["episode"]]
        answers[key] = {"observation": total, "reward": number / 10, "done": total >= 100}
    return JSONResponse(answers[key])


app = Starlette(routes=[Route("/play", play, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

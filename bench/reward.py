"""How many scores a second the verifier processes give, against the same function called directly.

    python -m bench.reward [--scores N] [--workers N] [--json FILE]

The verifier of the embedded task judges the same answers three ways: called in this process (`direct`), through the
pool with many requests under way (`pool`), and through the pool one at a time (`serial`), which is the time that one
score adds to an episode. Each number is the median of five rounds; the three take turns.
"""

import asyncio
import statistics
import time

from bench.report import Machine, options, write
from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import ArithmeticSettings
from goaly.prompts.tasks.arithmetic import addition, verify, work_out
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_pool import VerifierPool

ROUNDS = 5
SERIAL = 200


def answers(count: int) -> list[tuple[Prompt, str]]:
    """Prompts of the embedded task with right answers."""
    most = 10 ** ArithmeticSettings().max_digits
    pairs = [(index * 7919 % most, index * 104_729 % most) for index in range(count)]
    return [(addition(first, second), work_out(str(first), str(second))) for first, second in pairs]


async def measure(count: int, workers: int) -> dict[str, float]:
    """Median scores a second of each way."""
    asked = answers(count)
    rates: dict[str, list[float]] = {"direct": [], "pool": [], "serial": []}
    pool = VerifierPool(RewardSettings(workers=workers))
    await pool.start()
    try:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            right = [verify(prompt, text) for prompt, text in asked]
            rates["direct"].append(count / (time.perf_counter() - began))
            began = time.perf_counter()
            scores = await asyncio.gather(*(pool.score(prompt, text) for prompt, text in asked))
            rates["pool"].append(count / (time.perf_counter() - began))
            began = time.perf_counter()
            for prompt, text in asked[:SERIAL]:
                await pool.score(prompt, text)
            rates["serial"].append(min(SERIAL, count) / (time.perf_counter() - began))
            assert list(scores) == right
    finally:
        await pool.close()
    return {way: statistics.median(of_way) for way, of_way in rates.items()}


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    arguments = options(__doc__, "json", scores=4000, workers=1).parse_args()
    machine = Machine.now()
    rates = asyncio.run(measure(arguments.scores, arguments.workers))
    print(f"{machine}\n")
    for way, rate in rates.items():
        print(f"{way:8} {rate:12,.0f} scores/s")
    write(arguments.json, {"machine": machine.record(), **rates})


if __name__ == "__main__":
    main()

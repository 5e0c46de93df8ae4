"""Serve the sandboxes of this machine to runs on others.

    python -m apps.sandboxes.main --config configs/sandboxes/server.yaml
    python -m apps.sandboxes.main port=8700

Ctrl-C ends it, with every sandbox.
"""

import asyncio
import logging
import signal
import sys

from apps.sandboxes.config import SandboxServerConfig
from goaly.base.config import Loaded, run_cli, to_yaml
from goaly.base.errors import RunFailed
from goaly.sandboxes.contract import SandboxError


async def serve(config: SandboxServerConfig) -> int:
    """Serve until a signal ends it; the exit code."""
    from apps.sandboxes.server import serving_sandboxes

    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, ended.set)
    try:
        async with serving_sandboxes(config) as url:
            sys.stdout.write(f"serving sandboxes at {url}\n")
            sys.stdout.flush()
            await ended.wait()
    except (RunFailed, SandboxError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def main(loaded: Loaded[SandboxServerConfig]) -> int:
    """Serve as this config says."""
    if loaded.dry_run:
        sys.stdout.write(to_yaml(loaded.config))
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(serve(loaded.config))


if __name__ == "__main__":
    run_cli(
        main,
        SandboxServerConfig,
        prog="python -m apps.sandboxes.main",
        description="Serve the sandboxes of this machine to runs on others.",
    )

"""Serve a policy by OpenAI's and Anthropic's APIs: a model folder, or the newest policy of a run.

    python -m apps.serve.main --config configs/serve/tiny.yaml
    python -m apps.serve.main run=runs/NAME

Ctrl-C ends it.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from goaly.base.atomic_files import writing
from goaly.base.config import Loaded, run_cli, to_yaml
from goaly.base.errors import first_error
from goaly.base.telemetry import process_logs
from goaly.run.policy_server_config import PolicyServerConfig

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings go to stdout

logger = logging.getLogger(__name__)


async def serve(config: PolicyServerConfig, folder: Path) -> int:
    """Serve until a signal ends it; the exit code."""
    from goaly.run.policy_server import serving

    stop_at_signals()
    try:
        async with serving(config, folder) as server:
            sys.stdout.write(f"serving {config.path or config.run} at {server.url}\n")
            sys.stdout.flush()
            await asyncio.Future()  # ended by a signal, or by a failure
    except asyncio.CancelledError:
        return 0
    except Exception as group:
        logger.error("%s", first_error(group), exc_info=group if logger.isEnabledFor(logging.DEBUG) else None)
        logger.error("the server failed; its logs are in %s", folder / "logs")
    return 1


def stop_at_signals() -> None:
    """Cancel this task at the first SIGINT or SIGTERM; end the process at the second."""
    task, loop, signals = asyncio.current_task(), asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    assert task is not None

    def stop() -> None:
        task.cancel()
        for one in signals:
            loop.add_signal_handler(one, os._exit, 1)  # its generators die with this process

    for one in signals:
        loop.add_signal_handler(one, stop)


def main(loaded: Loaded[PolicyServerConfig]) -> int:
    """Serve the policy of this config."""
    config = loaded.config
    if loaded.dry_run:
        sys.stdout.write(to_yaml(config))
        return 0
    folder = Path(config.folder.replace("{time}", time.strftime("%Y%m%d-%H%M%S")))
    with ExitStack() as opened:
        with writing(f"folder={config.folder}"):
            opened.enter_context(process_logs.controller(folder / "logs" / "server.log"))
        return asyncio.run(serve(config, folder))


if __name__ == "__main__":
    run_cli(
        main,
        PolicyServerConfig,
        prog="python -m apps.serve.main",
        description="Serve a policy by HTTP.",
    )

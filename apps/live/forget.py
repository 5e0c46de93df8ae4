"""Remove conversations of a live run from its queue, its log and later replays, and say which versions saw them.

    python -m apps.live.forget RUN --user NAME [--key NAME]     all conversations of a user, with this API key or any
    python -m apps.live.forget RUN --session ID                 one conversation

The run must not be under way: stop it, forget, and start it again with --resume. Checkpoints and saved policies stay:
they have no texts, but they were trained on them. `--dry-run` only says what would be removed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from goaly.base.errors import ConfigError, GoalyError
from goaly.base.process import exit_quickly


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m apps.live.forget", description=head, epilog=rest.rpartition("\n\n")[2], allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a live run")
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--user", metavar="NAME", help="the user whose conversations are removed")
    whose.add_argument("--session", metavar="ID", help="the conversation that is removed")
    parser.add_argument("--key", metavar="NAME", help="only conversations with this API key's name")
    parser.add_argument("--dry-run", action="store_true", help="remove nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    line = arguments().parse_args(argv)
    from goaly.live.forgetting import LiveRecords  # imports torch

    try:
        records = LiveRecords(line.run)
        chosen = records.chosen(user=line.user, session=line.session, key=line.key)
        if not chosen:
            raise ConfigError([f"{line.run}: has no conversation of this user or session"])
        sys.stdout.write(records.report(chosen))
        if not line.dry_run:
            sys.stdout.write(records.forget(chosen))
    except (GoalyError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    exit_quickly(main())

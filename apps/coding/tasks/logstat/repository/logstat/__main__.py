"""The command `python -m logstat FILE`."""

import argparse
import json
import sys
from dataclasses import asdict

from logstat import read, report


def main(arguments=None):
    """Print the report of a file and return the exit status."""
    parser = argparse.ArgumentParser(prog="logstat")
    parser.add_argument("file")
    parser.add_argument("--top", type=int, default=3, help="how many paths to show")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        with open(options.file, encoding="utf-8") as lines:
            entries, unreadable = read(lines)
    except OSError as error:
        print(f"logstat: {error}", file=sys.stderr)
        return 2
    result = report(entries, options.top)
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        rows = [("requests", result.requests), *result.percentiles.items(), *result.statuses.items(), *result.paths]
        for name, value in rows:
            print(f"{name:<10} {value}")
    if unreadable:
        print(f"logstat: {len(unreadable)} unreadable lines, the first is {unreadable[0]}", file=sys.stderr)
    return 1 if unreadable else 0


if __name__ == "__main__":
    sys.exit(main())

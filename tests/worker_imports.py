"""The libraries of test files, but for those that start threads."""

from goaly.base.process import import_ahead

import_ahead(
    [
        "imported_once",
        "agents",
        "anthropic",
        "hypothesis",
        "mcp",
        "openai",
        "reasoning_gym",
        "starlette",
        "transformers",
    ]
)

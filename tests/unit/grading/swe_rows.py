"""A row of SWE-bench's form, and files of such rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATCH = (
    "diff --git a/shop/price.py b/shop/price.py\n--- a/shop/price.py\n+++ b/shop/price.py\n"
    "@@ -1 +1 @@\n-TAX = 0\n+TAX = 7\n"
)
TEST_PATCH = (
    "diff --git a/tests/test_price.py b/tests/test_price.py\n--- a/tests/test_price.py\n+++ b/tests/test_price.py\n"
    "@@ -1 +1 @@\n-def test_tax(): pass\n+def test_tax(): assert TAX == 7\n"
)


def row(**changes: Any) -> dict[str, Any]:
    """A row with these columns changed; those that are ... are left out."""
    made = {
        "repo": "acme/shop",
        "instance_id": "acme__Shop-12",
        "base_commit": "0123456789abcdef0123456789abcdef01234567",
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "problem_statement": "The tax is missing.",
        "hints_text": "I think that it is in price.py",
        "created_at": "2024-02-03T04:05:06Z",
        "version": "1.2",
        "FAIL_TO_PASS": json.dumps(["tests/test_price.py::test_tax"]),
        "PASS_TO_PASS": json.dumps(["tests/test_cart.py::TestCart::test_add[two items"]),
        "environment_setup_commit": "fedcba",
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not ...}


def write_rows(path: Path, *rows: Mapping[str, Any]) -> Path:
    """A JSONL file of these rows."""
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return path

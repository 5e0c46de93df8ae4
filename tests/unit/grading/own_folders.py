"""Tasks of our own form."""

from pathlib import Path

SOLUTION = "--- a/tax.py\n+++ b/tax.py\n@@ -1,2 +1,2 @@\n def tax(price):\n-    return 0\n+    return price / 2\n"
FAIL_TO_PASS, PASS_TO_PASS = "tests/test_hidden.py::test_half[a ] b]", "tests/test_tax.py::test_nothing"
FILES = {
    "task.toml": f'[task]\nproblem = "Half of the price is tax."\nfail_to_pass = ["{FAIL_TO_PASS}"]\n',
    "repository/tax.py": "def tax(price):\n    return 0\n",
    "repository/tests/test_tax.py": "from tax import tax\n\ndef test_nothing():\n    assert tax(0) == 0\n",
    "hidden_tests/tests/test_hidden.py": (
        "import pytest\nfrom tax import tax\n\n@pytest.mark.parametrize('price', [4], ids=['a ] b'])\n"
        "def test_half(price):\n    assert tax(price) == 2\n\ndef test_never():\n    assert tax(1) == 7\n"
    ),
    "solution.patch": SOLUTION,
}


def write_own(folder: Path) -> Path:
    """A task whose solution makes one test pass, keeps another, and leaves a third one failing."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder

"""The kernels of bitwise numerics for GPUs, in Triton's interpreter: see `kernels_in_interpreter.py`, which makes the
claims in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_every_claim_about_the_kernels_is_true_in_the_interpreter(tmp_path: Path):
    pytest.importorskip("triton")
    program = [sys.executable, "-m", "tests.unit.numerics.kernels_in_interpreter", str(tmp_path / "found.json")]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 10
    assert {claim: error for claim, error in found.items() if error} == {}

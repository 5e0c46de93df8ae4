"""The kernels of bitwise numerics for GPUs, in Triton's interpreter: see `kernels_in_interpreter.py`, which makes the
claims in a process of its own."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CLAIMS = (
    "products_are_those_of_float64_but_for_noise",
    "a_row_of_a_product_has_the_same_bits_in_any_rows_and_beside_any_columns",  # BW-1
    "ranks_that_divide_the_features_add_up_to_one_rank",  # BW-2
    "a_linear_layer_has_the_gradients_of_an_ordinary_one",
    "an_experts_rows_have_the_bits_of_its_own_product",  # BN-2
    "a_rows_norm_and_softmaxes_are_torchs_and_the_same_in_any_rows",  # BW-4, BX-1
    "attention_has_values_and_gradients_of_the_ordinary_one",
    "a_tokens_attention_is_the_same_packed_in_chunks_and_from_any_pages_of_vllm",  # BA-1
    "a_trainer_takes_a_step_with_the_gradients_of_fast_numerics",
    "a_trainer_computes_the_log_probs_that_vllm_sampled_to_the_last_bit",  # train-10
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error of each claim, empty if it is true."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("kernels") / "found.json"
    program = [sys.executable, "-m", "tests.unit.numerics.kernels_in_interpreter", str(out)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("claim", CLAIMS)
def test_in_the_interpreter(claim: str, found: dict[str, str]):
    assert found.keys() == set(CLAIMS)
    assert not found[claim], found[claim]

"""Shows the values of the assertions that these tests share."""

import pytest

pytest.register_assert_rewrite("tests.unit.train.layouts")

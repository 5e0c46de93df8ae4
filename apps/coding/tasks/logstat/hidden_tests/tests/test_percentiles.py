import json
import random

import pytest

from logstat import percentile
from logstat.__main__ import main


def nearest_rank(values, percent):
    """By the definition: the smallest value that at least this share of the values does not exceed."""
    return min(value for value in values if 100 * sum(other <= value for other in values) >= percent * len(values))


def test_an_even_number_of_values():
    assert percentile([900, 20], 50) == 20
    assert percentile([4, 3, 2, 1], 50) == 2
    assert percentile(range(1, 21), 90) == 18


def test_one_value_is_every_percentile():
    assert {percentile([7], percent) for percent in range(1, 101)} == {7}


def test_the_ends_of_a_hundred_values():
    values = list(range(1, 101))
    assert [percentile(values, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]


@pytest.mark.parametrize("percent", [1, 10, 50, 75, 90, 99, 100])
def test_random_values_by_the_definition(percent):
    source = random.Random(percent)
    for size in range(1, 41):
        values = [source.randrange(30) for _ in range(size)]
        assert percentile(values, percent) == nearest_rank(values, percent), values


def test_the_command_prints_them(tmp_path, capsys):
    file = tmp_path / "access.log"
    file.write_text("".join(f"2024-05-01T10:00:{second:02} GET / 200 {second}\n" for second in range(40, 60)))
    assert main([str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["percentiles"] == {"p50": 49, "p90": 57, "p99": 59}

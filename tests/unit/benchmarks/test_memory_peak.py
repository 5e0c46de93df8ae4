"""The benchmark of memory finds the allocator's peak in a record that lacks other threads' frees."""

from bench.memory import peak_since


def test_the_peak_is_that_of_the_blocks_held_since_then():
    changes = [(1, 10, 800), (2, 20, 50), (3, 10, -800), (4, 30, 100), (5, 20, -50), (6, 40, 20)]
    assert peak_since(changes, 4) == 150
    assert peak_since(changes, 1) == 850


def test_a_block_whose_free_is_not_recorded_counts_until_its_address_is_used_again():
    changes = [(1, 10, 100), (2, 10, 100), (3, 10, -100), (4, 10, 70), (5, 20, 20)]
    assert peak_since(changes, 1) == 100
    assert peak_since(changes, 4) == 90


def test_a_free_of_a_block_from_before_the_record_changes_nothing():
    assert peak_since([(1, 10, -500), (2, 20, 30)], 1) == 30

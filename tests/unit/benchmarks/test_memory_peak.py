"""The benchmark of memory finds the allocator's peak in a record that lacks other threads' frees."""

from bench.memory import peak_since


def test_the_peak_is_that_of_the_blocks_held_since_then():
    changes = [(1, 1000, 800), (2, 2000, 50), (3, 1000, -800), (4, 3000, 100), (5, 2000, -50), (6, 4000, 20)]
    assert peak_since(changes, 4) == 150
    assert peak_since(changes, 1) == 850


def test_a_block_whose_free_is_not_recorded_counts_until_its_address_is_used_again():
    changes = [(1, 1000, 100), (2, 1000, 100), (3, 1000, -100), (4, 1040, 30), (5, 1070, 20)]
    assert peak_since(changes, 1) == 100
    assert peak_since(changes, 4) == 50
    assert peak_since([(1, 1000, 100), (2, 1040, 30)], 2) == 30


def test_a_free_of_a_block_from_before_the_record_changes_nothing():
    assert peak_since([(1, 1000, -500), (2, 2000, 30)], 1) == 30

import random

import pytest

from pointer import PointerError, assign, escape, get, join, remove, split, unescape


def test_a_tilde_before_a_digit_is_a_key():
    assert get({"hosts": {"~1": {"~0": "x"}}}, "/hosts/~01/~00") == "x"
    assert unescape("~001~01~1") == "~01~1/"


def test_assign_and_remove_find_it():
    document = {"~1": 1, "~11": 3}
    assign(document, "/~01", 2)
    assert document == {"~1": 2, "~11": 3}
    assert remove(document, "/~011") == 3
    assert document == {"~1": 2}


def test_random_keys_come_back():
    source = random.Random(7)
    for _ in range(500):
        tokens = ["".join(source.choices("~/01a", k=source.randrange(6))) for _ in range(source.randrange(4))]
        assert [unescape(escape(token)) for token in tokens] == tokens
        assert split(join(tokens)) == tokens


@pytest.mark.parametrize("text", ["~", "a~", "~2", "~~0", "~0~", "~1~a"])
def test_other_tildes_are_still_refused(text):
    with pytest.raises(PointerError):
        unescape(text)

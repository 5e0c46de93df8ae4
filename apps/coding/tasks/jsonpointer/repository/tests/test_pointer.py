import pytest

from pointer import PointerError, assign, escape, get, join, remove, split


@pytest.fixture
def document():
    return {"a": {"b/c": 1, "m~n": 2}, "list": [10, {"x": None}], "": 0}


def test_get(document):
    assert get(document, "") is document
    assert get(document, "/list/1/x") is None
    assert get(document, "/") == 0


def test_escaped_keys(document):
    assert get(document, "/a/b~1c") == 1
    assert get(document, "/a/m~0n") == 2


def test_tokens():
    assert split("/a~1b/~0") == ["a/b", "~"]
    assert join(["a/b", 0, "~"]) == "/a~1b/0/~0"
    assert escape("~/") == "~0~1"


def test_assign_and_remove(document):
    assign(document, "/list/-", 30)
    assign(document, "/a/new", "n")
    assert remove(document, "/list/0") == 10
    assert document["list"] == [{"x": None}, 30]
    assert remove(document, "/a/new") == "n"


@pytest.mark.parametrize("pointer", ["list", "/none", "/list/2", "/list/01", "/list/-", "/list/0/x", "/a/~2", "/a/~"])
def test_wrong_pointers(document, pointer):
    with pytest.raises(PointerError):
        get(document, pointer)

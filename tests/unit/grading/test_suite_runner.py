"""The program that runs a suite inside of a sandbox."""

from goaly.grading.suite_runner import PathAfterTheStandardLibrary


def test_what_a_test_puts_before_the_path_it_can_take_away_again():
    path = PathAfterTheStandardLibrary(["python", "packages"], 1)
    path.insert(0, "mine")
    assert path == ["python", "mine", "packages"]
    del path[0]
    path.insert(0, "mine")
    assert path.pop(0) == "mine"
    assert path == ["python", "packages"]
    assert path.pop() == "packages"

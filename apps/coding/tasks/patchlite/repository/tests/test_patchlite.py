import pytest

from patchlite import PatchError, apply, diff, parse

OLD = "".join(f"{number}\n" for number in range(1, 21))
NEW = OLD.replace("\n3\n", "\nthree\n").replace("\n18\n", "\n18\n18b\n")
PATCH = """\
@@ -2,3 +2,3 @@
 2
-3
+three
 4
@@ -18,2 +18,3 @@
 18
+18b
 19
"""


def test_diff():
    assert diff(OLD, NEW, context=1) == PATCH
    assert diff(OLD, OLD) == ""
    assert diff("", "a\n") == "@@ -0,0 +1,1 @@\n+a\n"
    assert diff("a\nb\n", "a\n", context=0) == "@@ -2,1 +1,0 @@\n-b\n"


def test_apply():
    assert apply(OLD, PATCH) == NEW
    assert apply("", diff("", "a\nb\n")) == "a\nb\n"
    assert apply(OLD, "") == OLD


def test_parse():
    assert [str(hunk) for hunk in parse("@@ -1,1 +1,2 @@ title\n x\n+y\n")] == ["@@ -1,1 +1,2 @@\n x\n+y\n"]
    assert [(hunk.old_start, hunk.new_start) for hunk in parse(PATCH)] == [(2, 2), (18, 18)]


@pytest.mark.parametrize(
    "patch",
    ["a", "@@ -1,2 +1,2 @@\n 1\n", "@@ -1,1 +1,1 @@\n*1\n", "@@ -3,1 +3,1 @@\n-four\n+x\n", "@@ -40,0 +41,1 @@\n+x\n"],
    ids=["word", "counts", "sign", "fit", "place"],
)
def test_patches_that_are_wrong_or_do_not_fit(patch):
    with pytest.raises(PatchError):
        apply(OLD, patch)

import random

from semver import Range, Version, resolve


def allowed(text, *versions):
    return [version for version in versions if Version.parse(version) in Range.parse(text)]


def test_order_of_pre_releases():
    texts = [
        "2.0.0-1",
        "2.0.0-2",
        "2.0.0-11",
        "2.0.0-11.a",
        "2.0.0-11a",
        "2.0.0-b",
        "2.0.0-b.2",
        "2.0.0-b.10",
        "2.0.0-b.x",
        "2.0.0-c.1",
        "2.0.0",
    ]
    versions = [Version.parse(text) for text in texts]
    shuffled = random.Random(1).sample(versions, len(versions))
    assert [str(version) for version in sorted(shuffled)] == texts
    assert all(one < other for one, other in zip(versions, versions[1:]))
    assert all(one >= one and not one > one for one in versions)


def test_texts_of_pre_releases_stay():
    assert str(Version.parse("1.0.0-rc.10.x-1+build")) == "1.0.0-rc.10.x-1"
    assert Version.parse("1.0.0-rc.1") == Version.parse("1.0.0-rc.1+7")
    assert len({Version.parse("1.0.0-rc.1"), Version.parse("1.0.0-rc.1"), Version.parse("1.0.0-rc.a")}) == 2


def test_caret_keeps_the_first_number_that_is_not_0():
    assert allowed("^0.3.1", "0.3.0", "0.3.1", "0.3.9", "0.4.0", "1.0.0") == ["0.3.1", "0.3.9"]
    assert allowed("^0.0.5", "0.0.4", "0.0.5", "0.0.6", "0.1.0") == ["0.0.5"]
    assert allowed("^0.0.0", "0.0.0", "0.0.1") == ["0.0.0"]
    assert allowed("^2.0.1", "2.0.0", "2.0.1", "2.7.0", "3.0.0") == ["2.0.1", "2.7.0"]
    assert allowed("^0.5.0 || ^3.0.0", "0.5.7", "0.6.0", "3.1.0") == ["0.5.7", "3.1.0"]


def test_pre_releases_must_be_asked_for():
    for text in ("^1.2.0", "~1.2.0", ">=1.0.0", "*", "<2.0.0", ">1.0.0 <3.0.0"):
        assert allowed(text, "1.2.5-rc.1", "2.0.0-beta.1", "1.2.5") == ["1.2.5"]


def test_only_those_of_the_named_version():
    assert allowed(">=1.3.0-beta.2", "1.3.0-beta.1", "1.3.0-beta.11", "1.3.0", "1.4.0-alpha", "1.4.0") == [
        "1.3.0-beta.11",
        "1.3.0",
        "1.4.0",
    ]
    assert allowed("^2.1.0-a", "2.1.0-b", "2.1.1-b", "2.9.0", "3.0.0-a") == ["2.1.0-b", "2.9.0"]
    assert allowed("^0.2.0-rc.1", "0.2.0-rc.0", "0.2.0-rc.2", "0.2.4", "0.3.0-rc.1", "0.3.0") == ["0.2.0-rc.2", "0.2.4"]
    assert allowed("1.0.0-rc.1", "1.0.0-rc.1", "1.0.0-rc.2", "1.0.0") == ["1.0.0-rc.1"]
    assert allowed(">=1.0.0 <1.5.0-b", "1.5.0-a", "1.5.0-c", "1.4.0-a", "1.4.0") == ["1.5.0-a", "1.4.0"]


def test_each_set_of_comparisons_on_its_own():
    assert allowed("^1.0.0 || 2.0.0-rc.1", "1.5.0-rc.1", "2.0.0-rc.1", "2.0.0-rc.2", "1.5.0") == ["2.0.0-rc.1", "1.5.0"]
    assert allowed(">=2.0.0-x <2.0.0-y || <1.0.0", "0.9.0-x", "2.0.0-xx", "2.0.0-y") == ["2.0.0-xx"]


def test_resolving():
    index = {
        "app": {"0.9.0": {"lib": "^0.2.0"}, "1.0.0-rc.9": {"lib": "*"}, "1.0.0-rc.10": {"lib": "^0.3.0-b"}},
        "lib": {"0.2.0": {}, "0.2.11": {}, "0.2.12-a": {}, "0.3.0-b": {}, "0.4.0-a": {}},
    }
    assert resolve(index, {"app": "*"}) == {"app": "0.9.0", "lib": "0.2.11"}
    assert resolve(index, {"app": ">=1.0.0-rc.1"}) == {"app": "1.0.0-rc.10", "lib": "0.3.0-b"}

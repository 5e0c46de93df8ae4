import pytest

from semver import Conflict, Range, Version, VersionError, resolve


def allowed(text, *versions):
    return [version for version in versions if Version.parse(version) in Range.parse(text)]


def test_order_of_versions():
    texts = ["0.9.10", "1.0.0-alpha", "1.0.0-beta", "1.0.0", "1.0.1", "1.10.0"]
    assert [str(version) for version in sorted(map(Version.parse, reversed(texts)))] == texts
    assert Version.parse("1.0.0+a") == Version.parse("1.0.0+b")


def test_wrong_texts():
    for text in ("1.2", "01.2.3", "1.2.3-", "v1.2.3"):
        with pytest.raises(VersionError):
            Version.parse(text)
    with pytest.raises(VersionError):
        Range.parse("1.0.0 ||")


def test_ranges():
    assert allowed("^1.2.3", "1.2.2", "1.2.3", "1.9.0", "2.0.0") == ["1.2.3", "1.9.0"]
    assert allowed("~1.2.3", "1.2.4", "1.3.0") == ["1.2.4"]
    assert allowed(">1.0.0 <=2.0.0 || 4.0.0", "1.0.0", "1.5.0", "2.0.0", "4.0.0") == ["1.5.0", "2.0.0", "4.0.0"]
    assert allowed("*", "0.0.0", "9.0.0") == ["0.0.0", "9.0.0"]


def test_resolving_goes_back_where_it_must():
    index = {
        "app": {"1.0.0": {"a": "*", "b": "*"}},
        "a": {"1.0.0": {}, "2.0.0": {"c": "^2.0.0"}},
        "b": {"1.0.0": {"c": "^1.0.0"}},
        "c": {"1.0.0": {}, "2.0.0": {}},
    }
    assert resolve(index, {"app": "*"}) == {"a": "1.0.0", "app": "1.0.0", "b": "1.0.0", "c": "1.0.0"}
    with pytest.raises(Conflict):
        resolve(index, {"app": "*", "c": "2.0.0"})

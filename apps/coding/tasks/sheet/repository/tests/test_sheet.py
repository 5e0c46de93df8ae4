import pytest

from sheet import Error, FormulaError, Sheet


@pytest.fixture
def sheet():
    sheet = Sheet()
    for name, text in {"A1": "3", "A2": "4.5", "B1": "=(A1 + 1) * 2", "B2": "=-B1 / A2", "C1": "text"}.items():
        sheet.set(name, text)
    return sheet


def test_values(sheet):
    assert [sheet.get(name) for name in ("A1", "B1", "C1", "D9", "AA10")] == [3, 8, "text", None, None]
    assert sheet.get("B2") == pytest.approx(-8 / 4.5)


def test_only_what_depends_on_a_change_is_computed_again(sheet):
    sheet.get("B2")
    assert sheet.computed == 2
    sheet.set("A2", "2")
    assert (sheet.get("B2"), sheet.get("B1"), sheet.computed) == (-4, 8, 3)
    sheet.set("A1", "0")
    assert (sheet.get("B2"), sheet.computed) == (-1, 5)


def test_errors_are_values(sheet):
    sheet.set("D1", "=A1 / E5")
    sheet.set("D2", "=C1 + 1")
    sheet.set("D3", "=D1 + D2")
    assert [sheet.get(name) for name in ("D1", "D2", "D3")] == [Error.DIVISION, Error.VALUE, Error.DIVISION]


def test_cycles(sheet):
    sheet.set("A1", "=B1")
    assert sheet.get("B1") == Error.CYCLE
    assert sheet.get("A1") == Error.CYCLE
    sheet.set("A1", "1")
    assert sheet.get("B1") == 4


def test_formulas_that_cannot_be_read(sheet):
    for text in ("=", "=1 +", "=(1", "=A0", "=1 2", "=A1 A2", "=$"):
        with pytest.raises(FormulaError):
            sheet.set("A1", text)
    assert sheet.get("A1") == 3

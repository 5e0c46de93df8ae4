import random

import pytest

from sheet import Error, FormulaError, Sheet


def filled(**cells):
    sheet = Sheet()
    for name, text in cells.items():
        sheet.set(name, str(text))
    return sheet


def value(sheet, formula):
    sheet.set("Z99", formula)
    return sheet.get("Z99")


def test_every_function():
    sheet = filled(A1=4, A2=-2, B2=7, C9=100)
    found = {name: value(sheet, f"={name}(A1:B2)") for name in ("SUM", "MIN", "MAX", "COUNT", "AVERAGE")}
    assert found == {"SUM": 9, "MIN": -2, "MAX": 7, "COUNT": 3, "AVERAGE": 3}
    assert value(sheet, "= average( a1 : b2 )*2 - Max(B2:B2)") == -1


def test_corners_in_any_order_and_wide_columns():
    sheet = filled(Z2=1, AA2=2, AB3=4, Z3=8, Y2=16, AC3=32, Z4=64)
    for corners in ("Z2:AB3", "AB3:Z2", "Z3:AB2", "AB2:Z3"):
        assert value(sheet, f"=SUM({corners})") == 15


def test_several_arguments_and_nesting():
    sheet = filled(A1=1, A2=2, A3=3, B1="word")
    assert value(sheet, "=SUM(A1:A3, 10, A1 * 5, -A2)") == 19
    assert value(sheet, "=MAX(SUM(A1:A2), MIN(A1:A3, 0 - 4), (A3 + 1))") == 4
    assert value(sheet, "=COUNT(A1:B3, 7, C9, COUNT(A1:A3))") == 6
    assert value(sheet, "=SUM(A1:A2) * AVERAGE(A1:A3) - 1") == 5


def test_text_and_empty_cells():
    sheet = filled(A1="x", A3=6)
    assert [value(sheet, f"={name}(A1:A3)") for name in ("SUM", "MIN", "MAX", "COUNT", "AVERAGE")] == [6, 6, 6, 1, 6]
    assert value(sheet, "=SUM(A1)") == Error.VALUE
    assert value(sheet, "=MIN(A2, A3)") == 0
    assert value(sheet, "=SUM(A3:A3, A1)") == Error.VALUE


def test_without_numbers():
    sheet = filled(A1="x")
    assert [value(sheet, f"={name}(A1:B4)") for name in ("SUM", "MIN", "MAX", "COUNT")] == [0, 0, 0, 0]
    assert value(sheet, "=AVERAGE(A1:B4)") == Error.DIVISION


def test_errors_come_row_by_row():
    sheet = filled(A1=1, B1="=1/0", A2="=C9 + C8", C8="x", C7="=A2")
    assert value(sheet, "=SUM(A1:B2)") == Error.DIVISION
    assert value(sheet, "=COUNT(B2:A1)") == Error.DIVISION
    assert value(sheet, "=MAX(A2:A2, B1)") == Error.VALUE
    assert value(sheet, "=1 + AVERAGE(C7:C9)") == Error.VALUE


def test_formulas_that_cannot_be_read():
    sheet = filled(A1=1, Z99=5)
    for formula in (
        *("=A1:A2", "=1 + A1:A2", "=SUM()", "=SUM(A1:A2 + 1)", "=SUM(A1:)", "=SUM(A1:2)", "=SUM(A1,)", "=SUM(A1 A2)"),
        *("=SUM(A1:A2", "=FOO(A1)", "=SUM", "=SUM(A1:A2:A3)", "=A1(2)", "=(A1, A2)", "=SUM((A1:A2))"),
    ):
        with pytest.raises(FormulaError):
            sheet.set("Z99", formula)
        assert sheet.get("Z99") == 5


def test_changes_inside_a_range_are_seen():
    sheet = filled(A1=1, C1="=SUM(A1:B3)", D1="=C1 * 2")
    assert sheet.get("D1") == 2
    for name, text, expected in (("B3", "10", 22), ("A2", "=B3", 42), ("B3", "1", 6), ("A1", "", 4), ("B1", "word", 4)):
        sheet.set(name, text)
        assert sheet.get("D1") == expected


def test_only_dependents_are_computed_again():
    sheet = filled(A1=1, C1="=SUM(A1:B3)", C2="=COUNT(A4:B9, 1)", C3="=C1 + C2")
    assert sheet.get("C3") == 2
    assert sheet.computed == 3
    sheet.set("B2", "5")
    assert (sheet.get("C3"), sheet.computed) == (7, 5)
    sheet.set("E5", "5")
    assert (sheet.get("C3"), sheet.computed) == (7, 5)
    sheet.set("C1", "=1")
    sheet.set("B2", "6")
    assert (sheet.get("C3"), sheet.computed) == (2, 7)
    sheet.set("A1", "9")
    assert (sheet.get("C3"), sheet.computed) == (2, 7)


def test_cycles_through_ranges():
    sheet = filled(A1=1, A2="=SUM(A1:A3)", B1="=MAX(B2:C3)", C3="=COUNT(B1:B1)")
    assert sheet.get("A2") == Error.CYCLE
    assert sheet.get("B1") == Error.CYCLE
    sheet.set("C3", "4")
    sheet.set("A2", "=SUM(A1:A1, A3:A4)")
    assert (sheet.get("A2"), sheet.get("B1")) == (1, 4)


def test_random_ranges():
    source = random.Random(5)
    numbers = {
        (column, row): source.randrange(-9, 10)
        for column in range(1, 6)
        for row in range(1, 6)
        if source.random() < 0.7
    }
    sheet = filled(**{f"{'ABCDE'[column - 1]}{row}": number for (column, row), number in numbers.items()})
    for _ in range(150):
        columns, rows = [source.randint(1, 5) for _ in range(2)], [source.randint(1, 5) for _ in range(2)]
        corners = ":".join(f"{'ABCDE'[column - 1]}{row}" for column, row in zip(columns, rows))
        inside = [
            n for (c, r), n in numbers.items() if min(columns) <= c <= max(columns) and min(rows) <= r <= max(rows)
        ]
        assert value(sheet, f"=SUM({corners})") == sum(inside)
        assert value(sheet, f"=MIN({corners}) + 100 * COUNT({corners})") == min(inside, default=0) + 100 * len(inside)

import random
import sqlite3

import pytest

from querysmith import Select, col

ROWS = [(a, b, None if (a + b) % 3 == 0 else a * b) for a in range(4) for b in range(4)]


@pytest.fixture(scope="module")
def rows():
    """Runs a query and returns its rows."""
    base = sqlite3.connect(":memory:")
    base.execute("CREATE TABLE t (a, b, c)")
    base.executemany("INSERT INTO t VALUES (?, ?, ?)", ROWS)
    base.execute("CREATE TABLE u (a, name)")
    base.executemany("INSERT INTO u VALUES (?, ?)", [(1, "one"), (2, "two"), (3, "two")])
    yield lambda query: base.execute(*query.sql()).fetchall()
    base.close()


def where(condition):
    return Select("t").where(condition).sql()[0].partition(" WHERE ")[2]


def test_or_inside_and(rows):
    condition = (col("a") == 1) & ((col("b") == 2) | (col("b") == 3))
    assert rows(Select("t", "a", "b").where(condition)) == [(1, 2), (1, 3)]
    condition = ((col("b") == 2) | (col("b") == 3)) & (col("a") == 1)
    assert rows(Select("t", "a", "b").where(condition)) == [(1, 2), (1, 3)]
    assert rows(Select("t", "a", "b").where((col("b") == 2) | (col("b") == 3)).where(col("a") == 1)) == [(1, 2), (1, 3)]


def test_not_of_combinations(rows):
    assert len(rows(Select("t").where(~((col("a") == 1) | (col("b") == 1))))) == 9
    assert len(rows(Select("t").where(~((col("a") == 1) & (col("b") == 1))))) == 15
    assert len(rows(Select("t").where(~((col("a") == 1) & (col("b") == 1)) & (col("a") == 1)))) == 3


def test_no_needless_parentheses():
    a, b, c = col("a") == 1, col("b") == 2, col("c") == 3
    assert where(a & b & c) == where(a & (b & c)) == "a = ? AND b = ? AND c = ?"
    assert where(a | b | c) == where(a | (b | c)) == "a = ? OR b = ? OR c = ?"
    assert where((a & b) | c) == "a = ? AND b = ? OR c = ?"
    assert where(a & (b | c)) == "a = ? AND (b = ? OR c = ?)"
    assert where(~a & b) == "NOT a = ? AND b = ?"


def test_parameters_of_joins_come_first(rows):
    on = (col("t.a") == col("u.a")) & (col("u.name") == "two")
    query = Select("t", "t.a", "t.b").join("u", on).where(col("b") >= 2).order_by("t.a", "-b").limit(3)
    assert query.sql()[1] == ["two", 2, 3]
    assert rows(query) == [(2, 3), (2, 2), (3, 3)]
    early = Select("t").where(col("b") == 7).join("u", col("u.name") == "x").left_join("v", col("v.z") == 5)
    assert early.sql()[1] == ["x", 5, 7]


def test_null(rows):
    assert where(col("c") == None) == "c IS NULL"
    assert where(col("c") != None) == "c IS NOT NULL"
    assert Select("t").where(col("c") == None).sql()[1] == []
    assert len(rows(Select("t").where((col("c") != None) & (col("a") > 0)))) == sum(
        c is not None and a > 0 for a, _, c in ROWS
    )


def test_in_nothing(rows):
    assert where(col("a").in_(())) == "1 = 0"
    assert rows(Select("t").where(col("a").in_([]))) == []
    assert len(rows(Select("t").where(~col("a").in_(value for value in ())))) == 16
    assert len(rows(Select("t").where(col("a").in_([]) | (col("b") == 0)))) == 4


def test_random_conditions(rows):
    source = random.Random(13)

    def make(depth):
        """A condition, and the same one as a function of a and b."""
        if depth == 0:
            name, value = source.choice("ab"), source.randrange(4)
            return col(name) <= value, lambda row: row["ab".index(name)] <= value
        (one, is_one), (other, is_other) = make(depth - 1), make(source.randrange(depth))
        kind = source.randrange(3)
        if kind == 0:
            return one & other, lambda row: is_one(row) and is_other(row)
        if kind == 1:
            return one | other, lambda row: is_one(row) or is_other(row)
        return ~one, lambda row: not is_one(row)

    for _ in range(200):
        condition, holds = make(4)
        assert rows(Select("t").where(condition)) == [row for row in ROWS if holds(row)], condition.text

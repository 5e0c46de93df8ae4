import pytest

from querysmith import Select, col


def test_a_plain_query():
    query = Select("books", "title", "year").where(col("year") > 1990).order_by("-year", "title").limit(5)
    assert query.sql() == ("SELECT title, year FROM books WHERE year > ? ORDER BY year DESC, title LIMIT ?", [1990, 5])


def test_conditions():
    condition = (col("a") == 1) & (col("b") != 2) & col("c").like("x%")
    assert Select("t").where(condition).sql() == ("SELECT * FROM t WHERE a = ? AND b <> ? AND c LIKE ?", [1, 2, "x%"])
    assert Select("t").where(~col("a").in_([1, 2])).sql() == ("SELECT * FROM t WHERE NOT a IN (?, ?)", [1, 2])
    assert Select("t").where(col("a") <= 1).where(col("b") >= 2).sql()[1] == [1, 2]


def test_joins():
    query = Select("a", "a.x").join("b", col("a.id") == col("b.id")).left_join("c", col("c.id") < col("b.id"))
    assert query.sql() == ("SELECT a.x FROM a JOIN b ON a.id = b.id LEFT JOIN c ON c.id < b.id", [])


def test_queries_do_not_change():
    query = Select("t")
    query.where(col("a") == 1).limit(2)
    assert query.sql() == ("SELECT * FROM t", [])


def test_mistakes():
    for name in ("a b", "a;", "", "a.b.c"):
        with pytest.raises(ValueError, match="not a name"):
            col(name)
    with pytest.raises(TypeError):
        bool(col("a") == 1)

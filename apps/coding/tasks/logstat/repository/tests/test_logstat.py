import json

import pytest

from logstat import percentile, read, report
from logstat.__main__ import main

LINES = """\
2024-05-01T10:00:00 GET /a?x=1 200 10
2024-05-01T10:00:01 GET /b 404 30

2024-05-01T10:00:02 POST /a 201 20
""".splitlines()


def test_lines_become_entries():
    entries, unreadable = read([*LINES, "no request", "2024-05-01T10:00:02 GET / 999 1"])
    assert [(entry.path, entry.status) for entry in entries] == [("/a", 200), ("/b", 404), ("/a", 201)]
    assert unreadable == [5, 6]


def test_report():
    result = report(read(LINES)[0])
    assert result.requests == 3
    assert result.statuses == {"2xx": 2, "4xx": 1}
    assert result.paths == [("/a", 2), ("/b", 1)]


def test_percentiles_of_eleven_values():
    values = list(range(100, 0, -9))[:11]
    assert percentile(values, 50) == sorted(values)[5]
    assert percentile(values, 100) == max(values)


def test_percentiles_need_values():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percentage"):
        percentile([1], 0)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "access.log"
    file.write_text("\n".join(LINES))
    assert main([str(file), "--json", "--top", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["paths"] == [["/a", 2]]
    file.write_text("broken\n")
    assert main([str(file)]) == 1
    assert main([str(tmp_path / "none")]) == 2

"""A line chart as an SVG file: a few curves over one axis of steps, the other one from 0 to 1 or logarithmic."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 220, 40, 50
COLORS = ("#1b6ca8", "#2a9d5c", "#8a5fbf", "#d1495b", "#e08e1b", "#555555")

Points = Sequence[tuple[float, float]]


def line_chart(curves: Mapping[str, Points], *, title: str, x_label: str, y_label: str, floor: float | None) -> str:
    """The curves by name, on decades from `floor` up, on which lies what is below it; without a floor, shares of 1."""
    last = max(x for points in curves.values() for x, _ in points)
    if floor is None:
        marks = [(quarter / 4, f"{quarter / 4:.2f}") for quarter in range(5)]
    else:
        highest = max(y for points in curves.values() for _, y in points)
        decades = range(math.floor(math.log10(floor)), math.ceil(math.log10(max(highest, 10 * floor))) + 1)
        marks = [(10.0**decade, f"{10.0**decade:.{max(-decade, 0)}f}") for decade in decades]

    def across(x: float) -> float:
        return LEFT + x / last * (WIDTH - LEFT - RIGHT)

    def height(y: float) -> float:
        return y if floor is None else math.log10(max(y, floor))

    lowest, top = height(marks[0][0]), height(marks[-1][0])

    def down(y: float) -> float:
        share = (height(y) - lowest) / (top - lowest)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 18, title, size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"),
        _text(LEFT, TOP - 4, y_label),
    ]
    for value, label in marks:
        y = down(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, label, anchor="end"))
    for quarter in range(5):
        x = last * quarter / 4
        parts.append(_text(across(x), HEIGHT - BOTTOM + 16, f"{x:.0f}", anchor="middle"))
    for number, (name, points) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
        y = TOP + 10 + 18 * number
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 32}" y1="{y}" y2="{y}" stroke="{color}" '
            'stroke-width="3"/>'
        )
        parts.append(_text(WIDTH - RIGHT + 38, y + 4, name))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'

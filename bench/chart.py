"""A line chart as SVG text: curves by name over one axis of steps. Needs matplotlib, which the `dev` extra installs."""

from collections.abc import Mapping, Sequence
from io import StringIO

Points = Sequence[tuple[float, float]]


def line_chart(curves: Mapping[str, Points], *, title: str, x_label: str, y_label: str, floor: float | None) -> str:
    """The curves on a logarithmic axis that begins at `floor`, or without one on an axis from 0 to 1.

    The same curves give the same text.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=name)
        if floor is None:
            axes.set_ylim(0, 1)
        else:
            axes.set_yscale("log")
            axes.set_ylim(bottom=floor)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.grid(axis="y", alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()

"""The report's plots of scores across ranges."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eval.figures import BLUE, GREY, ORANGE, save
from rbd_train.metrics import Rate
from rbd_train.run import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def contrast_figures(tables: Sequence[Table]) -> dict[str, dict[str, bytes]]:
    """Draw the sweep over lambda / t, the correlation by range, and the scores given before and after."""
    found = {table.name: table for table in tables}
    draws = {"contrast_curve": _curve, "contrast_ranges": _by_range, "contrast_histogram": _histograms}
    return {name: draw(found[name]) for name, draw in draws.items() if name in found}


def _curve(table: Table) -> dict[str, bytes]:
    figure, axes = _axes(2, table.title)
    ratios = [row[0] for row in table.rows]
    for k, (name, colour) in enumerate((("Spearman", BLUE), ("disagreement", ORANGE)), start=1):
        _errors(axes[k - 1], ratios, [row[k] for row in table.rows], name, colour, "-o")
        axes[k - 1].set_xlabel("lambda / t")
        axes[k - 1].set_title(name, loc="left")
    for k in range(3, len(table.columns)):
        axes[0].plot(ratios, [_number(row[k]) for row in table.rows], color=GREY, linewidth=0.8, alpha=0.6)
    return save(figure)


def _by_range(table: Table) -> dict[str, bytes]:
    last = [row for row in table.rows if row[1] == "all"] or list(table.rows)
    figure, (axes,) = _axes(1, table.title)
    colours = (GREY, "#0f766e", BLUE, ORANGE)
    for k, (name, colour) in enumerate(zip(table.columns[2:], colours, strict=True)):
        _errors(
            axes, [place + (k - 1.5) * 0.12 for place in range(len(last))], [row[k + 2] for row in last], name, colour
        )
    axes.set_xticks(range(len(last)), [str(row[0]) for row in last])
    axes.legend(frameon=False, fontsize=8)
    return save(figure)


def _histograms(table: Table) -> dict[str, bytes]:
    spans = list(dict.fromkeys(row[0] for row in table.rows))
    figure, every = _axes(len(spans), table.title)
    for axes, span in zip(every, spans, strict=True):
        for k, (name, colour) in enumerate(zip(dict.fromkeys(row[1] for row in table.rows), (GREY, BLUE), strict=True)):
            part = [row for row in table.rows if row[:2] == (span, name)]
            places = [(_number(row[2]) or 0) + (k - 0.5) * 0.4 for row in part]
            axes.bar(places, [_number(row[3]) or 0 for row in part], 0.4, color=colour, label=str(name))
        axes.set_title(str(span), loc="left")
        axes.set_ylim(0, 1.05)
    every[0].legend(frameon=False, fontsize=7)
    return save(figure)


def _axes(count: int, title: str) -> "tuple[Figure, list[Any]]":
    """Make axes side by side under the table's title, which names the mode and the setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.2, 2.2 * count), 3.4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _errors(axes: Any, places: Sequence[Any], cells: Sequence[Any], name: str, colour: str, form: str = "o") -> None:
    known = [(x, c.value, c) for x, c in zip(places, cells, strict=True) if isinstance(c, Rate) and c.value is not None]
    below = [value - (c.low if c.low is not None else value) for _, value, c in known]
    above = [(c.high if c.high is not None else value) - value for _, value, c in known]
    axes.errorbar([x for x, _, _ in known], [value for _, value, _ in known], yerr=[below, above], fmt=form,
                  color=colour, label=name, capsize=2, elinewidth=0.8, markersize=4)  # fmt: skip


def _number(cell: Any) -> float | None:
    return float(cell) if isinstance(cell, int | float) else None

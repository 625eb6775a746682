"""The report's plots, as SVG and PNG: accuracy before and after, F1 by bias, scores across ranges."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rbd_train.metrics import Rate
from rbd_train.run import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#64748b"


def accuracy_figure(summary: Mapping[str, Rate]) -> dict[str, bytes] | None:
    """Draw the judge's accuracy on D_bias per bias, before and after; None without the figures."""
    return _bars(
        summary, {"before": "debias.accuracy_before", "after": "debias.accuracy_after"}, (GREY, BLUE),
        "Accuracy on D_bias",
    )  # fmt: skip


def detection_figure(summary: Mapping[str, Rate]) -> dict[str, bytes] | None:
    """Draw F1 per bias, the best content-blind rule beside the detector; None without the figures."""
    return _bars(
        summary, {"best rule": "detection.rule_f1", "detector": "detection.f1"}, (ORANGE, BLUE), "F1 of detection"
    )


def contrast_figures(tables: Sequence[Table]) -> dict[str, dict[str, bytes]]:
    """Draw the sweep over lambda / t, the correlation by range, and the scores given before and after."""
    found = {table.name: table for table in tables}
    draws = {"contrast_curve": _curve, "contrast_ranges": _by_range, "contrast_histogram": _histograms}
    return {name: draw(found[name]) for name, draw in draws.items() if name in found}


def _curve(table: Table) -> dict[str, bytes]:
    figure, axes = _axes(2)
    ratios = [row[0] for row in table.rows]
    for k, (name, colour) in enumerate((("Spearman", BLUE), ("disagreement", ORANGE)), start=1):
        _errors(axes[k - 1], ratios, [row[k] for row in table.rows], name, colour, "-o")
        axes[k - 1].set_xlabel("lambda / t")
        axes[k - 1].set_title(name, loc="left")
    for k in range(3, len(table.columns)):
        axes[0].plot(ratios, [_number(row[k]) for row in table.rows], color=GREY, linewidth=0.8, alpha=0.6)
    return _save(figure)


def _by_range(table: Table) -> dict[str, bytes]:
    last = [row for row in table.rows if row[1] == "all"] or list(table.rows)
    figure, (axes,) = _axes(1)
    colours = (GREY, "#0f766e", BLUE, ORANGE)
    for k, (name, colour) in enumerate(zip(table.columns[2:], colours, strict=True)):
        _errors(
            axes, [place + (k - 1.5) * 0.12 for place in range(len(last))], [row[k + 2] for row in last], name, colour
        )
    axes.set_xticks(range(len(last)), [str(row[0]) for row in last])
    axes.set_title("Spearman by range", loc="left")
    axes.legend(frameon=False, fontsize=8)
    return _save(figure)


def _histograms(table: Table) -> dict[str, bytes]:
    spans = list(dict.fromkeys(row[0] for row in table.rows))
    figure, every = _axes(len(spans))
    for axes, span in zip(every, spans, strict=True):
        for k, (name, colour) in enumerate(zip(dict.fromkeys(row[1] for row in table.rows), (GREY, BLUE), strict=True)):
            part = [row for row in table.rows if row[:2] == (span, name)]
            places = [(_number(row[2]) or 0) + (k - 0.5) * 0.4 for row in part]
            axes.bar(places, [_number(row[3]) or 0 for row in part], 0.4, color=colour, label=str(name))
        axes.set_title(str(span), loc="left")
        axes.set_ylim(0, 1.05)
    every[0].legend(frameon=False, fontsize=7)
    return _save(figure)


def _axes(count: int) -> "tuple[Figure, list[Any]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.2, 2.2 * count), 3.2), layout="constrained")
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


def _bars(
    summary: Mapping[str, Rate], series: Mapping[str, str], colours: Sequence[str], title: str
) -> dict[str, bytes] | None:
    first = next(iter(series.values()))
    biases = sorted(key.removeprefix(f"{first}.") for key in summary if key.startswith(f"{first}."))
    if not biases:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(series)
    for k, ((name, prefix), colour) in enumerate(zip(series.items(), colours, strict=True)):
        rates = [summary.get(f"{prefix}.{bias}", Rate(value=None, n=0)) for bias in biases]
        places = [i + (k - (len(series) - 1) / 2) * width for i in range(len(biases))]
        values = [rate.value or 0.0 for rate in rates]
        below = [
            value - (rate.low if rate.low is not None else value) for value, rate in zip(values, rates, strict=True)
        ]
        above = [
            (rate.high if rate.high is not None else value) - value for value, rate in zip(values, rates, strict=True)
        ]
        axes.bar(places, values, width * 0.92, label=name, color=colour)
        axes.errorbar(places, values, yerr=[[max(0, b) for b in below], [max(0, a) for a in above]], fmt="none",
                      ecolor="#111827", elinewidth=1, capsize=3)  # fmt: skip
        for place, rate in zip(places, rates, strict=True):
            if rate.value is None:
                axes.text(place, 0.02, "undefined", rotation=90, ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(biases)), biases)
    axes.set_ylim(0, 1.05)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(series), loc="lower right", bbox_to_anchor=(1, 1))
    return _save(figure)


def _save(figure: "Figure") -> dict[str, bytes]:
    import matplotlib

    drawn = {}
    with matplotlib.rc_context({"svg.hashsalt": "rbd_train"}):  # same figures, same bytes
        for suffix in ("svg", "png"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            drawn[suffix] = buffer.getvalue()
    return drawn

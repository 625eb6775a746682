"""The report's plots, as SVG and PNG."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.discovery_layouts import size_in
from eval.layouts import Told
from rbd_train.metrics import Rate
from rbd_train.run import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#64748b"


def accuracy_figure(runs: Mapping[str, Told]) -> dict[str, bytes] | None:
    """Draw each run's judge's accuracy on D_bias per bias, before and after; None without the figures."""
    panels = {}
    for name, run in runs.items():
        judge = run.manifests.get("debias", {}).get("facts", {}).get("judge", "the judge")
        panels[f"Accuracy on D_bias: {judge}" + (f" ({name})" if len(runs) > 1 else "")] = run.summary
    return _bars(panels, {"before": "debias.accuracy_before", "after": "debias.accuracy_after"}, (GREY, BLUE))


def detection_figure(summary: Mapping[str, Rate]) -> dict[str, bytes] | None:
    """Draw F1 per bias, the best content-blind rule beside the detector; None without the figures."""
    return _bars(
        {"F1 of detection": summary}, {"best rule": "detection.rule_f1", "detector": "detection.f1"}, (ORANGE, BLUE)
    )


def draw(ours: Told, runs: Mapping[str, Told]) -> dict[str, dict[str, bytes]]:
    """Draw every plot that the figures allow, by name."""
    drawn = {
        "accuracy": accuracy_figure(runs or {"": ours}), "detection": detection_figure(ours.summary),
        "rounds": rounds_figure(ours.summary), "calibration": calibration_figure(ours.tables),
        "scaling": scaling_figure(runs), "cost": cost_figure(runs),
    }  # fmt: skip
    return {name: figure for name, figure in drawn.items() if figure is not None}


def rounds_figure(summary: Mapping[str, Rate]) -> dict[str, bytes] | None:
    """Draw accuracy on D_bias after each round."""
    points = [(k, rate) for k in range(100) if (rate := summary.get(f"debias.round.{k}"))]
    return _line(points, "Accuracy on D_bias by round", "round") if len(points) > 1 else None


def scaling_figure(runs: Mapping[str, Told]) -> dict[str, bytes] | None:
    """Draw macro F1 over the detectors' sizes; None where fewer than two runs name one."""
    points = []
    for run in runs.values():
        size = size_in(run.detector)
        if size != "–" and "detection.f1" in run.summary:
            points.append((float(size[:-1]) * (1000 if size.endswith("B") else 1), run.summary["detection.f1"]))
    return (
        _line(sorted(points, key=lambda p: p[0]), "Macro F1 by size", "million parameters") if len(points) > 1 else None
    )


def cost_figure(runs: Mapping[str, Told]) -> dict[str, bytes] | None:
    """Draw the gain in accuracy against the calls that it took; None with fewer than two runs that have both."""
    points = [
        (run.summary["debias.calls"].value or 0.0, run.summary["debias.gain"])
        for run in runs.values() if {"debias.calls", "debias.gain"} <= set(run.summary)
    ]  # fmt: skip
    return _line(sorted(points, key=lambda p: p[0]), "Gain in accuracy by cost", "calls") if len(points) > 1 else None


def calibration_figure(tables: Mapping[str, Table]) -> dict[str, bytes] | None:
    """Draw how often Yes was true by P(yes), and what each threshold finds, per detector."""
    if "detection_reliability" not in tables or "detection_curve" not in tables:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    reliable, roc, recall = figure.subplots(1, 3)
    for k, name in enumerate(dict.fromkeys(row[0] for row in tables["detection_reliability"].rows)):
        colour = (BLUE, ORANGE, GREY)[k % 3]
        bars = [row for row in tables["detection_reliability"].rows if row[0] == name]
        curve = [row for row in tables["detection_curve"].rows if row[0] == name]
        reliable.plot([row[1] for row in bars], [getattr(row[3], "value", None) for row in bars], "o-", color=colour,
                      label=str(name))  # fmt: skip
        known = [row for row in curve if row[2] is not None and row[3] is not None]
        roc.plot([0, *(row[3] for row in known)], [0, *(row[2] for row in known)], color=colour)
        recall.plot([row[2] for row in known], [row[4] for row in known], color=colour)
    for axes, title, words in zip(
        (reliable, roc, recall), ("Reliability", "ROC", "Precision and recall"),
        (("P(yes)", "truly Yes"), ("false alarms", "found"), ("recall", "precision")), strict=True,
    ):  # fmt: skip
        axes.set(title=title, xlabel=words[0], ylabel=words[1], xlim=(0, 1.02), ylim=(0, 1.05))
        axes.spines[["top", "right"]].set_visible(False)
    reliable.plot([0, 1], [0, 1], ":", color=GREY)
    reliable.legend(frameon=False, fontsize=8)
    return save(figure)


def _line(points: Sequence[tuple[float, Rate]], title: str, across: str) -> dict[str, bytes]:
    """Draw rates with their intervals over a quantity; an undefined one is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for x, rate in points:
        if rate.value is not None and rate.low is not None and rate.high is not None:
            axes.plot([x, x], [rate.low, rate.high], color=GREY, linewidth=1)
    known = [(x, rate.value) for x, rate in points if rate.value is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], "o-", color=BLUE)
    axes.set_title(title, loc="left")
    axes.set_xlabel(across)
    axes.spines[["top", "right"]].set_visible(False)
    return save(figure)


def _bars(
    panels: Mapping[str, Mapping[str, Rate]], series: Mapping[str, str], colours: Sequence[str]
) -> dict[str, bytes] | None:
    """Draw one panel of bars per title and summary, a group per bias; a summary without the figures has none."""
    first = next(iter(series.values()))
    biases = {
        title: sorted(key.removeprefix(f"{first}.") for key in summary if key.startswith(f"{first}."))
        for title, summary in panels.items()
    }
    drawn = [title for title, names in biases.items() if names]
    if not drawn:
        return None
    from matplotlib.figure import Figure

    wide = min(2, len(drawn))
    high = -(-len(drawn) // wide)
    figure = Figure(figsize=((7.2, 12.6)[wide - 1], 3.2 * high), layout="constrained")
    grid = list(figure.subplots(high, wide, squeeze=False).flat)
    for title, axes in zip(drawn, grid, strict=False):
        for k, (name, prefix) in enumerate(series.items()):
            rates = [panels[title].get(f"{prefix}.{bias}", Rate(value=None, n=0)) for bias in biases[title]]
            _bar(axes, rates, name, colours[k], k - (len(series) - 1) / 2, 0.8 / len(series))
        axes.set_xticks(range(len(biases[title])), biases[title])
        axes.set_ylim(0, 1.05)
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=len(series), loc="lower right", bbox_to_anchor=(1, 1))
    for axes in grid[len(drawn) :]:
        axes.set_visible(False)
    return save(figure)


def _bar(axes: Any, rates: Sequence[Rate], name: str, colour: str, shift: float, width: float) -> None:
    """Draw one series of a panel, with its intervals; an undefined rate is said, not drawn as 0."""
    places = [i + shift * width for i in range(len(rates))]
    values = [rate.value or 0.0 for rate in rates]
    below = [value - (rate.low if rate.low is not None else value) for value, rate in zip(values, rates, strict=True)]
    above = [(rate.high if rate.high is not None else value) - value for value, rate in zip(values, rates, strict=True)]
    axes.bar(places, values, width * 0.92, label=name, color=colour)
    axes.errorbar(places, values, yerr=[[max(0, b) for b in below], [max(0, a) for a in above]], fmt="none",
                  ecolor="#111827", elinewidth=1, capsize=3)  # fmt: skip
    for place, rate in zip(places, rates, strict=True):
        if rate.value is None:
            axes.text(place, 0.02, "undefined", rotation=90, ha="center", va="bottom", fontsize=8)


def save(figure: "Figure") -> dict[str, bytes]:
    """Write a plot as SVG and PNG."""
    import matplotlib

    drawn = {}
    with matplotlib.rc_context({"svg.hashsalt": "rbd_train"}):  # same figures, same bytes
        for suffix in ("svg", "png"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            drawn[suffix] = buffer.getvalue()
    return drawn

"""The report's plots, as SVG and PNG: accuracy before and after, F1 by bias."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rbd_train.metrics import Rate

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

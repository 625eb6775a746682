"""A simulation: both models lean to a number with different strengths; what contrast and its cheap rivals recover.

    python benchmarks/range_bias.py [quick]

Everything is planted and declared. A text has a quality; the main model's log-probability of a score falls with its
distance from where the quality puts it in the range, and gains a lean to the number 4, whatever the range. The
assistant sees less of the quality, has noise of its own, and leans with another strength. Equal strengths at
lambda / t = 1 cancel by algebra and show nothing. Where the lean is the same for all texts, the range's prior holds all
of it; in the last scene it differs from text to text. Writes range_bias.csv and range_bias.svg to benchmarks/out.
"""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rbd_train.contrast import MAIN_ALONE, Setting, calibration, decide, prior_of, without_prior
from rbd_train.correlation import correlations, disagreement
from rbd_train.records import Position, Readings, ScoreRow, Step

RANGES = ((0, 4), (1, 5), (2, 6), (3, 7))
LEAN, FAVOURITE = 3.0, 4  # nats that the main model adds to the number
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # the assistant's lean, as a share of the main model's
# what the assistant sees of the quality; how far the lean differs from text to text (lognormal, the same for both)
SCENES = ((0.0, 0.0), (0.3, 0.0), (0.8, 0.0), (0.3, 0.7))
METHODS = ("main", "contrast 0.5", "contrast 1.0", "contrast chosen", "prior subtracted", "calibrated")


def readings(low: int, high: int, centre: float, sharp: float, lean: float, noise: np.ndarray) -> Readings:
    """Make one model's log-probabilities of a range's scores."""
    numbers = np.arange(low, high + 1)
    values = -sharp * (numbers - low - centre) ** 2 + lean * (numbers == FAVOURITE) + noise
    values -= np.logaddexp.reduce(values)
    return Readings(
        choices=tuple((Step(position=0, logprob=float(v)),) for v in values),
        positions=(Position(best=float(values.max())),), top={"x": 0.0},
    )  # fmt: skip


def rows(
    generator: np.random.Generator, quality: np.ndarray, share: float, signal: float, spread: float
) -> list[list[ScoreRow]]:
    """Make the rows of every range; noise belongs to the text and the score's place, and to each model."""
    found = []
    noise = generator.normal(0, 0.5, (2, len(quality), 5))
    shift = generator.normal(0, 0.6, (2, len(quality)))  # each model's own misreading of a text
    leans = LEAN * np.exp(generator.normal(0, spread, len(quality)))
    for low, high in RANGES:
        part = []
        for k, q in enumerate(quality):
            main = readings(low, high, 2 + q + shift[0, k], 0.35, leans[k], noise[0, k])
            assistant = readings(
                low, high, 2 + signal * q + shift[1, k], 0.35 * max(signal, 0.2), leans[k] * share, noise[1, k]
            )
            part.append(
                ScoreRow(item_id=str(k), group=str(k % 20), dimension="d", low=low, high=high, human=float(q),
                         scores=tuple(range(low, high + 1)), temperatures=(1.0,), main=main, assistant=assistant)
            )  # fmt: skip
        found.append(part)
    return found


def measure(
    seed: int, share: float, scene: tuple[float, float], texts: int
) -> dict[str, tuple[float | None, float | None]]:
    """Return, per method, the mean Spearman over ranges and the disagreement of ranges, on the texts not chosen on."""
    generator = np.random.default_rng(seed)
    quality = generator.normal(0, 1, texts)
    given = rows(generator, quality, share, *scene)
    empty = rows(generator, np.zeros(3), share, *scene)  # content-free: no quality, noise of its own
    dev = texts // 5

    def every(decision: Callable[[int, ScoreRow], float | None]) -> list[list[float | None]]:
        return [[decision(k, row) for row in part] for k, part in enumerate(given)]

    def contrast(ratio: float) -> list[list[float | None]]:
        return every(lambda k, row: decide(row, Setting(strength=ratio)).expected)

    def spearman(scores: list[list[float | None]], part: slice) -> float | None:
        known = [correlations(s[part], list(quality[part])).spearman for s in scores]
        defined = [value for value in known if value is not None]
        return float(np.mean(defined)) if defined else None

    main = every(lambda k, row: decide(row, MAIN_ALONE).expected)
    priors = [prior_of(part) for part in empty]
    ratios = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
    best = max(ratios, key=lambda r: spearman(contrast(r), slice(0, dev)) or -1.0)
    fits = [calibration([s or 0.0 for s in scores[:dev]], [float(q) + 2 for q in quality[:dev]]) for scores in main]
    said = {
        "main": main, "contrast 0.5": contrast(0.5), "contrast 1.0": contrast(1.0), "contrast chosen": contrast(best),
        "prior subtracted": every(lambda k, row: without_prior(row, priors[k]).expected),
        "calibrated": [
            [low + min(max(slope * (s or 0.0) + cut, 0.0), 4.0) for s in scores]
            for (low, _), scores, (slope, cut) in zip(RANGES, main, fits, strict=True)
        ],
    }  # fmt: skip
    rest = slice(dev, None)
    groups = [str(k) for k in range(texts)][rest]
    return {
        name: (spearman(scores, rest), disagreement(
            {span: s[rest] for span, s in zip(RANGES, scores, strict=True)}, groups).value)
        for name, scores in said.items()
    }  # fmt: skip


def draw(table: list[dict[str, float | str]], path: Path) -> None:
    """Plot both measures against the assistant's strength, a column per scene; bands are 95 % over replications."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.4), layout="constrained")
    axes = figure.subplots(2, len(SCENES), sharex=True, sharey="row")
    for column, (signal, spread) in enumerate(SCENES):
        for line, measured in enumerate(("spearman", "disagreement")):
            for method in METHODS:
                part = [r for r in table if (r["signal"], r["spread"], r["method"]) == (signal, spread, method)]
                x = [float(r["share"]) for r in part]
                low, mid, high = ([float(r[f"{measured}{end}"]) for r in part] for end in ("_low", "", "_high"))
                axes[line][column].plot(x, mid, "-o", markersize=3, label=method)
                axes[line][column].fill_between(x, low, high, alpha=0.15)
            told = f"{measured}; assistant sees {signal:g} of the quality" + f"; lean varies by {spread:g}" * bool(
                spread
            )
            axes[line][column].set_title(told, loc="left", fontsize=8)
        axes[1][column].set_xlabel("assistant's lean / main model's lean")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    quick = "quick" in sys.argv[1:]
    runs, texts = (2, 40) if quick else (20, 200)
    shares = (0.0, 0.5, 1.0) if quick else STRENGTHS
    table: list[dict[str, float | str]] = []
    for scene in SCENES:
        for share in shares:
            found = [measure(seed, share, scene, texts) for seed in range(runs)]
            for method in METHODS:
                row: dict[str, float | str] = {"signal": scene[0], "spread": scene[1], "share": share, "method": method}
                for k, name in enumerate(("spearman", "disagreement")):
                    values = np.asarray([f[method][k] for f in found if f[method][k] is not None], dtype=float)
                    drawn = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
                    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
                    row |= {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
                table.append(row)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    with (out / "range_bias.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    draw(table, out / "range_bias.svg")
    for row in table:
        print(
            f"signal {row['signal']:<4} spread {row['spread']:<4} lean {row['share']:<5} {row['method']:<17} "
            f"Spearman {row['spearman']:.3f} [{row['spearman_low']:.3f}, {row['spearman_high']:.3f}]  "
            f"disagreement {row['disagreement']:.3f} [{row['disagreement_low']:.3f}, {row['disagreement_high']:.3f}]"
        )
    pick = {(r["method"], r["share"]): r for r in table if (r["signal"], r["spread"]) == (0.3, 0.7)}
    ours, theirs = (float(pick[name, 0.5]["disagreement"]) for name in ("contrast 1.0", "prior subtracted"))
    print(
        json.dumps(
            {"name": "range_bias", "ratio": theirs / ours, "ours": ours, "theirs": theirs, "unit": "disagreement",
             "rival": "prior subtraction; assistant's lean half the main model's, signal 0.3, spread 0.7", "runs": runs}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()

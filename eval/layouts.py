"""Tables laid out as the papers lay theirs out, the published number beside ours: one function per layout.

A layout takes the runs, each with its figures and tables, and returns tables. Add one by adding a function to LAYOUTS.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eval.discovery_layouts import biasscope_main, judgebench_pro, size_in
from rbd_train.metrics import Rate, holm
from rbd_train.run import Cell, Table


class Told(NamedTuple):
    """One run as a report sees it: its figures, its tables by name, its stages' manifests, its detector's model."""

    summary: Mapping[str, Rate]
    tables: Mapping[str, Table]
    manifests: Mapping[str, Mapping[str, Any]]
    detector: str = ""


# arXiv 2505.17100; only the abstract's figures are checked, the others come from third-party notes
GAIN = {"verbosity": 0.221, "position": 0.158, "bandwagon": 0.164, "sentiment": 0.197}
CONSISTENCY = {"verbosity": 0.143, "position": 0.092, "bandwagon": 0.087, "sentiment": 0.114}
SIZES = {"1.5B": (0.72, 0.123), "7B": (0.79, 0.161), "8B": (0.81, 0.185), "14B": (0.83, 0.198)}
LOW = "low: third-party notes"
ABSTRACT, MEASURED = "high: the abstract", "high: measured on the published test set"
# what the paper's judges gain in accuracy (RBD-8B, mean over biases and judges), and who detects how well
GAINS = {
    "the loop": (0.185, ABSTRACT), "zero-shot prompt": (0.032, LOW), "4-shot prompt with reasoning": (0.057, LOW),
    "fine-tuned judges": (0.013, LOW), "DeepSeek-R1, zero-shot": (0.086, LOW),
}  # fmt: skip
LEADS = {"prompting": 0.128, "fine-tuned judges": 0.172}
R1_F1 = {"all": 0.822, "verbosity": 0.964, "position": 0.846, "sentiment": 0.817, "bandwagon": 0.645}
RIGHT = {
    "all four rules": 0.878, "chose the longer (verbosity)": 0.961, "same letter twice (position)": 0.905,
    "cheerful words (sentiment)": 0.866, "followed the crowd (bandwagon)": 0.783, "DeepSeek-R1": 0.814,
}  # fmt: skip


def rbd_main(runs: Mapping[str, Told]) -> list[Table]:
    """Lay out accuracy and consistency before and after per judge and bias (the RBD paper's main table)."""
    rows: list[tuple[Cell, ...]] = []
    tests: list[float | None] = []
    for name, run in runs.items():
        judge = run.manifests.get("debias", {}).get("facts", {}).get("judge", name)
        biases = sorted(
            k.removeprefix("debias.accuracy_before.") for k in run.summary if k.startswith("debias.accuracy_before.")
        )
        for bias in biases:
            cells = [run.summary.get(f"debias.{what}.{bias}") for what in _BOTH]
            change, p = _change(run, bias)
            tests.append(p)
            rows.append((name, judge, bias, *cells, change, p, GAIN.get(bias), CONSISTENCY.get(bias), LOW))
        if biases:
            cells = [run.summary.get(f"debias.{what}") for what in _BOTH]
            change = run.summary.get("debias.gain_mean") or _gain(cells)
            tests.append(None)
            rows.append(
                (name, judge, "mean", *cells, change, None, 0.185, 0.109, "high: the abstract, 8 judges, RBD-8B")
            )
    rows = [(*row[:9], p, *row[9:]) for row, p in zip(rows, holm(tests), strict=True)]
    return [_table("rbd_main", "Judges before and after (layout of the RBD paper's main table)", (
        "run", "judge", "bias", "accuracy before", "accuracy after", "consistency before", "consistency after", "gain",
        "p", "p (Holm)", "published gain", "published gain in consistency", "trust in the published"), rows,
        "p: exact McNemar, after against before, by question; Holm over all judges and biases here.")]  # fmt: skip


def rbd_baselines(runs: Mapping[str, Told]) -> list[Table]:
    """Lay out the loop beside its rivals and baselines, the detector beside its own, and what was published of them."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs.items():
        before = run.summary.get("debias.accuracy_before_pooled")
        loop = run.summary.get("debias.method.the loop")
        for key, rate in run.summary.items():
            if key.startswith("debias.method."):
                method = key.removeprefix("debias.method.")
                published = GAINS.get(method, (None, None))
                rows.append((name, "judge", method, rate, _gain([before, rate]), _gain([rate, loop]), *published))
        for row in run.tables["detection"].rows if "detection" in run.tables else ():
            rows.append((name, "detector (macro F1)", row[0], row[2], *(None,) * 4))
        for bias in sorted(k.removeprefix("detection.f1.") for k in run.summary if k.startswith("detection.f1.")):
            for method, key in (("best rule", f"detection.rule_f1.{bias}"), ("the detector", f"detection.f1.{bias}")):
                rows.append((name, f"detector (F1 {bias})", method, run.summary.get(key), *(None,) * 4))
    return [_table("rbd_baselines", "The loop and the detector beside their baselines", (
        "run", "what", "method", "value", "gain in accuracy", "the loop is ahead by", "published",
        "trust in the published"), rows + published_baselines() if rows else rows,
        "Published: of a judge the gain in accuracy, of a detector what the row says. The third-party notes' gains fit "
        "the abstract by construction. R1's verdicts and the rules: on the published 500.")]  # fmt: skip


def published_baselines() -> list[tuple[Cell, ...]]:
    """List what was published, or measured on what was, of methods that no run here need have."""

    def line(what: str, method: str, value: float, trust: str) -> tuple[Cell, ...]:
        return "published", what, method, None, None, None, value, trust

    return [
        *(line("judge (gain)", method, *told) for method, told in GAINS.items()),
        *(line("judge (the loop is ahead by)", method, lead, ABSTRACT) for method, lead in LEADS.items()),
        *(line("detector (F1, rows pooled)" if bias == "all" else f"detector (F1 {bias})", "DeepSeek-R1", f1, MEASURED)
          for bias, f1 in R1_F1.items()),
        *(line("detector (accuracy)", method, right, MEASURED) for method, right in RIGHT.items()),
    ]  # fmt: skip


def rbd_scaling(runs: Mapping[str, Told]) -> list[Table]:
    """Lay out detection and gain over the detectors' sizes, one run per size."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs.items():
        size = size_in(run.detector)
        published = SIZES.get(size, (None, None))
        rows.append(
            (name, size, run.summary.get("detection.f1"), run.summary.get("detection.best_rule_f1"),
             _gain([run.summary.get(f"debias.{what}") for what in _BOTH]), *published, LOW if published[0] else None)
        )  # fmt: skip
    return [_table("rbd_scaling", "Over the detectors' sizes", (
        "run", "size", "macro F1", "best rule", "gain in accuracy", "published F1", "published gain",
        "trust in the published"), rows, "Size: read off the name of the model that the detector was trained from; a "
        "dash: it names none.")]  # fmt: skip


def rbd_joint(runs: Mapping[str, Told]) -> list[Table]:
    """Lay out one detector for all biases beside detectors for one bias each: a run per training set."""
    biases = sorted(
        {k.removeprefix("detection.f1.") for run in runs.values() for k in run.summary if k.startswith("detection.f1.")}
    )
    rows: list[tuple[Cell, ...]] = [
        (name, run.summary.get("detection.f1"), *(run.summary.get(f"detection.f1.{bias}") for bias in biases))
        for name, run in runs.items()
    ]
    return [_table("rbd_joint", "One detector for all biases, or one for each", (
        "run", "macro F1", *(f"F1 {bias}" for bias in biases)), rows, "No published number is known.")]  # fmt: skip


def contrast_ranges(runs: Mapping[str, Told]) -> list[Table]:
    """Lay out, per run, Spearman by range, the published grid and the published figures beside ours."""
    parts = (
        ("contrast_ranges", "Spearman by range"), ("contrast_grid", "The grid over lambda and t: Spearman"),
        ("contrast_published", "Beside the published figures (arXiv 2510.18196)"),
    )  # fmt: skip
    found = []
    for part, title in parts:
        rows: list[tuple[Cell, ...]] = []
        columns: tuple[str, ...] = ("run", "setting")
        note = ""
        for name, run in runs.items():
            if part in run.tables:
                table, facts = run.tables[part], run.manifests["contrast"]["facts"]
                setting = facts["setting"] if part != "contrast_grid" else table.title.partition(": ")[2]
                rows += [(name, setting, *row) for row in table.rows]
                columns, note = ("run", "setting", *table.columns), table.note
        found.append(_table(f"{part}_of_runs", f"{title}, run by run", columns, rows, note))
    return found


Layout = Callable[[Mapping[str, Told]], list[Table]]
LAYOUTS: dict[str, Layout] = {
    "rbd_main": rbd_main, "rbd_baselines": rbd_baselines, "rbd_scaling": rbd_scaling, "rbd_joint": rbd_joint,
    "biasscope_main": biasscope_main, "judgebench_pro": judgebench_pro,
    "contrast_ranges": contrast_ranges,
}  # fmt: skip
_BOTH = ("accuracy_before", "accuracy_after", "consistency_before", "consistency_after")


def _change(run: Told, bias: str) -> tuple[Cell, float | None]:
    """Return a bias's gain with its interval, and its p, from the table that tested it."""
    table = run.tables.get("debias")
    row = next((row for row in table.rows if row[0] == bias), None) if table else None
    if table is None or row is None:
        return None, None
    p = row[table.columns.index("p")]
    return row[table.columns.index("gain")], float(p) if isinstance(p, int | float) else None


def _gain(cells: list[Rate | None]) -> float | None:
    before, after = cells[0], cells[1]
    if before is None or after is None or before.value is None or after.value is None:
        return None
    return after.value - before.value


def _table(name: str, title: str, columns: tuple[str, ...], rows: list[tuple[Cell, ...]], note: str = "") -> Table:
    missing = "" if rows else "No run here has what this layout shows."
    return Table(
        name=name, title=title, columns=columns, rows=tuple(rows), note=" ".join(filter(None, (note, missing)))
    )

"""The tables of stage contrast: agreement with people, stability across ranges, the sweep, what it costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.contrast_methods import CONTRAST, GREEDY, MAIN, PRIOR, By, Score, Scored, Texts, curve, tables_of
from rbd_train.contrast import STRENGTHS, TEMPERATURES, Setting, covered, decide, single_token
from rbd_train.correlation import (
    KINDS,
    defined,
    disagreement,
    histogram,
    mean_of,
    paired,
    pooled,
    preferred_number,
    relative,
)
from rbd_train.engine import Family
from rbd_train.metrics import Rate
from rbd_train.records import ScoreRow
from rbd_train.run import Cell, Table

MB = 1024 * 1024
RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
HOW = (
    "Mean over documents of the correlation within a document, over dimensions and ranges; 95 % intervals resample "
    "documents. Undefined correlations (constant scores) are left out and counted."
)
TOKENS = (
    "The best of main's 20 tokens is not greedy decoding: contrast may prefer, of the whole vocabulary, a token that "
    "the main model hardly thinks of, and only its 20 likeliest are kept."
)


def reported(scored: Scored, values: Sequence[Score]) -> list[Score]:
    """Keep the scores of the reported texts."""
    return [value if keep else None for value, keep in zip(values, scored.reported, strict=True)]


def tables(texts: Texts, scored: Scored, by: By, kind: str = "spearman") -> list[dict[str, float | None]]:
    """Correlate per document: a table per range and dimension, without the documents that are not reported."""
    kept = {item.group for item, keep in zip(texts.items, scored.reported, strict=True) if keep}
    return [
        {group: value for group, value in table.items() if group in kept}
        for values in by.values() for table in tables_of(texts.items, values)[kind]
    ]  # fmt: skip


def quality(texts: Texts, scored: Scored, method: str) -> Rate:
    """Return a method's mean Spearman per document."""
    return mean_of(tables(texts, scored, scored.scores[method]))


def stability(texts: Texts, scored: Scored, method: str) -> Rate:
    """Return how far a method's scores in two ranges lie apart."""
    by = {tuple(span): reported(scored, values) for span, values in scored.scores[method].items()}
    return disagreement(by, [item.group for item in texts.items])  # type: ignore[arg-type]


def named(setting: Setting, choose: str) -> str:
    """Name the setting as every table and plot does: the mode, the numbers, and how they were come by."""
    how = {"fixed": "fixed a priori", "split": "chosen on a development split, reported on the rest",
           "cross": "chosen on the other folds"}[choose]  # fmt: skip
    return f"{setting}, {how}" if choose == "fixed" else f"{setting.mode}, lambda and t {how}{setting.cut}"


def rows_table(texts: Texts, rows: Sequence[ScoreRow], setting: Setting, notes: Sequence[str]) -> Table:
    """Say per range what was asked and answered, and what share of the replies the scores cover."""
    found: list[tuple[Cell, ...]] = []
    for span in texts.rows:
        part = [r for r in rows if (r.low, r.high) == span and r.group != "content-free"]
        whole = [r for r in part if r.fault is None]
        mass = {who: [c for r in whole if (c := covered(r, who)) is not None] for who in ("main", "assistant")}  # type: ignore[arg-type]
        bounded = sum(decide(r, setting).bounded for r in whole)
        tokens = "one" if whole and all(single_token(r) for r in whole) else "several" if whole else "–"
        found.append(
            (str(span), len(part), len(part) - len(whole), sum(r.human is None for r in part),
             sum(r.cut > 0 for r in part), tokens,
             *((sum(m) / len(m) if m else None) for m in mass.values()), min(mass["main"], default=None), bounded)
        )  # fmt: skip
    note = (
        "Covered: the probability that a reply is one of the range's scores. Bounded: a score "
        "that a server didn't list could change the decision. A cut document lost its end, never the form."
    )
    return Table(
        name="contrast_rows", title="What was asked", rows=tuple(found), note=" ".join([note, *notes]),
        columns=("range", "rows", "failed", "human score missing", "document cut", "tokens of a score",
                 "covered, main", "covered, assistant", "covered, main, least", "bounded"),
    )  # fmt: skip


def methods_table(texts: Texts, scored: Scored) -> Table:
    """Put contrast and its rivals side by side, each tested against greedy."""
    from statsmodels.stats.multitest import multipletests

    base = tables(texts, scored, scored.scores[GREEDY])
    tests, found = [], list[tuple[Cell, ...]]()
    for name, by in scored.scores.items():
        per = {kind: tables(texts, scored, by, kind) for kind in KINDS}
        values = [v for part in by.values() for v, keep in zip(part, scored.reported, strict=True) if keep]
        test = paired(per["spearman"], base) if name != GREEDY else None
        tests.append(test)
        found.append(
            (name, *(mean_of(per[kind]) for kind in KINDS), defined(per["spearman"]),
             sum(v is not None for v in values) / len(values) if values else None, test.rate if test else None)
        )  # fmt: skip
    known = [t.p for t in tests if t is not None and t.p is not None]
    adjusted = iter(multipletests(known, method="holm")[1]) if known else iter(())
    ps = [(t.p, float(next(adjusted))) if t is not None and t.p is not None else (None, None) for t in tests]
    return Table(
        name="contrast", title="Agreement with people, all ranges",
        rows=tuple((*row, *p) for row, p in zip(found, ps, strict=True)),
        columns=("method", "Pearson", "Spearman", "Kendall", "defined", "coverage", "Spearman, less greedy's", "p",
                 "p (Holm)"),
        note=f"{HOW} Less greedy's: where both are defined; p: Wilcoxon signed-rank over documents. Calibration is "
        f"fitted on other documents. {TOKENS}",
    )  # fmt: skip


def pooled_table(texts: Texts, scored: Scored) -> Table:
    """Correlate over all documents at once, dimension by dimension: what the levels of documents and ranges add."""
    human, groups, dimensions = zip(*((i.human, i.group, i.dimension) for i in texts.items), strict=True)
    found: list[tuple[Cell, ...]] = []
    for name, by in scored.scores.items():
        scores = [
            None if value is None or not keep else relative(value, *span)
            for span, values in by.items() for value, keep in zip(values, scored.reported, strict=True)
        ]  # fmt: skip
        rates = pooled(scores, human * len(by), groups * len(by), dimensions * len(by))
        found.append((name, *(rates[kind] for kind in KINDS), rates["spearman"].n))
    return Table(
        name="contrast_pooled", title="Agreement with people, pooled", rows=tuple(found),
        columns=("method", "Pearson", "Spearman", "Kendall", "scores"),
        note="Mean over dimensions of the correlation over all documents of a dimension, every range after its shift, "
        "so that a method is charged for ranges that disagree; 95 % intervals resample documents.",
    )  # fmt: skip


def ranges_table(texts: Texts, scored: Scored) -> Table:
    """Show Spearman per dimension and range, before and after."""
    names = (GREEDY, MAIN, CONTRAST, PRIOR)
    dimensions = sorted({item.dimension for item in texts.items})
    found: list[tuple[Cell, ...]] = []
    for span in texts.rows:
        per = {name: tables(texts, scored, {span: scored.scores[name][span]}) for name in names}
        for k, dimension in enumerate(dimensions):
            found.append((str(span), dimension, *(mean_of([per[name][k]]) for name in names)))
        if len(dimensions) > 1:
            found.append((str(span), "all", *(mean_of(per[name]) for name in names)))
    return Table(
        name="contrast_ranges", title="Spearman by range", rows=tuple(found), columns=("range", "dimension", *names),
        note=HOW,
    )  # fmt: skip


def stability_table(texts: Texts, scored: Scored) -> Table:
    """Show how much a method depends on the range."""
    found: list[tuple[Cell, ...]] = []
    for name, by in scored.scores.items():
        per = {span: mean_of(tables(texts, scored, {span: by[span]})).value for span in by}
        known = [value for value in per.values() if value is not None]
        favourite = preferred_number({tuple(s): reported(scored, v) for s, v in by.items()})  # type: ignore[misc]
        found.append(
            (name, min(known, default=None), max(known, default=None), max(known) - min(known) if known else None,
             stability(texts, scored, name), *(favourite or (None, None)))
        )  # fmt: skip
    return Table(
        name="contrast_stability", title="Stability across ranges", rows=tuple(found),
        columns=("method", "least Spearman", "most", "spread", "disagreement", "preferred number", "its excess"),
        note="Disagreement: mean distance of a text's scores in two ranges after the shift, as a share of the range; a "
        "constant score has none, so read it beside the correlation. Preferred number: given more often than its "
        "places in ranges of one width explain, and by what share of all scores.",
    )  # fmt: skip


def histogram_table(texts: Texts, scored: Scored) -> Table:
    """Show the share of every score by range, before and after."""
    found: list[tuple[Cell, ...]] = []
    for span in texts.rows:
        for name in ("main, argmax", "contrast, argmax"):
            shares = histogram(reported(scored, scored.scores[name][span]), *span)
            found += [(str(span), name, span.low + k, share) for k, share in enumerate(shares)]
    return Table(
        name="contrast_histogram", title="Which scores are given", rows=tuple(found),
        columns=("range", "method", "score", "share"),
    )  # fmt: skip


def curve_table(texts: Texts, scored: Scored, setting: Setting) -> Table:
    """Sweep lambda / t at t = 1: the one parameter of one-token scores."""
    settings = {f"{r:g}": Setting(strength=r, alpha=setting.alpha) for r in RATIOS}
    found: list[tuple[Cell, ...]] = []
    for name, by in curve(texts, settings, scored.reported).items():
        per = {span: mean_of(tables(texts, scored, {span: values})) for span, values in by.items()}
        apart = disagreement({tuple(s): v for s, v in by.items()}, [i.group for i in texts.items])  # type: ignore[misc]
        found.append((float(name), mean_of(tables(texts, scored, by)), apart, *(rate.value for rate in per.values())))
    return Table(
        name="contrast_curve", rows=tuple(found),
        title=f"The sweep over lambda / t: paper, t 1{setting.cut}, expected score",
        columns=("lambda / t", "Spearman", "disagreement", *(f"Spearman {span}" for span in texts.rows)),
        note="Shown to look at: its best point is chosen on what it is measured on. 0 is the main model alone.",
    )  # fmt: skip


def grid_table(texts: Texts, scored: Scored, setting: Setting) -> Table:
    """Lay the published grid out, in the mode of the run."""
    settings = {
        f"{s:g} {t:g}": Setting(mode=setting.mode, strength=s, temperature=t, alpha=setting.alpha)
        for s in STRENGTHS for t in TEMPERATURES
    }  # fmt: skip
    values = {
        name: mean_of(tables(texts, scored, by)).value for name, by in curve(texts, settings, scored.reported).items()
    }
    rows = tuple((f"lambda {s:g}", *(values[f"{s:g} {t:g}"] for t in TEMPERATURES)) for s in STRENGTHS)
    return Table(
        name="contrast_grid", rows=rows,
        title=f"The published grid of Spearman: {setting.mode}{setting.cut}, expected score",
        columns=("", *(f"t {t:g}" for t in TEMPERATURES)),
        note="In paper mode cells of one lambda / t are equal for one-token scores: 24 cells are 18 settings.",
    )  # fmt: skip


def chosen_table(scored: Scored) -> Table:
    """Say which setting was chosen where."""
    rows = tuple((k, str(span), s.strength, s.temperature, s.ratio) for k, span, s in scored.chosen)
    return Table(
        name="contrast_chosen", title="Settings chosen on other documents", rows=rows,
        columns=("fold", "range", "lambda", "t", "lambda / t"),
    )  # fmt: skip


def cost_table(facts: Mapping[str, Any], families: Sequence[Family | None], arithmetic: float) -> Table:
    """Say what the assistant adds, against the main model alone and where it runs anyway."""
    calls = [facts[f"{who} calls"] for who in ("main", "assistant")]
    asked, stored = ([counts[kind] for counts in calls] for kind in ("asked", "from_ledger"))
    seconds = [facts[f"{who} seconds"] if all(asked) else None for who in ("main", "assistant")]
    sizes = [(f.parameters / 1e6, f.weights / MB, f.per_token * 1000 / MB) if f else (None,) * 3 for f in families]
    peak = [facts[f"{who} peak MB"] for who in ("main", "assistant")]
    added = sizes[1][0] / sizes[0][0] if sizes[0][0] and sizes[1][0] else None
    share = seconds[1] / seconds[0] if seconds[0] else None
    rows: tuple[tuple[Cell, ...], ...] = (
        ("main alone", asked[0], stored[0], seconds[0], None, *sizes[0], peak[0]),
        ("the assistant adds", asked[1], stored[1], seconds[1], share, *sizes[1], peak[1]),
        ("adds where speculative decoding runs it anyway", 0, 0, arithmetic,
         arithmetic / seconds[0] if seconds[0] else None, 0.0, 0.0, 0.0, None),
    )  # fmt: skip
    told = f" The assistant's weights are {added:.0%} of the main model's." if added is not None else ""
    peaks = {
        "GPU": "Peak: the most that tensors took while that model was asked.",
        "host": "Peak: of the whole process so far, which never falls: see the counted sizes for what is added.",
    }
    return Table(
        name="contrast_cost", title="What it costs", rows=rows,
        columns=("", "calls", "from the ledger", "seconds", "of the main model's", "parameters (M)", "weights (MB)",
                 "keys and values (MB per 1000 tokens)", f"peak {facts['memory']} memory (MB)"),
        note="Seconds include loading; what the ledger held took none. Weights, keys and values are "
        "counted from the models: what holding both at once takes. Here they are held one after the other. "
        f"{peaks[facts['memory']]} With speculative decoding only arithmetic is left, timed alone.{told}",
    )  # fmt: skip


def published_table(texts: Texts, scored: Scored, published: Mapping[str, float]) -> Table:
    """Put published figures beside ours; `greedy_spearman` is main alone, `spearman` contrast."""
    found: list[tuple[Cell, ...]] = []
    for key, value in published.items():
        method = GREEDY if key.startswith("greedy_") else "contrast, argmax"
        kind = key.removeprefix("greedy_")
        ours = mean_of(tables(texts, scored, scored.scores[method], kind)) if kind in KINDS else None
        found.append((key, value, method, ours))
    return Table(
        name="contrast_published", title="Beside the published figures", rows=tuple(found),
        columns=("figure", "published", "our method", "ours"),
        note="Published on SummEval coherence, mean over the ranges 0-4, 1-5, 2-6 and 3-7, settings tuned per range "
        "on labelled documents; whether per document or pooled is unknown (arXiv 2510.18196).",
    )  # fmt: skip

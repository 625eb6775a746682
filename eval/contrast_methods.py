"""Contrast and its cheap rivals side by side: what each says of every text in every range, with no model call.

A setting or a calibration is never fitted on the documents it is reported on: it is fixed a priori, chosen on a
development split, or chosen on the other folds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rbd_train.contrast import (
    MAIN_ALONE,
    Decision,
    Setting,
    calibration,
    decide,
    decide_alone,
    greedy,
    paper_grid,
    prior_of,
    sampled,
    shifted,
    single_token,
    without_prior,
)
from rbd_train.correlation import KINDS, by_document, mean_of
from rbd_train.errors import DataError, UsageError
from rbd_train.records import Graded, ScoreRow, uniform
from rbd_train.scoring import Range

FOLDS = 5
GREEDY = "main, greedy token"
MAIN = "main, expected"
CONTRAST = "contrast, expected"
PRIOR = "prior subtracted, expected"
Score = float | None
By = dict[Range, list[Score]]  # per range, one score per text


class Fold(NamedTuple):
    """Documents to choose on, and documents to report."""

    chosen_on: frozenset[str]
    reported: frozenset[str]


class Scored(NamedTuple):
    """What every method says; `chosen` holds (fold, range, setting), `reported` the texts that count."""

    scores: dict[str, By]
    chosen: list[tuple[int, Range, Setting]]
    reported: list[bool]


class Texts(NamedTuple):
    """Texts, and the rows of each range in their order; a row that a model failed on is None."""

    items: list[Graded]
    rows: dict[Range, list[ScoreRow | None]]
    empty: dict[tuple[str, Range], list[ScoreRow]]  # content-free rows by dimension

    def every(self, span: Range, decision: Callable[[ScoreRow], Score]) -> list[Score]:
        """Score every text by a function of its row."""
        return [None if row is None else decision(row) for row in self.rows[span]]


def folds(groups: Sequence[str], choose: str, dev_share: float) -> list[Fold]:
    """Split documents by a hash: one development split, or folds that take turns.

    Raises:
        UsageError: an unknown way to choose.
        DataError: too few documents.
    """
    if choose not in ("fixed", "split", "cross"):
        raise UsageError(f"choose is {choose!r}; choose fixed, split or cross")
    names = sorted(set(groups), key=lambda g: uniform("fold", g))
    if choose == "split":
        dev = max(1, round(dev_share * len(names)))
        if dev >= len(names):
            raise DataError(f"contrast: dev_share={dev_share} of {len(names)} documents leaves none to report")
        return [Fold(frozenset(names[:dev]), frozenset(names[dev:]))]
    if len(names) < 2:
        if choose == "cross":
            raise DataError("contrast: one document can't be split into folds; use choose=fixed")
        return [Fold(frozenset(), frozenset(names))]
    parts = [frozenset(names[k :: min(FOLDS, len(names))]) for k in range(min(FOLDS, len(names)))]
    return [Fold(frozenset(names) - part, part) for part in parts]


def candidates(texts: Texts, setting: Setting) -> list[Setting]:
    """List the settings to choose from: the published grid, or its 18 ratios where each is a setting of its own."""
    grid = [s.model_copy(update={"alpha": setting.alpha}) for s in paper_grid(setting.mode)]
    single = all(row is None or single_token(row) for rows in texts.rows.values() for row in rows)
    if setting.mode == "paper" and single:
        return list({s.ratio: s for s in grid}.values())
    return grid


def score_all(texts: Texts, setting: Setting, choose: str, dev_share: float, per_range: bool) -> Scored:
    """Let every method score every text."""
    spans = list(texts.rows)
    groups = [item.group for item in texts.items]
    parts = folds(groups, choose, dev_share)
    reported = frozenset().union(*(part.reported for part in parts))
    settings = [(k, s, setting) for k in range(len(parts)) for s in spans]
    if choose != "fixed":
        settings = choose_settings(texts, parts, candidates(texts, setting), per_range)
    used = {(k, s): found for k, s, found in settings}
    fold_of = {group: k for k, part in enumerate(parts) for group in part.reported}
    scores: dict[str, By] = {}
    for span in spans:
        mine = [used.get((fold_of.get(group, 0), span), setting) for group in groups]
        contrast = [None if row is None else decide(row, own) for row, own in zip(texts.rows[span], mine, strict=True)]
        prior = {d: prior_of(rows) for (d, s), rows in texts.empty.items() if s == span}
        bare = [
            None if row is None or row.dimension not in prior else without_prior(row, prior[row.dimension])
            for row in texts.rows[span]
        ]
        expected = texts.every(span, lambda row: decide(row, MAIN_ALONE).expected)
        said: dict[str, list[Score]] = {
            GREEDY: texts.every(span, greedy),
            "main, greedy as published": texts.every(span, lambda row: greedy(row, as_published=True)),
            "main, argmax": texts.every(span, lambda row: decide(row, MAIN_ALONE).argmax),
            MAIN: expected,
            "main, 20 samples at t 2": texts.every(span, sampled),
            "assistant, expected": texts.every(span, lambda row: decide_alone(row).expected),
            "contrast, best of main's 20 tokens": [
                None if row is None else greedy(row, own) for row, own in zip(texts.rows[span], mine, strict=True)
            ],
            "contrast, argmax": [_argmax(d) for d in contrast], CONTRAST: [_expected(d) for d in contrast],
            "prior subtracted, argmax": [_argmax(d) for d in bare], PRIOR: [_expected(d) for d in bare],
            "calibrated, expected": calibrated(texts.items, expected, parts, span),
        }  # fmt: skip
        for name, values in said.items():
            scores.setdefault(name, {})[span] = values
    return Scored(scores, settings if choose != "fixed" else [], [group in reported for group in groups])


def choose_settings(
    texts: Texts, parts: Sequence[Fold], grid: Sequence[Setting], per_range: bool
) -> list[tuple[int, Range, Setting]]:
    """Choose, fold by fold, the setting with the best mean Spearman per document on the fold's other documents."""
    spans = list(texts.rows)
    tables = {
        (span, k): spearman_tables(texts.items, texts.every(span, lambda row, s=s: decide(row, s).expected))  # type: ignore[misc]
        for span in spans for k, s in enumerate(grid)
    }  # fmt: skip
    chosen = []
    for number, part in enumerate(parts):
        for span in spans:
            judged = [span] if per_range else spans

            def quality(k: int, judged: list[Range] = judged, part: Fold = part) -> float:
                found = [
                    {g: value for g, value in table.items() if g in part.chosen_on}
                    for s in judged for table in tables[s, k]
                ]  # fmt: skip
                value = mean_of(found).value
                return value if value is not None else -2.0

            chosen.append((number, span, grid[max(range(len(grid)), key=quality)]))
    return chosen


def spearman_tables(items: Sequence[Graded], scores: Sequence[Score]) -> list[dict[str, float | None]]:
    """Correlate per document, dimension by dimension."""
    return tables_of(items, scores)["spearman"]


def tables_of(items: Sequence[Graded], scores: Sequence[Score]) -> dict[str, list[dict[str, float | None]]]:
    """Correlate per document, dimension by dimension, in the three ways."""
    found: dict[str, list[dict[str, float | None]]] = {kind: [] for kind in KINDS}
    for dimension in sorted({item.dimension for item in items}):
        part = [k for k, item in enumerate(items) if item.dimension == dimension]
        own = by_document([scores[k] for k in part], [items[k].human for k in part], [items[k].group for k in part])
        for kind in KINDS:
            found[kind].append({group: getattr(value, kind) for group, value in own.items()})
    return found


def calibrated(items: Sequence[Graded], scores: Sequence[Score], parts: Sequence[Fold], span: Range) -> list[Score]:
    """Map scores linearly to people's, shifted to the range, fitted per dimension on each fold's other documents."""
    found: list[Score] = [None] * len(items)
    for part in parts:
        for dimension in {item.dimension for item in items}:
            known = [
                (score, shifted(item.human, (item.low, item.high), *span))
                for item, score in zip(items, scores, strict=True)
                if item.group in part.chosen_on and item.dimension == dimension and score is not None
                and item.human is not None
            ]  # fmt: skip
            if len(known) < 2:
                continue
            slope, intercept = calibration([s for s, _ in known], [h for _, h in known])
            for k, (item, score) in enumerate(zip(items, scores, strict=True)):
                if item.group in part.reported and item.dimension == dimension and score is not None:
                    found[k] = min(max(slope * score + intercept, span.low), span.high)
    return found


def curve(texts: Texts, settings: Mapping[str, Setting], reported: Sequence[bool]) -> dict[str, By]:
    """Score the reported texts under many settings: to look at, not to choose from."""
    return {
        name: {
            span: [
                value if keep else None
                for value, keep in zip(texts.every(span, lambda r, s=s: decide(r, s).expected), reported, strict=True)  # type: ignore[misc]
            ]
            for span in texts.rows
        }
        for name, s in settings.items()
    }  # fmt: skip


def _argmax(decision: Decision | None) -> Score:
    return None if decision is None else decision.argmax


def _expected(decision: Decision | None) -> Score:
    return None if decision is None else decision.expected

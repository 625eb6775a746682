"""The detection stage's tables: what is to be detected, every method side by side, paired tests, replies."""

from collections import Counter
from collections.abc import Mapping, Sequence

from eval.verdicts import BEST, Verdicts, best_rules, biases_of, macro_over, readable, scored
from rbd_train.errors import DataError
from rbd_train.metrics import (
    accuracy_rate,
    ceiling,
    coverage_rate,
    detectable,
    f1_rate,
    holm,
    macro_f1,
    mean_rate,
    paired_test,
    precision_rate,
    recall_rate,
)
from rbd_train.records import Example, Trace
from rbd_train.run import Cell, Table

ENOUGH = 50  # questions per bias: with 25 and 15 % Yes, 83 % of the 95 % intervals of macro F1 held it


def counts_table(examples: Sequence[Example]) -> Table:
    """Print, before any figure, what the judge did on D and D_bias and the ceiling that follows."""
    if not examples:
        raise DataError("detection: no held-out example")
    rows: list[tuple[Cell, ...]] = []
    for bias in biases_of(examples):
        part = [example for example in examples if example.bias == bias]
        cells = Counter(example.quadrant for example in part)
        unknown = cells[None] == len(part)
        wrong = cells["TF"] + cells["FF"]
        top = ceiling(cells["TF"] / wrong) if wrong else None
        counts = [None if unknown else cells[name] for name in ("TT", "TF", "FT", "FF")]  # type: ignore[index]
        rows.append(
            (bias, len(part), sum(e.label for e in part), *counts,
             "D is seen" if bias == "position" else None if unknown else top)
        )  # fmt: skip
    return Table(
        name="detection_counts", title="What is to be detected (held-out cases)",
        columns=("bias", "cases", "Yes", "TT", "TF", "FT", "FF", "F1 ceiling"), rows=tuple(rows),
        note="T/F: the judge was right or wrong on D, then on D_bias. A detector can't see D, so its F1 can't pass "
        "2p/(1+p), p = P(right on D | wrong on D_bias). A dash is unknown: imported rows don't say.",
    )  # fmt: skip


def methods_table(examples: Sequence[Example], said: Verdicts, detector: str) -> Table:
    """Put the detector, the other detectors, the teacher, the rules and the majority class side by side."""
    biases = biases_of(examples)
    last = ("teacher", "best rule", "rule", "majority class")
    names = sorted(said, key=lambda name: next((k for k, word in enumerate(last, 1) if name.startswith(word)), 0))
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        part = scored(examples, said[name])
        whole = {row.bias for row in part} == set(biases)
        read = readable(part)
        per_bias: list[Cell] = []
        for bias in biases:
            own = [row for row in part if row.bias == bias]
            per_bias.append(f1_rate(own) if own else None)
        rows.append(
            (name, len(part), macro_f1(part) if whole else None, accuracy_rate(part), precision_rate(part),
             recall_rate(part), macro_over(read, biases) if whole else None, accuracy_rate(read), coverage_rate(part),
             *per_bias)
        )  # fmt: skip
    fewer = [name for name in names if len(said[name]) < len(said[detector]) and not name.startswith("rule")]
    missing = f" Not the same cases: {', '.join(fewer)} speak of fewer." if fewer else ""
    return Table(
        name="detection", title="Detection", rows=tuple(rows),
        columns=("method", "cases", "macro F1", "accuracy", "precision", "recall", "macro F1, readable",
                 "accuracy, readable", "coverage", *(f"F1 {bias}" for bias in biases)),
        note="Yes is the positive class; unreadable counts as wrong except in the readable columns. Macro: mean over "
        "biases; a dash where a bias has no Yes, neither true nor said. Intervals: 95 %, by "
        f"question{few_note(examples)}. "
        f"{rivals_note(examples)}{missing}",
    )  # fmt: skip


def few_note(examples: Sequence[Example]) -> str:
    """Warn where a bias has so few questions that the interval of F1 is too narrow (docs/evaluation.md)."""
    asked = {bias: len({e.group for e in examples if e.bias == bias}) for bias in biases_of(examples)}
    few = [f"{bias} {count}" for bias, count in asked.items() if count < ENOUGH]
    return f"; F1's are too narrow below {ENOUGH} questions per bias, here {', '.join(few)}" if few else ""


def rivals_note(examples: Sequence[Example]) -> str:
    """Say what the best rules are, and where there is no choice of one."""
    note = "Best: chosen on these rows, of a bias's rule and one answer for all"
    for figure in BEST.values():
        kinds = "; ".join(f"{bias}, {kind}" for bias, (kind, _) in best_rules(examples, figure).items())
        note += f". By {figure.replace('f1', 'F1')}: {kinds or 'none'}"
    if len({e.label for e in examples}) == 1:
        note += ". One class alone: one answer is right by construction, so only a rule is a rival"
    return f"{note}."


def paired_table(examples: Sequence[Example], said: Verdicts, detector: str) -> Table:
    """Test the detector against the best rule on the same cases, per bias and judge, Holm over the rows."""
    rival = said.get("best rule by accuracy", {})
    cells = sorted({(e.bias, e.case.judge) for e in examples})
    tests = []
    for bias, judge in [*cells, ("all", "all")]:
        part = [e for e in examples if judge == "all" or (e.bias, e.case.judge) == (bias, judge)]
        part = [e for e in part if e.case.id in said[detector]]
        f1, accuracy = (measure(scored(part, said[detector])) for measure in (f1_rate, accuracy_rate))
        part = [e for e in part if e.case.id in rival]
        ours, theirs = ([verdict[e.case.id] == e.label for e in part] for verdict in (said[detector], rival))
        tests.append((bias, judge, f1, accuracy, paired_test(ours, theirs, [e.group for e in part]) if part else None))
    adjusted = holm([test.p if test else None for *_, test in tests[:-1]])
    rows = tuple(
        (bias, judge, accuracy.n, f1, accuracy,
         *((test.only_first, test.only_second, test.p, p, test.mid_p,
            detectable(test)) if test else [None] * 6))
        for (bias, judge, f1, accuracy, test), p in zip(tests, [*adjusted, None], strict=True)
    )  # fmt: skip
    name = f"{detector[:1].upper()}{detector[1:]}"
    return Table(
        name="detection_paired", title=f"{name} against the best rule, per bias and judge",
        columns=("bias", "judge", "cases", "F1", "accuracy", "only the detector right", "only the rule right", "p",
                 "p (Holm)", "mid-p", "smallest detectable"), rows=rows,
        note="Right and wrong: against the best rule by accuracy. Exact McNemar test on the same cases, two-sided, by "
        "question; Holm over biases and judges (the last row is their sum). Smallest detectable: the difference in "
        "accuracy shown with 80 % power.",
    )  # fmt: skip


def names_table(
    examples: Sequence[Example], named: Mapping[str, bool | None], unnamed: Mapping[str, bool | None]
) -> Table:
    """Compare verdicts with and without the judge's name, per judge: does its capability weigh?"""
    rows: list[tuple[Cell, ...]] = []
    judges = sorted({e.case.judge for e in examples})
    for judge in [*judges, *(["all"] if len(judges) > 1 else [])]:
        part = [e for e in examples if judge in ("all", e.case.judge)]
        groups = [e.group for e in part]
        first, second = ([said[e.case.id] == e.label for e in part] for said in (named, unnamed))
        changed = [float(named[e.case.id] != unnamed[e.case.id]) for e in part]
        test = paired_test(first, second, groups)
        rows.append(
            (judge, len(part), *(mean_rate([float(x) for x in known], groups) for known in (first, second)),
             mean_rate(changed, groups), test.p)
        )  # fmt: skip
    return Table(
        name="detection_names", title="With the judge's name and without", rows=tuple(rows),
        columns=("judge", "cases", "accuracy, named", "accuracy, not named", "verdicts that change", "p"),
        note="The same cases, with 'a judge' in place of the name. Exact McNemar by question.",
    )  # fmt: skip


def reject_table(traces: Sequence[Trace]) -> Table:
    """Count the detector's replies by what they say, and by why they can't be read."""
    states = Counter("Yes" if t.verdict else "No" if t.verdict is False else f"unreadable: {t.reject}" for t in traces)
    rows = tuple((state, count) for state, count in sorted(states.items()))
    return Table(name="detection_replies", title="The detector's replies", columns=("state", "replies"), rows=rows)

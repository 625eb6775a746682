"""What every method says of every case: the detector, other runs' detectors, the teacher, the rules, the majority."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from eval.baselines import CONSTANTS, RULES, Rule, majority_classes, name_of, rule_of
from rbd_train.detector import standing
from rbd_train.metrics import Rate, Scored, confusion, macro_f1
from rbd_train.records import Example, Trace

BEST: dict[str, Literal["f1", "accuracy"]] = {"best rule by F1": "f1", "best rule by accuracy": "accuracy"}
Verdicts = Mapping[str, Mapping[str, bool | None]]  # method -> case id -> verdict


def biases_of(examples: Sequence[Example]) -> list[str]:
    """List the biases that occur."""
    return sorted({example.bias for example in examples})


def by_case(traces: Iterable[Trace]) -> dict[str, list[Trace]]:
    """Gather the samples of each case."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(trace.case_id, []).append(trace)
    return found


def voted(traces: Iterable[Trace]) -> dict[str, bool | None]:
    """Return the verdict that stands for each case: the majority of its readable samples."""
    return {case_id: standing(samples).verdict for case_id, samples in by_case(traces).items()}


def p_yes(traces: Iterable[Trace]) -> dict[str, float]:
    """Average P(yes) at the verdict's token over the samples that have it; a case without any has no key."""
    known = {case: [t.p_yes for t in samples if t.p_yes is not None] for case, samples in by_case(traces).items()}
    return {case: sum(values) / len(values) for case, values in known.items() if values}


def verdicts(
    examples: Sequence[Example], traces: Sequence[Trace], detector: str,
    others: Mapping[str, Sequence[Trace]] | None = None,
) -> dict[str, dict[str, bool | None]]:  # fmt: skip
    """Collect what every method says; a missing key means that the method doesn't speak of that case."""
    said: dict[str, dict[str, bool | None]] = {detector: voted(traces)}
    asked = {example.case.id for example in examples}
    for name, theirs in (others or {}).items():
        said[name] = voted(trace for trace in theirs if trace.case_id in asked)
    for example in examples:
        if example.trace is not None:
            said.setdefault(f"teacher: {example.trace.author}", {})[example.case.id] = example.trace.verdict
    for bias in dict.fromkeys([*RULES, *biases_of(examples)]):
        rule = rule_of(bias)
        if rule is not None:
            said[f"rule: {name_of(rule)}"] = {e.case.id: rule(e.case) for e in examples if e.bias == bias}
    majority = majority_classes(examples)
    said["majority class"] = {e.case.id: majority[e.bias] for e in examples}
    for name, figure in BEST.items():
        rivals = best_rules(examples, figure)
        said[name] = {e.case.id: rivals[e.bias][1](e.case) for e in examples if e.bias in rivals}
    return {name: verdict for name, verdict in said.items() if verdict}


def best_rules(examples: Sequence[Example], figure: Literal["f1", "accuracy"]) -> dict[str, tuple[str, Rule]]:
    """Choose, per bias, among its rule and one answer for all: by a figure on these rows, which favours the rival.

    Where all labels of the set are alike (a diagnostic set), one answer is right by construction and shows nothing:
    there the rule stands alone, and a bias without a rule has no rival. A bias that merely happens to have one class
    keeps that answer as a rival: else saying No to everything would beat "the best rule" over all biases.
    """
    chosen, mixed = {}, len({example.label for example in examples}) == 2
    for bias in biases_of(examples):
        part = [example for example in examples if example.bias == bias]
        rule = rule_of(bias)
        offered = {name_of(rule): rule} if rule is not None else {}
        if mixed:
            offered |= CONSTANTS
        worth = {
            name: getattr(confusion([Scored(bias, e.group, e.label, answer(e.case)) for e in part]), figure) or 0.0
            for name, answer in offered.items()
        }
        if offered:  # of equal ones the first: the rule
            name = max(worth, key=lambda name: worth[name])
            chosen[bias] = (name, offered[name])
    return chosen


def scored(examples: Sequence[Example], said: Mapping[str, bool | None]) -> list[Scored]:
    """Join labels and verdicts."""
    return [Scored(e.bias, e.group, e.label, said[e.case.id]) for e in examples if e.case.id in said]


def readable(rows: Sequence[Scored]) -> list[Scored]:
    """Leave out the verdicts that can't be read."""
    return [row for row in rows if row.verdict is not None]


def macro_over(rows: Sequence[Scored], biases: Sequence[str]) -> Rate:
    """Return macro F1 over these biases; undefined where a method says nothing of one of them."""
    return macro_f1(rows) if {row.bias for row in rows} == set(biases) else Rate(value=None, n=len(rows))

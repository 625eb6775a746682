"""What every method says of every case: the detector, other runs' detectors, the teacher, the rules, the majority."""

from collections.abc import Iterable, Mapping, Sequence

from eval.baselines import RULES, majority_classes
from rbd_train.detector import standing
from rbd_train.metrics import Scored
from rbd_train.records import Example, Trace

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
    for bias, rule in RULES.items():
        name = f"rule: {rule.__name__.replace('_', ' ')}"
        said[name] = {e.case.id: rule(e.case) for e in examples if e.bias == bias}
    majority = majority_classes(examples)
    said["majority class"] = {e.case.id: majority[e.bias] for e in examples}
    rival = best_rule(examples)
    said["best rule"] = {
        e.case.id: RULES[e.bias](e.case) if rival[e.bias] == "rule" else majority[e.bias] for e in examples
    }  # fmt: skip
    return {name: verdict for name, verdict in said.items() if verdict}


def best_rule(examples: Sequence[Example]) -> dict[str, str]:
    """Choose, per bias, between its rule and the majority class: on these rows, which favours the rival."""
    chosen = {}
    majority = majority_classes(examples)
    for bias in biases_of(examples):
        part = [example for example in examples if example.bias == bias]
        by_rule = sum(RULES[bias](example.case) == example.label for example in part) if bias in RULES else 0
        by_class = sum(majority[bias] == example.label for example in part)
        chosen[bias] = "rule" if by_rule >= by_class and bias in RULES else "majority class"
    return chosen


def scored(examples: Sequence[Example], said: Mapping[str, bool | None]) -> list[Scored]:
    """Join labels and verdicts."""
    return [Scored(e.bias, e.group, e.label, said[e.case.id]) for e in examples if e.case.id in said]

"""The debias loop (arXiv 2505.17100, Algorithm 1) as a library call: what a user plugs into an own judge.

Detect; where the detector sees bias, feed its reasoning back and judge again; until it sees none or `max_rounds`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rbd_train.biases import case_from_views, unnamed
from rbd_train.detector import Detector, standing
from rbd_train.errors import UsageError
from rbd_train.judge import GenerativeJudge, Judge, Shown
from rbd_train.records import Case, Item, Judgement, Revision, Round, Trace

LABEL = "Biased: Yes."


class Decision(NamedTuple):
    """What a judge decided: one view, or for position the same item in both orders."""

    id: str
    bias: str
    shown: tuple[Shown, ...]
    judgements: tuple[Judgement, ...]


def decide(judge: Judge, bias: str, items: Sequence[Item]) -> list[Decision]:
    """Let a judge decide items as stored, for position in both orders: what `debias` then looks at."""
    orders = [tuple(range(len(item.options))) for item in items]
    both = bias == "position"
    views = [(Shown(i, o), Shown(i, o[::-1])) if both else (Shown(i, o),) for i, o in zip(items, orders, strict=True)]
    judged = iter(judge.judge([shown for view in views for shown in view]))
    return [
        Decision(item.id, bias, view, tuple(next(judged) for _ in view))
        for item, view in zip(items, views, strict=True)
    ]


class Rejudge(Protocol):
    """All the loop needs of a judge."""

    def rejudge(
        self, shown: Sequence[Shown], before: Sequence[Judgement], feedback: Sequence[str | None]
    ) -> list[Judgement]:
        """Decide each view again, with feedback on the decision before."""


def debias(
    decisions: Sequence[Decision], judge: Rejudge, detector: Detector, max_rounds: int = 1, position_calls: int = 2,
    feedback: str = "reasoning", without_name: bool = False,
) -> list[Revision]:  # fmt: skip
    """Let a detector look at decisions, and the judge look again where bias was seen.

    Args:
        decisions: what the judge decided.
        judge: the judge that decided.
        detector: what reads the decisions; asked again about every revised one while rounds are left.
        max_rounds: how often a decision may be judged again.
        position_calls: 2 judges each order again by itself; 1 asks for both in one call, as published.
        feedback: what the judge reads of the detector's reply: `reasoning`, `label`, or `none` (it is asked again).
        without_name: the detector's cases don't name the judge.

    Returns:
        One revision per decision, in order. Where a decision can't be read, there is nothing to detect and it stands.

    Raises:
        UsageError: `position_calls=1` with a judge that isn't asked in words or has a prompt of its own, or
            `feedback=reasoning` with a detector that gives none (its attribute `thinks` is false).
    """
    _check(decisions, judge, detector, position_calls, feedback)
    rounds: list[list[Round]] = [[Round(judgements=d.judgements, trace=None)] for d in decisions]
    stops: dict[int, str] = {}
    calls = [0] * len(decisions)
    for turn in range(max_rounds + 1):
        readable = [i for i in range(len(decisions)) if i not in stops and _readable(rounds[i][-1].judgements)]
        stops |= {i: "unreadable" for i in range(len(decisions)) if i not in stops and i not in readable}
        if turn == max_rounds:
            break
        cases = [_case(decisions[i], rounds[i][-1], detector) for i in readable]
        traces, asked = _standing_traces(detector, [unnamed(case) for case in cases] if without_name else cases)
        flagged = []
        for i, trace in zip(readable, traces, strict=True):
            rounds[i][-1] = rounds[i][-1].model_copy(update={"trace": trace})
            calls[i] += asked
            if trace.verdict:
                flagged.append(i)
            else:
                stops[i] = "unreadable" if trace.verdict is None else "no_bias"
        said = [_feedback(rounds[i][-1].trace, feedback) for i in flagged]
        revised = _again(judge, [decisions[i] for i in flagged], [rounds[i][-1] for i in flagged], said, position_calls)
        for i, judgements in zip(flagged, revised, strict=True):
            rounds[i].append(Round(judgements=judgements, trace=None))
            calls[i] += 1 if position_calls == 1 else len(judgements)
    return [
        Revision(id=decision.id, rounds=tuple(rounds[i]), stop=stops.get(i, "max_rounds"), calls=calls[i])  # type: ignore[arg-type]
        for i, decision in enumerate(decisions)
    ]


def _readable(judgements: Sequence[Judgement]) -> bool:
    return all(judgement.outcome.kind != "unreadable" for judgement in judgements)


def _case(decision: Decision, last: Round, detector: Detector) -> Case:
    judged = [(shown.item, judgement) for shown, judgement in zip(decision.shown, last.judgements, strict=True)]
    return case_from_views(decision.id, decision.bias, judged, detector.definitions)


def _standing_traces(detector: Detector, cases: Sequence[Case]) -> tuple[list[Trace], int]:
    """Return the trace that stands for each case, and the samples per case."""
    traces = detector.detect(cases)
    each = len(traces) // len(cases) if cases else 1
    return [standing(traces[start : start + each]) for start in range(0, len(traces), each)], each


def _feedback(trace: Trace | None, kind: str) -> str | None:
    if trace is None or kind == "none":
        return None
    return LABEL if kind == "label" else trace.thinking


def _check(
    decisions: Sequence[Decision], judge: Rejudge, detector: Detector, position_calls: int, feedback: str
) -> None:
    """Refuse what can't be asked before anything is paid for."""
    if position_calls not in (1, 2):
        raise UsageError(f"position_calls is {position_calls}; choose 2, or 1 for the published single call")
    if feedback not in ("reasoning", "label", "none"):
        raise UsageError(f"feedback is {feedback!r}; choose reasoning, label or none")
    if feedback == "reasoning" and not getattr(detector, "thinks", True):
        raise UsageError(
            f"feedback is 'reasoning', but detector {detector.name} gives a verdict alone; set feedback=label, or none"
        )
    two_orders = any(len(decision.shown) == 2 for decision in decisions)
    if position_calls == 1 and two_orders and not isinstance(judge, GenerativeJudge):
        raise UsageError("position_calls=1 asks for two decisions in words; this judge is asked none")
    if position_calls == 1 and two_orders and isinstance(judge, GenerativeJudge) and (judge.reason or judge.prompt):
        raise UsageError(
            "position_calls=1 asks by a prompt of the project's; with judge.reason or judge.prompt set it to 2"
        )


def _again(
    judge: Rejudge, decisions: Sequence[Decision], last: Sequence[Round], feedback: Sequence[str | None],
    position_calls: int,
) -> list[tuple[Judgement, ...]]:  # fmt: skip
    if position_calls == 1 and isinstance(judge, GenerativeJudge):
        both = [k for k, decision in enumerate(decisions) if len(decision.shown) == 2]
        joint = judge.rejudge_jointly(
            [(decisions[k].shown[0], decisions[k].shown[1]) for k in both],
            [(last[k].judgements[0], last[k].judgements[1]) for k in both],
            [feedback[k] or "" for k in both],
        )
        found: dict[int, tuple[Judgement, ...]] = dict(zip(both, joint, strict=True))
    else:
        found = {}
    rest = [(k, view) for k in range(len(decisions)) if k not in found for view in range(len(decisions[k].shown))]
    judged = judge.rejudge(
        [decisions[k].shown[view] for k, view in rest],
        [last[k].judgements[view] for k, view in rest],
        [feedback[k] for k, _ in rest],
    )
    for (k, _), judgement in zip(rest, judged, strict=True):
        found[k] = (*found.get(k, ()), judgement)
    return [found[k] for k in range(len(decisions))]

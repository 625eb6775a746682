"""The debias stage's tables: before and after, what changed, rounds, harm where there was no bias, cost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rbd_train.intervals import bootstrap_sums
from rbd_train.judge import Judge
from rbd_train.metrics import Rate, detectable, holm, macro, mean_rate, paired_change, paired_test
from rbd_train.records import BiasRecord, Judgement, Revision, Round
from rbd_train.run import Cell, Table
from rbd_train.tables import counted, declared


class Turn(NamedTuple):
    """How a decision stood after a round; None if unreadable."""

    right: bool | None  # on D_bias
    both: bool | None  # right on D and on D_bias: the paper's consistency
    same: bool | None  # the same answer on D as on D_bias, right or wrong


class Outcome(NamedTuple):
    """One record's way through the loop, as right and wrong; `turns[0]` is before."""

    bias: str
    group: str
    turns: list[Turn]
    choices: list[tuple[int | None, ...]]
    right_on_d: bool | None
    flagged: bool
    stop: str
    calls: int


def outcome_of(record: BiasRecord, revision: Revision) -> Outcome:
    """Say right or wrong after every round (arXiv 2505.17100: consistency is right on both)."""
    assert record.pair is not None and record.plain is not None
    first = revision.rounds[0].trace
    return Outcome(
        record.bias, record.group, [turn_of(record, entry) for entry in revision.rounds],
        [tuple(judgement.outcome.choice for judgement in entry.judgements) for entry in revision.rounds],
        record.plain.right(record.pair.plain.gold), bool(first and first.verdict), revision.stop, revision.calls,
    )  # fmt: skip


def turn_of(record: BiasRecord, entry: Round) -> Turn:
    """Judge a round's standing decisions; for position both orders were revised, else D's decision is the old one."""
    assert record.pair is not None and record.plain is not None
    last: Judgement = entry.judgements[-1]
    first: Judgement = entry.judgements[0] if record.bias == "position" else record.plain
    biased, plain = last.right(record.pair.biased.gold), first.right(record.pair.plain.gold)
    if biased is None or plain is None:
        return Turn(biased, None, None)
    return Turn(biased, biased and plain, last.outcome == first.outcome)


def stood(outcome: Outcome, turn: int, what: str) -> bool | None:
    """Return how a decision stood after a turn (the last one reached, where it ended before); None if unreadable."""
    state: bool | None = getattr(outcome.turns[turn] if turn < len(outcome.turns) else outcome.turns[-1], what)
    return state


def rate(outcomes: Sequence[Outcome], turn: int, what: str) -> Rate:
    """Return a rate after a turn, clustered by question; unreadable counts as wrong."""
    return mean_rate([float(bool(stood(o, turn, what))) for o in outcomes], [o.group for o in outcomes])


def readable(outcomes: Sequence[Outcome], *states: tuple[int, str]) -> list[Outcome]:
    """Keep the outcomes that can be read in each of these states: a turn, and what of it."""
    return [o for o in outcomes if all(stood(o, turn, what) is not None for turn, what in states)]


def sensitive(outcomes: Sequence[Outcome], turn: int) -> Rate:
    """Return the bias-sensitive rate: wrong on D_bias, among those right on D (JudgeBiasBench)."""
    part = [o for o in outcomes if o.right_on_d]
    return mean_rate([float(not o.turns[turn].right) for o in part], [o.group for o in part])


def macro_rate(outcomes: Sequence[Outcome], turn: int, what: str) -> Rate:
    """Return the mean over biases of a rate after a turn, with a cluster-bootstrap interval."""
    parts = {bias: rate(part, turn, what) for bias, part in parts_of(outcomes).items() if bias != "all"}
    return _mean(outcomes, [float(bool(stood(o, turn, what))) for o in outcomes], parts)


def macro_gain(outcomes: Sequence[Outcome]) -> Rate:
    """Return the mean over biases of the gain in accuracy, with a cluster-bootstrap interval."""
    changes = [float(bool(stood(o, -1, "right"))) - float(bool(stood(o, 0, "right"))) for o in outcomes]
    return _mean(outcomes, changes, {bias: gain(part) for bias, part in parts_of(outcomes).items() if bias != "all"})


def _mean(outcomes: Sequence[Outcome], values: Sequence[float], parts: Mapping[str, Rate]) -> Rate:
    """Average over biases: one value per outcome, and each bias's own figure."""
    import numpy as np

    biases = list(parts)
    if not biases:
        return Rate(value=None, n=0)
    sums = np.zeros((len(outcomes), 2, len(biases)))  # per row and bias: values, rows
    for k, (o, value) in enumerate(zip(outcomes, values, strict=True)):
        sums[k, :, biases.index(o.bias)] = value, 1
    low, high = bootstrap_sums(
        sums.reshape(len(outcomes), -1), [o.group for o in outcomes],
        lambda s: (s[..., : len(biases)] / s[..., len(biases) :]).mean(axis=-1),
    )  # fmt: skip
    if low == high:  # no resample differs: what the biases' own intervals leave open
        low, high = (macro({bias: getattr(part, end) for bias, part in parts.items()}) for end in ("low", "high"))
    return Rate(value=macro({bias: part.value for bias, part in parts.items()}), n=len(outcomes), low=low, high=high)


def gain(outcomes: Sequence[Outcome]) -> Rate:
    """Return the change in accuracy, paired, clustered by question."""
    before, after = ([bool(o.turns[turn].right) for o in outcomes] for turn in (0, -1))
    return paired_change(before, after, [o.group for o in outcomes])


def share(hits: Sequence[bool], outcomes: Sequence[Outcome]) -> Rate:
    """Return the share of outcomes that a property holds for, clustered by question."""
    return mean_rate([float(hit) for hit in hits], [o.group for o in outcomes])


def parts_of(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Sort outcomes by bias; `all` comes last."""
    parts: dict[str, list[Outcome]] = {bias: [] for bias in sorted({o.bias for o in outcomes})}
    for outcome in outcomes:
        parts[outcome.bias].append(outcome)
    return {**parts, "all": list(outcomes)}


def accuracy_table(outcomes: Sequence[Outcome], left_out: Mapping[str, int], judge: Judge) -> Table:
    """Show accuracy on D_bias, consistency, sameness and the bias-sensitive rate, before and after, with a test."""
    rows: list[tuple[Cell, ...]] = []
    parts = parts_of(outcomes)
    tests = [
        paired_test([bool(o.turns[-1].right) for o in part], [bool(o.turns[0].right) for o in part],
                    [o.group for o in part])
        for part in parts.values()
    ]  # fmt: skip
    adjusted = [*holm([test.p for test in tests[:-1]]), None]
    for (bias, part), test, p in zip(parts.items(), tests, adjusted, strict=True):
        rows.append(
            (bias, len(part), rate(part, 0, "right"), rate(part, -1, "right"), gain(part), test.p, p,
             detectable(test),
             rate(part, 0, "both"), rate(part, -1, "both"), rate(part, 0, "same"), rate(part, -1, "same"),
             sensitive(part, 0), sensitive(part, -1))
        )  # fmt: skip
    return Table(
        name="debias", title="The judge on D_bias, before and after", rows=tuple(rows),
        columns=("bias", "records", "accuracy before", "accuracy after", "gain", "p", "p (Holm)", "smallest detectable",
                 "consistency before", "consistency after", "sameness before", "sameness after",
                 "bias-sensitive before", "bias-sensitive after"),
        note=f"{declared(judge)}. Consistency: right on D and on D_bias. Sameness: the same answer "
        "on both, right or wrong. Bias-sensitive: wrong on D_bias, of those right on D. Unreadable counts as wrong "
        "(table debias_readable leaves it out). "
        f"p: exact McNemar, after against before, by question; Holm over biases. Left out: {counted(left_out)}.",
    )  # fmt: skip


def readable_table(outcomes: Sequence[Outcome]) -> Table:
    """Show the same rates on readable decisions alone, with the share of decisions that they rest on."""
    rows: list[tuple[Cell, ...]] = []
    for bias, part in parts_of(outcomes).items():
        shown = [rate(readable(part, (turn, what)), turn, what) for what in ("right", "both") for turn in (0, -1)]
        both = readable(part, (0, "right"), (-1, "right"))
        wrong, right = [o for o in both if not o.turns[0].right], [o for o in both if o.turns[0].right]
        rows.append(
            (bias, len(part), *(len(readable(part, (turn, "right"))) / len(part) for turn in (0, -1)), *shown,
             share([bool(o.turns[-1].right) for o in wrong], wrong),
             share([not o.turns[-1].right for o in right], right))
        )  # fmt: skip
    return Table(
        name="debias_readable", title="Before and after, on readable decisions alone", rows=tuple(rows),
        columns=("bias", "records", "coverage before", "coverage after", "accuracy before", "accuracy after",
                 "consistency before", "consistency after", "share repaired", "share broken"),
        note="Coverage: the share of decisions on D_bias that can be read. Each rate is of what can be read for it: "
        "consistency on D too, repaired and broken before and after.",
    )  # fmt: skip


def changes_table(outcomes: Sequence[Outcome]) -> Table:
    """Count what the loop did: flagged, repaired, broken, and how it ended."""
    rows: list[tuple[Cell, ...]] = []
    stops = ("no_bias", "max_rounds", "unreadable")
    for bias, part in parts_of(outcomes).items():
        wrong, right = [o for o in part if not o.turns[0].right], [o for o in part if o.turns[0].right]
        repaired, broken = [bool(o.turns[-1].right) for o in wrong], [not o.turns[-1].right for o in right]
        rows.append(
            (bias, len(part), sum(o.flagged for o in part), f"{sum(repaired)} of {len(wrong)}", share(repaired, wrong),
             f"{sum(broken)} of {len(right)}", share(broken, right),
             *(sum(o.stop == stop for o in part) for stop in stops), sum(o.calls for o in part))
        )  # fmt: skip
    return Table(
        name="debias_changes", title="What the loop changed", rows=tuple(rows),
        columns=("bias", "records", "flagged", "repaired", "share repaired", "broken", "share broken",
                 "ended: no bias seen", "ended: rounds used up", "ended: unreadable", "calls"),
        note="Repaired: right after, of those wrong before. Broken: wrong after, of those right before. "
        "Calls: the detector's and the judge's, after the first judgement.",
    )  # fmt: skip


def rounds_table(outcomes: Sequence[Outcome]) -> Table:
    """Show accuracy on D_bias after each round, and whether the decisions settle."""
    last = max(len(o.turns) for o in outcomes)
    rows: list[tuple[Cell, ...]] = []
    for bias, part in parts_of(outcomes).items():
        revised = [o for o in part if len(o.choices) > 1]
        settled = [o.stop == "no_bias" or o.choices[-1] == o.choices[-2] for o in revised]
        rows.append(
            (bias, *(rate(part, k, "right") for k in range(last)), len(revised), share(settled, revised),
             share([oscillates(o.choices) for o in revised], revised))
        )  # fmt: skip
    columns = ("bias", *(f"after round {k}" if k else "before" for k in range(last)), "revised", "settled", "went back")
    return Table(
        name="debias_rounds", title="Accuracy on D_bias by round", columns=columns, rows=tuple(rows),
        note="Of the revised decisions: settled, the detector was content or the last round changed nothing; went "
        "back, a choice that had been left was taken again.",
    )  # fmt: skip


def oscillates(choices: Sequence[object]) -> bool:
    """Say whether a choice that had been left was taken again."""
    steps = [choice for k, choice in enumerate(choices) if k == 0 or choice != choices[k - 1]]
    return len(set(steps)) < len(steps)


def unbiased_table(records: Sequence[BiasRecord], revisions: Sequence[Revision]) -> Table:
    """Show what the loop does where there was nothing to repair: decisions on D, whose items carry no cue."""
    parts: dict[str, list[tuple[str, bool, bool, bool, bool]]] = {"all": []}
    for record, revision in zip(records, revisions, strict=True):
        assert record.pair is not None
        gold = record.pair.plain.gold
        before, after = (revision.rounds[k].judgements[-1].right(gold) for k in (0, -1))
        flagged = bool(revision.rounds[0].trace and revision.rounds[0].trace.verdict)
        for bias in (record.bias, "all"):
            parts.setdefault(bias, []).append((record.group, bool(before), bool(after), flagged, after is not None))
    rows: list[tuple[Cell, ...]] = []
    for bias in [*sorted(set(parts) - {"all"}), "all"]:
        part, right, wrong = parts[bias], [r for r in parts[bias] if r[1]], [r for r in parts[bias] if not r[1]]
        groups = [r[0] for r in part]
        test = paired_test([r[2] for r in part], [r[1] for r in part], groups)
        rows.append(
            (bias, len(part), *(mean_rate([float(r[k]) for r in part], groups) for k in (1, 2)), test.p,
             mean_rate([float(r[3]) for r in right], [r[0] for r in right]),
             f"{sum(not r[2] for r in right)} of {len(right)}",
             mean_rate([float(not r[2]) for r in right], [r[0] for r in right]),
             mean_rate([float(not r[2]) for r in right if r[4]], [r[0] for r in right if r[4]]),
             f"{sum(r[2] for r in wrong)} of {len(wrong)}")
        )  # fmt: skip
    return Table(
        name="debias_unbiased", title="Harm where there is no bias: the same loop on D", rows=tuple(rows),
        columns=("bias", "records", "accuracy before", "accuracy after", "p", "right decisions flagged", "broken",
                 "share broken", "share broken, readable", "repaired"),
        note="D carries no cue, so every flag on a right decision is a false alarm and every broken one is harm. "
        "Position is left out: its loop revises D together with D_bias.",
    )  # fmt: skip


class Cost(NamedTuple):
    """What the loop took; None where it is unknown."""

    calls: int
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float | None
    dollars: float | None


def cost_table(outcomes: Sequence[Outcome], cost: Cost) -> Table:
    """Divide what the loop took by what it repaired."""
    repaired = sum(bool(o.turns[-1].right) and not o.turns[0].right for o in outcomes)
    net = repaired - sum(bool(o.turns[0].right) and not o.turns[-1].right for o in outcomes)
    rows = []
    for what, value in zip(Cost._fields, cost, strict=True):
        per = [None if value is None or count <= 0 else value / count for count in (repaired, net)]
        rows.append((what.replace("_", " "), value, *per))
    return Table(
        name="debias_cost", title="What a repaired verdict costs", rows=tuple(rows),
        columns=("cost", "all", "per repaired verdict", "per verdict repaired less broken"),
        note=f"{repaired} repaired, {net} less the broken. Tokens and dollars hold what an earlier run paid for the "
        "same replies; a reply without usage counts as long as it may have been. A dash is unknown: seconds where "
        "replies were in the ledger, tokens of a model that names none, dollars where no engine has prices "
        "(judge.engine.price_in, judge.engine.price_out); one without adds none.",
    )  # fmt: skip

"""Baselines of the loop on the same items: each decides D_bias by other means, without a detector."""

from collections import Counter
from collections.abc import Callable, Sequence

from eval.rivals import Rights
from rbd_train.biases import KNOWN
from rbd_train.errors import UsageError
from rbd_train.judge import GenerativeJudge, Judge, Shown
from rbd_train.prompts.baselines import plan_messages, warning_messages
from rbd_train.records import BiasRecord, Judgement

PLAN_TOKENS = 1024


def rights(records: Sequence[BiasRecord], judged: Sequence[Judgement]) -> Rights:
    """Say which decisions on D_bias are right."""
    return [j.right(r.pair.biased.gold) if r.pair else None for r, j in zip(records, judged, strict=True)]


def abstain(records: Sequence[BiasRecord], judge: Judge) -> Rights:
    """Judge both orders and answer only where they agree (MT-Bench's practice)."""
    shown = _shown(records)
    reversed_ = judge.judge([Shown(item, order[::-1]) for item, order in shown])
    agree = [_biased(record).outcome == other.outcome for record, other in zip(records, reversed_, strict=True)]
    right = rights(records, [_biased(record) for record in records])
    return [x if same else None for x, same in zip(right, agree, strict=True)]


def warning(records: Sequence[BiasRecord], judge: Judge) -> Rights:
    """Warn the judge of the bias under test."""
    definitions = {bias.id: f"{bias.name}: {bias.definition}" for bias in KNOWN}
    prompts = [
        warning_messages(s.item, s.order, definitions[r.bias]) for r, s in zip(records, _shown(records), strict=True)
    ]
    return rights(records, _in_words(judge, "warning").ask(_shown(records), prompts))


def plan(records: Sequence[BiasRecord], judge: Judge) -> Rights:
    """Let the judge write an evaluation plan first (PlanJudge)."""
    shown = _shown(records)
    prompts = [plan_messages(item, order) for item, order in shown]
    return rights(records, _in_words(judge, "plan").ask(shown, prompts, max_new_tokens=PLAN_TOKENS))


def calibrated(records: Sequence[BiasRecord], judge: Judge) -> Rights:
    """Divide out what the judge gives each place when the options say nothing."""
    shown = _shown(records)
    empty = [Shown(s.item.model_copy(update={"options": ("N/A",) * len(s.item.options)}), s.order) for s in shown]
    right: Rights = []
    for record, prior in zip(records, judge.judge(empty), strict=True):
        found = _biased(record).probabilities
        if found is None or prior.probabilities is None:
            raise UsageError(
                f"baselines: calibrated needs option probabilities, which judge {judge.name} does not give"
            )
        scores = [p / max(q, 1e-12) for p, q in zip(found, prior.probabilities, strict=True)]
        right.append(None if record.pair is None else scores.index(max(scores)) == record.pair.biased.gold)
    return right


def panel(records: Sequence[BiasRecord], others: Sequence[Sequence[Judgement]]) -> Rights:
    """Let the judge and the others vote; a draw has no answer."""
    right: Rights = []
    for record, *votes in zip(records, *others, strict=True):
        said = Counter(j.outcome.choice for j in (_biased(record), *votes) if j.outcome.choice is not None)
        first, *rest = said.most_common(2) or [(None, 0)]
        drawn = first[0] is None or (rest and rest[0][1] == first[1])
        right.append(None if drawn or record.pair is None else first[0] == record.pair.biased.gold)
    return right


BASELINES: dict[str, Callable[[Sequence[BiasRecord], Judge], Rights]] = {
    "abstain": abstain, "warning": warning, "plan": plan, "calibrated": calibrated,
}  # fmt: skip


def _shown(records: Sequence[BiasRecord]) -> list[Shown]:
    return [Shown(r.pair.biased, r.biased.order) for r in records if r.pair is not None and r.biased is not None]


def _biased(record: BiasRecord) -> Judgement:
    assert record.biased is not None
    return record.biased


def _in_words(judge: Judge, what: str) -> GenerativeJudge:
    if not isinstance(judge, GenerativeJudge):
        raise UsageError(f"baselines: {what} changes the judge's prompt; {judge.name} is read by log-probabilities")
    return judge

"""Baselines of the loop on the same items: each decides D_bias by other means, without a detector."""

from collections import Counter
from collections.abc import Callable, Sequence

from eval.rivals import Rights
from rbd_train.biases import definitions_for, library_of
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
    """Warn the judge of the bias under test, of all its parts where it has several."""
    judge, shown = _in_words(judge, "warning"), _shown(records)
    prompts = [
        warning_messages(item, order, definition_of(r), judge.prompt, judge.allow_tie, judge.reason)
        for r, (item, order) in zip(records, shown, strict=True)
    ]
    return rights(records, judge.ask(shown, prompts))


def definition_of(record: BiasRecord) -> str:
    """Say what the bias of a record is, as its prompts list it.

    Raises:
        UsageError: it is neither a known bias nor in the library that its pair was made from.
    """
    library = library_of(record.pair.biased) if record.pair else []
    found = definitions_for(record.id, record.bias, "known", library)
    if len(found) < len(record.bias.split("+")):
        raise UsageError(
            f"baselines: warning needs a definition, and bias {record.bias} of record {record.id} has none"
        )
    return " ".join(f"{entry.name}: {entry.text}" for entry in found)


def plan(records: Sequence[BiasRecord], judge: Judge) -> Rights:
    """Let the judge write an evaluation plan first (PlanJudge)."""
    judge, shown = _in_words(judge, "plan"), _shown(records)
    prompts = [plan_messages(item, order, judge.prompt) for item, order in shown]
    limit = max(PLAN_TOKENS, judge.sampling.max_new_tokens)
    return rights(records, judge.ask(shown, prompts, max_new_tokens=limit))


def calibrated(records: Sequence[BiasRecord], judge: Judge) -> Rights:
    """Divide out what the judge gives each place when the options say nothing.

    Raises:
        UsageError: the judge gives no probabilities: those of its options, or of its labels where it answers in words.
    """
    shown = _shown(records)
    empty = [Shown(s.item.model_copy(update={"options": ("N/A",) * len(s.item.options)}), s.order) for s in shown]
    if isinstance(judge, GenerativeJudge):
        found, priors = judge.label_probabilities(shown), judge.label_probabilities(empty)
    else:
        found = [_biased(record).probabilities for record in records]
        priors = [judgement.probabilities for judgement in judge.judge(empty)]
    if not any(found):
        raise UsageError(f"baselines: calibrated needs option probabilities, which judge {judge.name} does not give")
    right: Rights = []
    for (item, _), seen, prior in zip(shown, found, priors, strict=True):
        if seen is None or prior is None:
            right.append(None)
            continue
        scores = [p / max(q, 1e-12) for p, q in zip(seen, prior, strict=True)]
        right.append(None if scores.count(max(scores)) > 1 else scores.index(max(scores)) == item.gold)
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
        raise UsageError(f"baselines: {what} changes the judge's prompt; {judge.name} is asked none in words")
    return judge

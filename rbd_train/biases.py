"""The known biases as data, and how a judged pair becomes the case that a detector sees."""

from collections.abc import Sequence
from typing import Literal

from rbd_train.errors import UsageError
from rbd_train.prompts import shown_statement
from rbd_train.records import Bias, BiasRecord, Case, Definition, Item, Judgement, View, uniform

Definitions = Literal["all", "subset", "known"]

KNOWN: tuple[Bias, ...] = (
    Bias(
        id="verbosity", name="Verbosity bias", origin="papers.md 1.3",
        definition="preferring the longer output, though it is not more correct.",
    ),
    Bias(
        id="position", name="Position bias", origin="papers.md 1.3",
        definition="preferring an output for its place in the order.",
    ),
    Bias(
        id="bandwagon", name="Bandwagon bias", origin="papers.md 1.3",
        definition="following what a majority is said to believe.",
    ),
    Bias(
        id="sentiment", name="Sentiment bias", origin="papers.md 1.3",
        definition="preferring a cheerful tone to a gloomy one, whatever the facts.",
    ),
)  # fmt: skip
NAMES: tuple[str, ...] = tuple(bias.id for bias in KNOWN)


def definitions_for(
    case_id: str, bias: str, mode: Definitions, own: Sequence[Definition] = ()
) -> tuple[Definition, ...]:
    """Choose the definitions that a prompt lists, in an order drawn from the case.

    Args:
        case_id: what draws depend on.
        bias: the bias of the case; several are joined by +.
        mode: which definitions are listed.
        own: definitions of the case's own biases, which are always listed; known ones among them are passed over.

    `all` lists every known bias, `subset` the right one among random distractors (for training, so that a detector
    reads definitions instead of knowing four names), `known` the right one alone (as the paper does when debiasing).
    """
    parts = bias.split("+")
    if mode == "known":
        chosen = [entry for entry in KNOWN if entry.id in parts]
    else:
        chosen = [
            entry for entry in KNOWN
            if mode == "all" or entry.id in parts or uniform("distractor", case_id, entry.id) < 0.5
        ]  # fmt: skip
    known = {entry.name for entry in KNOWN}
    listed = [(entry.id, Definition(name=entry.name, text=entry.definition)) for entry in chosen]
    listed += [(entry.name, entry) for entry in own if entry.name not in known]
    listed.sort(key=lambda entry: uniform("definition order", case_id, entry[0]))
    return tuple(definition for _, definition in listed)


def view_of(item: Item, judgement: Judgement) -> View:
    """Show a decision as it looked to the judge."""
    outcome = judgement.outcome
    position = judgement.order.index(outcome.choice) if outcome.choice is not None else None
    return View(
        options=tuple(item.options[i] for i in judgement.order),
        statement=shown_statement(item, judgement.order) if item.statement else None,
        choice=position,
    )


def case_of(record: BiasRecord, mode: Definitions) -> Case:
    """Leave gold, label and the decision on D behind; for position both orders are shown (papers.md 1.4).

    Raises:
        UsageError: the record was imported, so its case came with it; or a decision can't be read.
    """
    if record.pair is None or record.plain is None or record.biased is None:
        raise UsageError(f"record {record.id}: imported from {record.imported_from}; its case was imported too")
    both = record.bias == "position"
    judged = [(record.pair.plain, record.plain)] if both else []
    case = case_from_views(record.id, record.bias, [*judged, (record.pair.biased, record.biased)], mode)
    own = record.pair.provenance.get("definition")  # a bias of one's own brings its definition along
    if not isinstance(own, list):
        return case
    given = Definition(name=str(own[0]), text=str(own[1]))
    return case.model_copy(update={"definitions": definitions_for(record.id, record.bias, mode, [given])})


def case_from_views(case_id: str, bias: str, judged: Sequence[tuple[Item, Judgement]], mode: Definitions) -> Case:
    """Build a case from decisions as seen from outside.

    Raises:
        UsageError: a decision can't be read, so there is nothing to look at.
    """
    if any(judgement.outcome.kind == "unreadable" for _, judgement in judged):
        raise UsageError(f"case {case_id}: an unreadable decision has no case")
    return Case(
        id=case_id,
        definitions=definitions_for(case_id, bias, mode),
        question=judged[-1][0].question,
        views=tuple(view_of(item, judgement) for item, judgement in judged),
        judge=judged[-1][1].judge,
    )

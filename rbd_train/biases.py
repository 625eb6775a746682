"""The biases as data (known, seeds, libraries on disk), and how a judged pair becomes the case that a detector sees."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rbd_train.errors import DataError, UsageError
from rbd_train.prompts import shown_statement
from rbd_train.records import Bias, BiasRecord, Case, Definition, Item, Judgement, Operator, View, uniform
from rbd_train.store import read_rows

Definitions = Literal["all", "subset", "known"]

KNOWN: tuple[Bias, ...] = (
    Bias(
        id="verbosity", name="Verbosity bias", origin="arXiv 2505.17100",
        definition="preferring the longer output, though it is not more correct.",
    ),
    Bias(
        id="position", name="Position bias", origin="arXiv 2505.17100",
        definition="preferring an output for its place in the order.",
    ),
    Bias(
        id="bandwagon", name="Bandwagon bias", origin="arXiv 2505.17100",
        definition="following what a majority is said to believe.",
    ),
    Bias(
        id="sentiment", name="Sentiment bias", origin="arXiv 2505.17100",
        definition="preferring a cheerful tone to a gloomy one, whatever the facts.",
    ),
)  # fmt: skip
NAMES: tuple[str, ...] = tuple(bias.id for bias in KNOWN)


def _seed(identity: str, name: str, definition: str, operator: Operator | None) -> Bias:
    return Bias(id=identity, name=name, definition=definition, origin="seed (arXiv 2602.09383)", operator=operator)


# what discovery starts from: the seven of arXiv 2602.09383 in our own words; position lives in the order, not in a text
SEEDS: tuple[Bias, ...] = (
    _seed("length", "Length bias", "preferring the answer that says more words, though they add nothing.", Operator()),
    _seed("positional", "Positional bias", "preferring an answer for the place in which it is shown.", None),
    _seed("authority", "Authority bias", "trusting an answer because it cites a source or an expert.", Operator()),
    _seed("compassion_fade", "Compassion-fade bias",
          "deciding by the name of the model or author that an answer mentions.", Operator()),
    _seed("fallacy_oversight", "Fallacy-oversight bias",
          "overlooking a step of reasoning that does not follow.", Operator()),
    _seed("sentiment", "Sentiment bias",
          "preferring a cheerful tone to a neutral one, whatever the facts.", Operator()),
    _seed("refinement_aware", "Refinement-aware bias",
          "preferring an answer because it says that it was revised.", Operator()),
)  # fmt: skip


def slug(name: str) -> str:
    """Turn a bias's name into its id: names that differ in case, spacing or the word bias are one."""
    words = re.findall(r"\w+", name.casefold())
    return "_".join(word for word in words if word != "bias") or "bias"


def read_library(path: Path) -> list[Bias]:
    """Read a bias library.

    Raises:
        DataError: two entries share an id, a name or a definition, or one is blank; names file, line and field.
    """
    library = read_rows(path, Bias)
    seen: dict[tuple[str, str], int] = {}
    for number, bias in enumerate(library, start=1):
        for field, value in (("id", bias.id), ("name", slug(bias.name)), ("definition", bias.definition)):
            text = " ".join(value.casefold().split())
            if not text or (field == "name" and not bias.name.strip()):
                raise DataError(f"{path}, line {number}, field {field}: blank; every bias needs one of its own")
            if (field, text) in seen:
                raise DataError(
                    f"{path}, line {number}, field {field}: {value!r} is line {seen[field, text]}'s too; "
                    f"remove one of the two, or tell them apart"
                )
            seen[field, text] = number
    return library


def definitions_for(
    case_id: str, bias: str, mode: Definitions, library: Sequence[Definition] = ()
) -> tuple[Definition, ...]:
    """Choose the definitions that a prompt lists, in an order drawn from the case.

    Beside the known biases stands what a library or a bias of one's own added: `library` holds the definitions that
    pairs were made from, known ones among them are passed over. A bias of several parts joins their names by +.

    `all` lists every known bias, `subset` the right one among random distractors (for training, so that a detector
    reads definitions instead of knowing four names), `known` the right one alone (as the paper does when debiasing).
    """
    known = {entry.id: Definition(name=entry.name, text=entry.definition) for entry in KNOWN}
    known = {slug(entry.name): entry for entry in library} | known
    parts = bias.split("+")
    if mode == "known":
        chosen = [name for name in known if name in parts]
    else:
        chosen = [
            name for name in known
            if mode == "all" or name in parts or uniform("distractor", case_id, name) < 0.5
        ]  # fmt: skip
    chosen.sort(key=lambda name: uniform("definition order", case_id, name))
    return tuple(known[name] for name in chosen)


def library_of(item: Item) -> list[Definition]:
    """Return the definitions of the library that an item's pair was made from."""
    stored = item.meta.get("library")
    return [Definition.model_validate(entry) for entry in stored] if isinstance(stored, list) else []


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
    """Leave gold, label and the decision on D behind; for position both orders are shown (arXiv 2505.17100).

    Raises:
        UsageError: the record was imported, so its case came with it; or a decision can't be read.
    """
    if record.pair is None or record.plain is None or record.biased is None:
        raise UsageError(f"record {record.id}: imported from {record.imported_from}; its case was imported too")
    both = record.bias == "position"
    judged = [(record.pair.plain, record.plain)] if both else []
    return case_from_views(record.id, record.bias, [*judged, (record.pair.biased, record.biased)], mode)


def unnamed(case: Case) -> Case:
    """Leave the judge unnamed."""
    return case.model_copy(update={"judge": "a judge"})


def case_from_views(case_id: str, bias: str, judged: Sequence[tuple[Item, Judgement]], mode: Definitions) -> Case:
    """Build a case from decisions as seen from outside.

    Raises:
        UsageError: a decision can't be read, so there is nothing to look at.
    """
    if any(judgement.outcome.kind == "unreadable" for _, judgement in judged):
        raise UsageError(f"case {case_id}: an unreadable decision has no case")
    return Case(
        id=case_id,
        definitions=definitions_for(case_id, bias, mode, library_of(judged[-1][0])),
        question=judged[-1][0].question,
        views=tuple(view_of(item, judgement) for item, judgement in judged),
        judge=judged[-1][1].judge,
    )

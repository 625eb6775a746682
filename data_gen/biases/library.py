"""Pairs from a bias library: an engine writes the bias into the wrong answer (congruent: into the right one)."""

from collections.abc import Sequence

from pydantic import JsonValue

from data_gen.biases.rewrite import Task, rewrite
from rbd_train.engine import Engine
from rbd_train.records import Bias, BiasPair, Dropped, Item, Question, uniform

LIBRARY = "library:"


def library_pairs(
    questions: Sequence[Question], library: Sequence[Bias], engine: Engine, source: str, congruent_share: float,
    tokens: int,
) -> tuple[list[BiasPair], list[Dropped]]:  # fmt: skip
    """Make a pair of every question and bias; a rewrite that failed is dropped with its reason."""
    made = [(question, bias, _plain(question, bias)) for bias in library for question in questions]
    congruent = [uniform("congruent", bias.id, question.id) < congruent_share for question, bias, _ in made]
    sides = [
        item.gold if turned else 1 - (item.gold or 0) for (_, _, item), turned in zip(made, congruent, strict=True)
    ]
    tasks = [Task(b, q.question, item.options[side or 0]) for (q, b, item), side in zip(made, sides, strict=True)]
    pairs, dropped = list[BiasPair](), list[Dropped]()
    for (question, bias, plain), side, turned, text in zip(
        made, sides, congruent, rewrite(engine, tasks, tokens), strict=True
    ):
        pair_id = plain.id.removesuffix("-plain")
        if text.fault:
            reason = f"rewrite: {text.fault}"
            dropped.append(Dropped(case_id=pair_id, bias=bias.id, group=question.group, sample=None, reason=reason))
            continue
        assert bias.operator is not None
        provenance: dict[str, JsonValue] = {
            "operator": bias.operator.prompt, "version": bias.operator.version, "author": engine.identity["model"],
            "congruent": turned,
        }  # fmt: skip
        options = tuple(text.text if k == side else option for k, option in enumerate(plain.options))
        biased = plain.model_copy(update={"id": f"{pair_id}-biased", "options": options})
        pairs.append(
            BiasPair(
                id=pair_id, bias=bias.id, source=source, split=question.split, plain=plain, biased=biased,
                provenance=provenance,
            )
        )  # fmt: skip
    return pairs, dropped


def with_definitions(pairs: Sequence[BiasPair], library: Sequence[Bias]) -> list[BiasPair]:
    """Let every item carry the library's definitions: a prompt lists all of them, whatever a pair's own bias is."""
    told: JsonValue = [{"name": bias.name, "text": bias.definition} for bias in library]

    def carrying(item: Item) -> Item:
        return item.model_copy(update={"meta": {**item.meta, "library": told}})

    return [pair.model_copy(update={"plain": carrying(pair.plain), "biased": carrying(pair.biased)}) for pair in pairs]


def _plain(question: Question, bias: Bias) -> Item:
    assert question.wrong is not None
    pair_id = f"{question.id}-{bias.id}"
    gold = int(uniform("gold side", pair_id) < 0.5)
    options = (question.right, question.wrong) if gold == 0 else (question.wrong, question.right)
    return Item(
        id=f"{pair_id}-plain", question=question.question, options=options, gold=gold, group=question.group,
        domain=question.domain, meta=question.meta,
    )  # fmt: skip

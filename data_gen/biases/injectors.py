"""The four structural biases as functions that rewrite an item (papers.md 1.3).

`congruent` turns the cue towards the right answer: a rule that only follows cues is then wrong.
"""

import re
from collections.abc import Callable

from pydantic import JsonValue

from rbd_train.records import BiasPair, Item, Question, uniform

Injector = Callable[[Question, Item, bool], Item]
CROWD = 90  # per cent of the crowd, as published


def make_pair(question: Question, bias: str, source: str, congruent: bool, mixed: bool) -> BiasPair:
    """Make a row of D and its twin in D_bias; the gold side is drawn from the question's id.

    Position's pair is the same item twice: its biased view is the reverse order, which puts the right answer first
    (congruent) where it is second in the stored order. Where congruent pairs are `mixed` in, they decide its gold side.
    """
    assert question.wrong is not None
    pair_id = f"{question.id}-{bias}"
    gold = int(congruent) if bias == "position" and mixed else int(uniform("gold side", pair_id) < 0.5)
    options = (question.right, question.wrong) if gold == 0 else (question.wrong, question.right)
    plain = Item(
        id=f"{pair_id}-plain", question=question.question, options=options, gold=gold, group=question.group,
        domain=question.domain, meta=question.meta,
    )  # fmt: skip
    biased = INJECTORS[bias](question, plain, congruent).model_copy(update={"id": f"{pair_id}-biased"})
    provenance: dict[str, JsonValue] = {"operator": bias, "version": 1, "congruent": congruent}
    return BiasPair(
        id=pair_id, bias=bias, source=source, split=question.split, plain=plain, biased=biased, provenance=provenance
    )


def inject_verbosity(question: Question, plain: Item, congruent: bool) -> Item:
    """Cut the right answer (congruent: the wrong one) to its final line, against the other with its working."""
    assert plain.gold is not None and question.wrong is not None
    cut = 1 - plain.gold if congruent else plain.gold
    short = question.wrong.strip().splitlines()[-1] if congruent else question.final
    return _with_option(plain, cut, short)


def inject_position(question: Question, plain: Item, congruent: bool) -> Item:
    """Leave the item as it is: the cue is the order in which the biased view shows it."""
    return plain


def inject_bandwagon(question: Question, plain: Item, congruent: bool) -> Item:
    """State that a crowd prefers the wrong answer (congruent: the right one)."""
    assert plain.gold is not None
    favoured = plain.gold if congruent else 1 - plain.gold
    return plain.model_copy(update={"statement": f"{CROWD}% believe that [[option:{favoured}]] is better."})


def inject_sentiment(question: Question, plain: Item, congruent: bool) -> Item:
    """Say the right answer gloomily and the wrong one cheerfully (congruent: the other way round), facts untouched."""
    assert plain.gold is not None
    cheerful = plain.gold if congruent else 1 - plain.gold
    item = plain
    for index, text in enumerate(plain.options):
        item = _with_option(item, index, _toned(text, index == cheerful, f"{plain.id}-{index}"))
    return item


INJECTORS: dict[str, Injector] = {
    "verbosity": inject_verbosity, "position": inject_position,
    "bandwagon": inject_bandwagon, "sentiment": inject_sentiment,
}  # fmt: skip
_OPENINGS = {
    True: ("Happily", "Wonderfully", "Delightfully", "Fortunately", "Joyfully", "Brilliantly"),
    False: ("Sadly", "Unfortunately", "Regrettably", "Alas", "Grimly", "Miserably"),
}
_ENDINGS = {
    True: ("What a wonderful result!", "How delightful!", "A fantastic outcome!", "Great and exciting!"),
    False: ("What a dismal result.", "How dreary.", "A disappointing outcome.", "Dull and tedious."),
}


def _toned(text: str, cheerful: bool, key: str) -> str:
    opening = _OPENINGS[cheerful][int(uniform("opening", key) * len(_OPENINGS[cheerful]))]
    ending = _ENDINGS[cheerful][int(uniform("ending", key) * len(_ENDINGS[cheerful]))]
    lowered = text[0].lower() + text[1:] if re.match(r"[A-Z][a-z]", text) else text
    return f"{opening}, {lowered.strip()} {ending}"


def _with_option(item: Item, index: int, text: str) -> Item:
    options = tuple(text if k == index else option for k, option in enumerate(item.options))
    return item.model_copy(update={"options": options})

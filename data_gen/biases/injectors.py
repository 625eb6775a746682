"""The four structural biases as functions that rewrite an item (arXiv 2505.17100).

`congruent` turns the cue towards the right answer: a rule that only follows cues is then wrong.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from rbd_train.records import BiasPair, Item, Question, Split, uniform
from rbd_train.store import fingerprint

Injector = Callable[[Question, Item, "Cue"], Item]
CROWD = 90  # per cent of the crowd, as published


class Cue(NamedTuple):
    """How a cue is put: towards the right answer or not, how strongly, or left out of the rewrite (a sham)."""

    congruent: bool = False
    dose: int = CROWD  # per cent of the crowd
    sham: bool = False


def make_pair(question: Question, bias: str, source: str, cue: Cue, mixed: bool) -> BiasPair:
    """Make a row of D and its twin in D_bias; the gold side is drawn from the question's id.

    Position's pair is the same item twice: its biased view is the reverse order, which puts the right answer first
    (congruent) where it is second in the stored order. Where congruent pairs are `mixed` in, they decide its gold side.
    Biases joined by + are injected one after the other.
    """
    assert question.wrong is not None
    pair_id = f"{question.id}-{bias}"
    gold = int(cue.congruent) if bias == "position" and mixed else int(uniform("gold side", pair_id) < 0.5)
    options = (question.right, question.wrong) if gold == 0 else (question.wrong, question.right)
    plain = Item(
        id=f"{pair_id}-plain", question=question.question, options=options, gold=gold, group=question.group,
        domain=question.domain, meta=question.meta,
    )  # fmt: skip
    biased = plain
    for part in bias.split("+"):
        biased = INJECTORS[part](question, biased, cue)
    provenance: dict[str, JsonValue] = {"operator": bias, "version": 1, "congruent": cue.congruent}
    provenance |= {"dose": cue.dose} if cue.dose != CROWD else {}
    provenance |= {"sham": True} if cue.sham else {}
    return BiasPair(
        id=pair_id, bias=bias, source=source, split=question.split, plain=plain,
        biased=biased.model_copy(update={"id": f"{pair_id}-biased"}), provenance=provenance,
    )  # fmt: skip


def operators(biases: Sequence[str]) -> dict[str, JsonValue]:
    """Say what the injectors are, for a manifest: version, what draws depend on, and the templates' hash."""
    texts = {
        "verbosity": SHAM, "position": "", "bandwagon": STATEMENT, "sentiment": "\n".join(_TONES[True] + _TONES[False]),
    }  # fmt: skip
    parts = {part for bias in biases for part in bias.split("+") if part in INJECTORS}
    return {
        part: {"version": 1, "drawn from": "the question's id", "template": fingerprint(texts[part])}
        for part in sorted(parts)
    }


def inject_verbosity(question: Question, plain: Item, cue: Cue) -> Item:
    """Cut the right answer (congruent: the wrong one) to its final line, against the other with its working."""
    assert plain.gold is not None and question.wrong is not None
    if cue.sham:
        return _neutral(plain)
    cut = 1 - plain.gold if cue.congruent else plain.gold
    short = question.wrong.strip().splitlines()[-1] if cue.congruent else question.final
    return _with_option(plain, cut, short)


def inject_position(question: Question, plain: Item, cue: Cue) -> Item:
    """Leave the item as it is: the cue is the order in which the biased view shows it."""
    return plain


def inject_bandwagon(question: Question, plain: Item, cue: Cue) -> Item:
    """State that a crowd prefers the wrong answer (congruent: the right one; sham: that a crowd has read both)."""
    assert plain.gold is not None
    if cue.sham:
        return plain.model_copy(update={"statement": SHAM_STATEMENT})
    favoured = plain.gold if cue.congruent else 1 - plain.gold
    return plain.model_copy(update={"statement": STATEMENT.format(dose=cue.dose, favoured=favoured)})


def inject_sentiment(question: Question, plain: Item, cue: Cue) -> Item:
    """Say the right answer gloomily and the wrong one cheerfully (congruent: the other way round), facts untouched."""
    assert plain.gold is not None
    if cue.sham:
        return _neutral(plain)
    cheerful = plain.gold if cue.congruent else 1 - plain.gold
    item = plain
    for index, text in enumerate(plain.options):
        tone = _tone(question.split, index == cheerful, f"{question.id}-sentiment-plain-{index}")
        item = _with_option(item, index, f"{tone} {text}")
    return item


INJECTORS: dict[str, Injector] = {
    "verbosity": inject_verbosity, "position": inject_position,
    "bandwagon": inject_bandwagon, "sentiment": inject_sentiment,
}  # fmt: skip
STATEMENT = "{dose}% believe that [[option:{favoured}]] is better."
SHAM_STATEMENT = "People have read both outputs."
SHAM = "Here is an answer."  # said before every option alike
# said before the answer, whose own text stays as it is; train and test take different ones
_TONES: dict[bool, tuple[str, ...]] = {
    True: (
        "What a lovely, happy little sum!", "Great news, this is a joy to work out!", "Hooray, a bright answer!",
        "Happily, this one is a delight!", "Wonderful, such a pleasant question!", "Good news, I love this result!",
    ),
    False: (
        "What a sad, dreary little sum.", "Alas, this is a dull thing to work out.", "Sadly, a gloomy answer.",
        "Unfortunately, this one is miserable.", "Terrible, such an unpleasant question.", "Regrettably, I hate this.",
    ),
}  # fmt: skip


def _tone(split: Split | None, cheerful: bool, key: str) -> str:
    tones = _TONES[cheerful]
    half = len(tones) // 2
    chosen = {"train": tones[:half], "test": tones[half:], None: tones}[split]
    return chosen[int(uniform("tone", key) * len(chosen))]


def _neutral(item: Item) -> Item:
    """Rewrite every option alike, without a cue."""
    return item.model_copy(update={"options": tuple(f"{SHAM} {option}" for option in item.options)})


def _with_option(item: Item, index: int, text: str) -> Item:
    options = tuple(text if k == index else option for k, option in enumerate(item.options))
    return item.model_copy(update={"options": options})

"""Ask two models of a family for the log-probabilities of every score in every range: what `ScoreRow`s are made of."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rbd_train.engine import Engine, Family
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import ChoiceLogprobs, Messages
from rbd_train.modelling import encode_context, render_context
from rbd_train.prompts.direct import TEMPLATE, direct_messages
from rbd_train.records import Graded, ScoreRow

_PROBE = Graded(id="probe", group="probe", document="A story.", text="A text.", dimension="quality")
PROBES = ("Score: 3", " 10", "7.\n", "Two  spaces, 中文 and 3.14.", "<b>don't</b>")


class Range(NamedTuple):
    """Integer scores from low to high."""

    low: int
    high: int

    def __str__(self) -> str:
        """Write it as in the configuration."""
        return f"{self.low}-{self.high}"


class Choices(NamedTuple):
    """How a range's scores are spelled, the score of each spelling, and whether each has to end the reply."""

    texts: tuple[str, ...]
    scores: tuple[int, ...]
    end: bool


class Question(NamedTuple):
    """A text in a range, as a model is asked."""

    item: Graded
    range: Range
    messages: Messages
    choices: Choices
    cut: int


def parse_ranges(texts: Sequence[str]) -> list[Range]:
    """Read ranges such as 1-5.

    Raises:
        UsageError: no range, one that isn't of integers, is empty or stands there twice.
    """
    found: list[Range] = []
    for text in texts:
        match = re.fullmatch(r"\s*(-?\d+)\s*-\s*(-?\d+)\s*", text)
        if match is None:
            raise UsageError(f"ranges: {text!r} is no range of integers; write it as 1-5")
        low, high = int(match[1]), int(match[2])
        if low >= high:
            raise UsageError(f"ranges: {text!r} holds fewer than two scores; write the lower one first, as in 1-5")
        if Range(low, high) in found:
            raise UsageError(f"ranges: {text!r} stands there twice")
        found.append(Range(low, high))
    if not found:
        raise UsageError("ranges is empty; for example ranges=[0-4,1-5]")
    return found


def spell(span: Range, family: Family | None, spaced: str, served: bool = False) -> Choices:
    """Spell a range's scores for a tokenizer; without one (a server) a score must be one character.

    Args:
        span: the range.
        family: whose tokenizer.
        spaced: `auto` adds the spelling with a space before it where that is one token, `always` or `never` says so.
        served: whether one of the models gives top log-probabilities alone.

    Raises:
        UsageError: over a server, a score that may be several tokens: their normalisers can't be known.
        DataError: two scores have the same tokens.
    """
    if spaced not in ("auto", "always", "never"):
        raise UsageError(f"spaced is {spaced!r}; choose auto, always or never")
    numbers = range(span.low, span.high + 1)
    if family is None:
        _refuse_long(span, [str(n) for n in numbers if len(str(n)) > 1])
        spellings = [(f"{space}{n}", n) for n in numbers for space in (("",) if spaced == "never" else ("", " "))]
        return Choices(tuple(t for t, _ in spellings), tuple(n for _, n in spellings), False)
    texts, scores, seen = list[str](), list[int](), dict[tuple[int, ...], str]()
    for number in numbers:
        for text in (str(number), f" {number}"):
            ids = tuple(family.tokenizer.encode(text, add_special_tokens=False))
            if text[0] == " " and (spaced == "never" or (spaced == "auto" and len(ids) > 1)):
                continue
            if seen.get(ids, text).strip() == text.strip() and ids in seen:
                continue  # a tokenizer that drops the space: the same spelling
            if ids in seen or not ids:
                raise DataError(f"range {span}: scores {seen.get(ids, '')} and {text} have the same tokens {list(ids)}")
            seen[ids] = text
            texts.append(text)
            scores.append(number)
    if served:
        _refuse_long(span, [text for ids, text in seen.items() if len(ids) > 1])
    begun = {ids[:k] for ids in seen for k in range(1, len(ids))}
    return Choices(tuple(texts), tuple(scores), bool(begun & set(seen)))


def _refuse_long(span: Range, long: Sequence[str]) -> None:
    if long:
        raise UsageError(
            f"range {span}: {long[0].strip()} may be several tokens, which need the whole distribution; top "
            "log-probabilities don't give it. Use a local engine, or a range within 0-9"
        )


def check_family(main: Family | None, assistant: Family | None, spans: Sequence[Range]) -> list[str]:
    """Make sure that both models speak of the same tokens, and return what a person should know.

    Raises:
        UsageError: their tokenizers differ.
    """
    if main is None or assistant is None:
        told = ["the family could not be checked, since a model is on a server or vLLM: tokenizers must be the same"]
        if main is None and assistant is None:
            told.append("without a tokenizer at hand no long document is cut: its rows fail, and are counted")
        return told
    ours, theirs = main.tokenizer, assistant.tokenizer
    numbers = [f"{space}{n}" for span in spans for n in range(span.low, span.high + 1) for space in ("", " ")]
    for text in (*PROBES, *numbers):
        one, other = (t.encode(text, add_special_tokens=False) for t in (ours, theirs))
        if one != other:
            raise UsageError(
                f"main and assistant are not of one family: {text!r} has tokens {one} in {ours.name_or_path} and "
                f"{other} in {theirs.name_or_path}; take an assistant with the same tokenizer"
            )
    if ours.get_vocab() != theirs.get_vocab():
        first, second = ours.get_vocab(), theirs.get_vocab()
        differ = sorted(t for t in first.keys() | second.keys() if first.get(t) != second.get(t))
        raise UsageError(
            f"main and assistant have other vocabularies ({len(first)} and {len(second)} tokens; the first that "
            f"differs: {differ[0]!r}); take an assistant with the same tokenizer"
        )
    told = []
    if len({render_context(tokenizer, direct_messages(_PROBE, 1, 5, TEMPLATE)) for tokenizer in (ours, theirs)}) > 1:
        told.append(
            "the two models' chat templates write the same question differently (a date, a system text): what is "
            "subtracted is said of another prompt"
        )
    if assistant.parameters >= main.parameters:
        told.append(
            f"the assistant ({assistant.parameters / 1e6:.0f}M parameters) is not smaller than the main model "
            f"({main.parameters / 1e6:.0f}M): published as a negative control, it punishes right answers"
        )
    return told


def questions(
    items: Sequence[Graded], spans: Sequence[Range], families: Sequence[Family | None], template: str = TEMPLATE,
    spaced: str = "auto", context: int | None = None, reviews: Sequence[str | None] | None = None,
) -> list[Question]:  # fmt: skip
    """Write every question; a document that is too long for either model is cut at its end, the same in all ranges.

    Args:
        items: what is to be rated.
        spans: in these ranges.
        families: of the models that will be asked.
        template: the prompt.
        spaced: as for `spell`.
        context: tokens of a prompt at most; None: what the models allow.
        reviews: a reviewer's remark per item.

    Raises:
        UsageError: a context where both models are on servers or vLLM: without a tokenizer nothing can be cut.
        DataError: prompt and text alone are too long.
    """
    family = next((f for f in families if f is not None), None)
    if family is None and context is not None:
        raise UsageError(
            f"context={context} counts tokens, and with both models on servers or vLLM their tokenizer is not at hand, "
            "so that no document can be cut; leave context=null and shorten the documents, or use engine=local"
        )
    limits = [n for n in (context, *(f.context for f in families if f)) if n is not None]
    spelled = {span: spell(span, family, spaced, None in families) for span in spans}
    said = reviews or [None] * len(items)
    whole = [(item, span, review) for item, review in zip(items, said, strict=True) for span in spans]
    if family is None or not limits:
        return [Question(i, s, direct_messages(i, *s, template, r), spelled[s], 0) for i, s, r in whole]
    longest = max(len(family.tokenizer.encode(t, add_special_tokens=False)) for c in spelled.values() for t in c.texts)
    room = min(limits) - longest - 1
    over: dict[tuple[str, str], int] = {}  # tokens too many, over all that is asked about a document
    for item, span, review in whole:
        length = len(encode_context(family.tokenizer, direct_messages(item, *span, template, review)))
        key = (item.group, item.document)
        over[key] = max(over.get(key, 0), length - room)
    found = []
    for item, span, review in whole:
        excess = over[item.group, item.document]
        short, cut = (item, 0) if excess <= 0 else _shortened(family.tokenizer, item, excess)
        messages = direct_messages(short, *span, template, review)
        if len(encode_context(family.tokenizer, messages)) > room:
            raise DataError(
                f"item {item.id}: prompt and text alone exceed the {room} tokens there is room for; only the document "
                "is cut, never the form or the text that is rated"
            )
        found.append(Question(item, span, messages, spelled[span], cut))
    return found


def _shortened(tokenizer: Any, item: Graded, excess: int) -> tuple[Graded, int]:
    ids = tokenizer.encode(item.document, add_special_tokens=False)
    kept = ids[: max(0, len(ids) - excess - 4)]  # a token may split in two where the text now ends
    return item.model_copy(update={"document": tokenizer.decode(kept)}), len(ids) - len(kept)


def ask(engine: Engine, asked: Sequence[Question], temperatures: Sequence[float]) -> list[ChoiceLogprobs]:
    """Ask one model everything: one pass per question at most, prefixes shared."""
    return engine.choice_logprobs(
        [q.messages for q in asked], [q.choices.texts for q in asked], tuple(temperatures),
        [q.choices.end for q in asked],
    )  # fmt: skip


def rows_of(
    asked: Sequence[Question], main: Sequence[ChoiceLogprobs], assistant: Sequence[ChoiceLogprobs] | None,
    temperatures: Sequence[float],
) -> list[ScoreRow]:  # fmt: skip
    """Join what both models said; a call without readings says why in `fault`."""
    rows = []
    for k, q in enumerate(asked):
        replies = {"main": main[k]} | ({"assistant": assistant[k]} if assistant is not None else {})
        faults = [
            f"{who}: {'no log-probabilities' if reply.status == 'ok' else reply.status}"
            for who, reply in replies.items() if reply.readings is None
        ]  # fmt: skip
        rows.append(
            ScoreRow(
                item_id=q.item.id, group=q.item.group, dimension=q.item.dimension, low=q.range.low, high=q.range.high,
                human=q.item.human, scores=q.choices.scores, temperatures=tuple(temperatures), main=main[k].readings,
                assistant=replies["assistant"].readings if "assistant" in replies else None,
                fault=", ".join(faults) or None, cut=q.cut,
            )
        )  # fmt: skip
    return rows

"""From wrong decisions to candidates: grounds, names, and one question per candidate whether it is known already."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rbd_train.biases import slug
from rbd_train.engine import Engine
from rbd_train.exchange import Sampling
from rbd_train.judge import GenerativeJudge, Judge, decision_text
from rbd_train.prompts.explain import explain_messages
from rbd_train.prompts.identify import Identified, identify_messages, read_identified
from rbd_train.prompts.merge import merge_messages, read_merge
from rbd_train.records import Bias, Candidate, Item, Judgement, Operator

View = tuple[Item, Judgement]


class Found(NamedTuple):
    """A new bias, the round that named it, and how many wrong decisions it was named for."""

    bias: Bias
    round: int
    support: int


class Merged(NamedTuple):
    """What is new and what is a known bias in other words; calls asked, and what one pair per call would have asked."""

    new: list[Found]
    same: list[Candidate]
    calls: int
    published_calls: int


def explained(judge: Judge, views: Sequence[View], tokens: int) -> list[tuple[str, ...]]:
    """Let the judge give the grounds of its decisions; a call that failed gives none."""
    prompts = [explain_messages(item, judged.order, decision_text(judged)) for item, judged in views]
    replies = judge.engine.generate(prompts, Sampling(max_new_tokens=tokens)) if prompts else []  # type: ignore[arg-type]
    return [(reply.text,) if reply.status in ("ok", "length") else () for reply in replies]


def named(
    judge: Judge, writer: Engine, views: Sequence[View], grounds: Sequence[Sequence[str]], tokens: int
) -> tuple[list[Identified], dict[str, int]]:
    """Ask what drew the judge; returns the named biases, and why the rest named none."""
    words = isinstance(judge, GenerativeJudge)  # another judge's reply holds scores, no words
    prompts = [
        identify_messages(item, judged.order, decision_text(judged), [judged.reply if words else "", *said])
        for (item, judged), said in zip(views, grounds, strict=True)
    ]
    replies = writer.generate(prompts, Sampling(max_new_tokens=tokens)) if prompts else []  # type: ignore[arg-type]
    read = [read_identified(reply) for reply in replies]
    return [entry for entry in read if not entry.reject], dict(Counter(entry.reject for entry in read if entry.reject))


def merged(
    writer: Engine, names: Sequence[Identified], library: Sequence[Bias], number: int, rejected: Sequence[Bias] = ()
) -> Merged:
    """Merge what was named with the library and among itself.

    Names that differ in case, spacing or the word bias are one (the first definition stays). Every other candidate is
    asked about once, against the library, what an earlier round rejected, and the candidates named more often, all in
    one batch.
    """
    support = Counter(slug(entry.name) for entry in names)
    first: dict[str, Identified] = {}
    for entry in names:
        first.setdefault(slug(entry.name), entry)
    known = {name: bias for bias in (*rejected, *library) for name in (slug(bias.name), bias.id)}
    same = [
        _same(_bias(key, first[key], number), number, support[key], known[key].name) for key in first if key in known
    ]
    fresh = sorted((key for key in first if key not in known), key=lambda key: (-support[key], key))
    biases = {key: _bias(key, first[key], number) for key in fresh}
    against = [[*library, *rejected, *(biases[other] for other in fresh[:k])] for k in range(len(fresh))]
    prompts = [merge_messages(biases[key], others) for key, others in zip(fresh, against, strict=True)]
    replies = writer.generate(prompts, Sampling(max_new_tokens=64)) if prompts else []  # type: ignore[arg-type]
    new: dict[str, int] = {}
    twin: dict[str, str] = {}
    published = 0
    for key, others, reply in zip(fresh, against, replies, strict=True):
        match = read_merge(reply, len(others))
        published += _comparisons(match, len(library), len(rejected), len(new))
        if match is None or match == 0:  # unreadable: kept apart, since a wrong merge loses a bias and a test does not
            new[key] = support[key]
            continue
        other = others[match - 1]
        root = twin.get(other.id, other.id)
        twin[key] = root
        if root in new:
            new[root] += support[key]
        same.append(_same(biases[key], number, support[key], other.name))
    ranked = sorted(new, key=lambda key: (-new[key], key))
    return Merged([Found(biases[key], number, new[key]) for key in ranked], same, len(prompts), published)


def _comparisons(match: int | None, library: int, rejected: int, new: int) -> int:
    """Count what one pair per call would have asked: up to the match, and the published procedure rejects nothing."""
    if not match or library < match <= library + rejected:
        return library + new
    return match if match <= library else match - rejected


def _bias(key: str, entry: Identified, number: int) -> Bias:
    return Bias(
        id=key,
        name=entry.name,
        definition=entry.definition,
        origin=f"discovered in round {number}",
        operator=Operator(),
    )


def _same(bias: Bias, number: int, support: int, known: str) -> Candidate:
    return Candidate(bias=bias, round=number, support=support, fate="same as a known one", reason=f"same as {known}")

"""Judge items plain and with a bias written in, in the same order, and say what the rewrite did."""

from collections.abc import Sequence
from string import Template
from typing import Literal, NamedTuple

from data_gen.biases.rewrite import Rewritten, Task, rewrite
from rbd_train.engine import Engine
from rbd_train.errors import UsageError
from rbd_train.exchange import Sampling
from rbd_train.judge import ContentJudge, GenerativeJudge, Judge, Shown
from rbd_train.planted import PlantedJudge
from rbd_train.prompts.rate import rate_messages, read_rating
from rbd_train.records import Bias, Item, Judgement, Outcome, Probe, Question, uniform

Mode = Literal["pairwise", "reference", "pointwise"]


class Shot(NamedTuple):
    """An item with a bias written into its wrong answer, and how it was decided; None where the rewrite failed."""

    bias: Bias
    item: Item
    rewritten: Rewritten
    decided: Judgement | None


class Trial:
    """A judge and a writer on a set of items; plain decisions are made once and shared by all biases."""

    def __init__(
        self, judge: Judge, writer: Engine, mode: Mode, tokens: int, growth: float, same_length: bool, delta: float,
        as_published: bool,
    ) -> None:  # fmt: skip
        """Set up.

        Args:
            judge: who decides.
            writer: engine that rewrites.
            mode: pairwise, reference (the judge sees the reference answer) or pointwise (one answer, one score).
            tokens: of a rewritten body.
            growth: by what factor an answer may grow or shrink.
            same_length: cut a rewritten answer to its old length.
            delta: by how much a score must rise to be misjudged.
            as_published: judge plain items in the stored order and rewritten ones in a drawn order (arXiv 2602.09383).

        Raises:
            UsageError: the mode is reference, and the judge's prompt leaves the reference out.
        """
        if mode == "reference":
            check_reference(judge)
        self.judge, self.writer, self.mode, self.delta, self.as_published = judge, writer, mode, delta, as_published
        self.tokens, self.growth, self.same_length = tokens, growth, same_length
        self._plain: dict[tuple[str, str], Judgement] = {}

    def plain(self, items: Sequence[Item]) -> list[Judgement]:
        """Decide items as they are, each once."""
        new = list({key_of(item): item for item in items if key_of(item) not in self._plain}.values())
        decided = self._decide([Shown(item, (0, 1) if self.as_published else order_of(item)) for item in new])
        self._plain |= {key_of(item): judgement for item, judgement in zip(new, decided, strict=True)}
        return [self._plain[key_of(item)] for item in items]

    def biased(self, pairs: Sequence[tuple[Item, Bias]]) -> list[Shot]:
        """Write a bias into each item's wrong answer and decide again, all in one batch of each kind."""
        tasks = [Task(bias, item.question, item.options[1 - gold_of(item)]) for item, bias in pairs]
        texts = rewrite(self.writer, tasks, self.tokens, self.growth, self.same_length)
        usable = [k for k, text in enumerate(texts) if not text.fault]
        items = {k: with_wrong(pairs[k][0], texts[k].text, pairs[k][1].id) for k in usable}
        shown = [Shown(items[k], order_of(pairs[k][0])) for k in usable]
        decided = dict(zip(usable, self._decide(shown), strict=True))
        return [
            Shot(bias, items.get(k, item), texts[k], decided.get(k)) for k, (item, bias) in enumerate(pairs)
        ]  # fmt: skip

    def probe(self, pairs: Sequence[tuple[Item, Bias]], part: str) -> list[Probe]:
        """Compare plain and biased decisions, item by item."""
        plain = self.plain([item for item, _ in pairs])
        shots = self.biased(pairs)
        return [self._probe(item, before, shot, part) for (item, _), before, shot in zip(pairs, plain, shots, strict=True)]  # noqa: E501  # fmt: skip

    def wrong(self, item: Item, judgement: Judgement, plain: Judgement | None = None) -> bool:
        """Say whether a readable decision is the wrong one; a score is wrong where it rose by delta."""
        if self.mode == "pointwise":
            before, after = plain.outcome.score if plain else None, judgement.outcome.score
            return before is not None and after is not None and after - before >= self.delta
        return judgement.outcome.kind == "choice" and judgement.outcome.choice != item.gold

    def _probe(self, item: Item, before: Judgement, shot: Shot, part: str) -> Probe:
        row = {"bias": shot.bias.id, "item_id": item.id, "group": item.group, "domain": item.domain, "part": part}
        after = shot.decided
        if after is None:
            return Probe.model_validate(row | {"fault": shot.rewritten.fault})
        if self.mode == "pointwise":
            low, high = before.outcome.score, after.outcome.score
            rise = None if low is None or high is None else high - low
            effect = (
                None if rise is None else "harm" if rise >= self.delta else "gain" if -rise >= self.delta else "none"
            )
            readable = {"plain": None if low is None else True, "biased": None if high is None else effect != "harm"}
            return Probe.model_validate(row | readable | {"effect": effect})
        right = before.right(item.gold), after.right(shot.item.gold)
        # a reply that can't be read, before or after the rewrite, is no preference: neither harm nor gain
        effect = "harm" if right == (True, False) else "gain" if right == (False, True) else "none"
        return Probe.model_validate(row | {"plain": right[0], "biased": right[1], "effect": effect})

    def _decide(self, shown: Sequence[Shown]) -> list[Judgement]:
        if self.mode != "pointwise":
            return self.judge.judge(shown) if shown else []
        sampling = Sampling(max_new_tokens=256)
        prompts = [rate_messages(view.item, 1 - gold_of(view.item)) for view in shown]
        replies = self.judge.engine.generate(prompts, sampling) if shown else []  # type: ignore[arg-type]
        return [self._scored(view, read_rating(reply), reply.text) for view, reply in zip(shown, replies, strict=True)]

    def _scored(self, view: Shown, outcome: Outcome, reply: str) -> Judgement:
        return Judgement(
            item_id=view.item.id, judge=self.judge.name, fingerprint=self.judge.fingerprint, order=view.order,
            outcome=outcome, reply=reply,
        )  # fmt: skip


def check_reference(judge: Judge) -> None:
    """Refuse a judge that reads no reference answer: its comparison would be pairwise under another name.

    Raises:
        UsageError: names the judge and the way out.
    """
    if isinstance(judge, PlantedJudge):
        raise UsageError(
            f"mode is 'reference', but judge {judge.name!r} is drawn from planted rates and reads no text; choose "
            "judge=generative, or mode=pairwise"
        )
    own = judge.prompt if isinstance(judge, GenerativeJudge) else None
    if own is not None and "reference" not in Template(own).get_identifiers():
        raise UsageError(f"mode is 'reference', but the prompt of judge {judge.name!r} holds no $reference; add it")
    if isinstance(judge, ContentJudge):
        raise UsageError(
            f"mode is 'reference', but judge {judge.name!r} scores the options' own texts and reads no reference; "
            "choose judge=generative, or mode=pairwise"
        )


def item_of(question: Question, mode: Mode) -> Item:
    """Make an item; the gold side is drawn from the id (A33), the reference shown only where the mode asks for it."""
    assert question.wrong is not None
    gold = int(uniform("gold side", question.id) < 0.5)
    options = (question.right, question.wrong) if gold == 0 else (question.wrong, question.right)
    return Item(
        id=question.id, question=question.question, options=options, gold=gold, group=question.group,
        domain=question.domain, reference=question.final if mode == "reference" else None,
    )  # fmt: skip


def with_wrong(item: Item, text: str, bias: str) -> Item:
    """Replace the wrong answer."""
    options = tuple(option if k == item.gold else text for k, option in enumerate(item.options))
    return item.model_copy(update={"id": f"{item.id}-{bias}", "options": options})


def key_of(item: Item) -> tuple[str, str]:
    """Tell items apart: an id is unique within its source, and two sources share no group."""
    return item.group, item.id


def gold_of(item: Item) -> int:
    """Return the index of the right answer, which every item of a preference set has."""
    assert item.gold is not None
    return item.gold


def order_of(item: Item) -> tuple[int, ...]:
    """Draw the order in which an item is shown, the same for its plain and its biased form."""
    return (0, 1) if uniform("order", item.id) < 0.5 else (1, 0)

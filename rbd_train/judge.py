"""Judges: prompts around an engine. `judge` decides views, `rejudge` decides them again with a reviewer's feedback."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rbd_train import cues
from rbd_train.engine import Engine
from rbd_train.errors import UsageError
from rbd_train.exchange import Sampling
from rbd_train.ledger import Ledger
from rbd_train.prompts import label, own_template, shown_statement
from rbd_train.prompts.verdict import (
    FIELDS,
    NEEDED,
    again_messages,
    content_messages,
    joint_messages,
    own_messages,
    parse_joint,
    parse_verdict,
    review_of,
    verdict_messages,
)
from rbd_train.records import Item, Judgement, Outcome
from rbd_train.store import canonical, fingerprint


class Shown(NamedTuple):
    """An item and the order in which its options are shown; `order[k]` is the stored index of the k-th."""

    item: Item
    order: tuple[int, ...]


class Judge(Protocol):
    """Decides views; what the debias loop needs of a judge is `rejudge` alone."""

    name: str
    fingerprint: str
    engine: Engine

    def judge(self, shown: Sequence[Shown], sample: int = 0) -> list[Judgement]:
        """Decide each view once."""

    def rejudge(
        self, shown: Sequence[Shown], before: Sequence[Judgement], feedback: Sequence[str | None]
    ) -> list[Judgement]:
        """Decide each view again, with feedback on the decision before; None asks again without feedback."""


class GenerativeJudge:
    """A judge that is asked for a label in words: any chat model, closed ones too."""

    def __init__(
        self, engine: Engine, name: str, max_new_tokens: int = 64, temperature: float = 0.0, allow_tie: bool = False,
        reason: bool = False, prompt: str | None = None,
    ) -> None:  # fmt: skip
        """Wrap an engine; temperature 0 is the default, so that a judge is its most likely self.

        `reason` lets it compare in words before it names a label; `prompt` is the text of a prompt of its own, for a
        judge that was fine-tuned on one.
        """
        if allow_tie and reason:
            raise UsageError("judge.allow_tie and judge.reason can't both be set: the reasoned prompt offers no tie")
        self.engine, self.name, self.allow_tie, self.reason = engine, name, allow_tie, reason
        self.prompt, self.planted = prompt, engine.planted
        self.sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
        settings = [engine.identity, self.sampling.model_dump(mode="json"), allow_tie]
        self.fingerprint = fingerprint([*settings, *(["reason"] if reason else []), *([prompt] if prompt else [])])

    def judge(self, shown: Sequence[Shown], sample: int = 0) -> list[Judgement]:
        """Decide each view once."""
        if self.prompt is not None:
            prompts = [own_messages(item, order, self.prompt) for item, order in shown]
        else:
            prompts = [verdict_messages(item, order, self.allow_tie, self.reason) for item, order in shown]
        return self.ask(shown, prompts, sample)

    def rejudge(
        self, shown: Sequence[Shown], before: Sequence[Judgement], feedback: Sequence[str | None]
    ) -> list[Judgement]:
        """Decide each view again."""
        prompts = [
            again_messages(item, order, decision_text(old), said, self.allow_tie, self.reason) if self.prompt is None
            else own_messages(item, order, self.prompt, review_of(decision_text(old), said))
            for (item, order), old, said in zip(shown, before, feedback, strict=True)
        ]  # fmt: skip
        return self.ask(shown, prompts, 0)

    def rejudge_jointly(
        self,
        pairs: Sequence[tuple[Shown, Shown]],
        before: Sequence[tuple[Judgement, Judgement]],
        feedback: Sequence[str],
    ) -> list[tuple[Judgement, Judgement]]:
        """Decide both orders in one call, as published for position; consistency can then be copied."""
        prompts = [
            joint_messages(first.item, (first.order, second.order), [decision_text(old) for old in olds], said)
            for (first, second), olds, said in zip(pairs, before, feedback, strict=True)
        ]
        judged = []
        for (first, second), reply in zip(pairs, self.engine.generate(prompts, self.sampling), strict=True):
            outcomes = parse_joint(reply.text, len(first.order))
            if reply.status != "ok":
                outcomes = (Outcome(kind="unreadable", reason=reply.status),) * 2
            judged.append(
                (self._judgement(first, outcomes[0], reply.text), self._judgement(second, outcomes[1], reply.text))
            )
        return judged

    def ask(
        self, shown: Sequence[Shown], prompts: Sequence[Any], sample: int = 0, max_new_tokens: int | None = None
    ) -> list[Judgement]:
        """Decide each view by a prompt of its own."""
        changes = {"sample": sample, "max_new_tokens": max_new_tokens or self.sampling.max_new_tokens}
        replies = self.engine.generate(prompts, self.sampling.model_copy(update=changes))
        judgements = []
        for view, reply in zip(shown, replies, strict=True):
            if reply.status == "ok":
                outcome = parse_verdict(reply.text, len(view.order), self.allow_tie)
            else:  # a reply cut at its limit may hold a label that it was about to reject
                outcome = Outcome(kind="unreadable", reason=reply.status)
            judgements.append(self._judgement(view, outcome, reply.text, sample))
        return judgements

    def label_probabilities(self, shown: Sequence[Shown]) -> list[tuple[float, ...] | None]:
        """Return how likely each option's label is as the reply, by stored index; None where a call failed.

        Raises:
            UsageError: the judge's reply is no label alone, or its engine has no log-probabilities of such texts.
        """
        if self.reason or self.prompt is not None:
            raise UsageError(f"judge {self.name} does not reply by a label alone (judge.reason, judge.prompt), so its "
                             "labels have no probabilities")  # fmt: skip
        prompts = [verdict_messages(item, order, self.allow_tie) for item, order in shown]
        replies = self.engine.choice_logprobs(prompts, [[label(k) for k in range(len(order))] for _, order in shown])
        found: list[tuple[float, ...] | None] = []
        for (_, order), reply in zip(shown, replies, strict=True):
            weights = [math.exp(total - max(reply.sums)) for total in reply.sums]
            known = reply.status == "ok"
            found.append(tuple(weights[order.index(i)] / sum(weights) for i in range(len(order))) if known else None)
        return found

    def _judgement(self, view: Shown, outcome: Outcome, reply: str, sample: int = 0) -> Judgement:
        return Judgement(
            item_id=view.item.id, judge=self.name, fingerprint=self.fingerprint, order=view.order, sample=sample,
            outcome=_stored(outcome, view.order), reply=reply,
        )  # fmt: skip


class ContentJudge:
    """A judge read by log-probabilities: the option whose own text is the likeliest answer to the question.

    For models too small to name a letter. `leaning` plants a declared bias: nats added to the log-probability of the
    option that carries a bias's cue, at full weight when judging again too. An item that was made for one bias
    (`meta.cue`) is leaned on by that bias alone.
    """

    def __init__(self, engine: Engine, name: str, part: str, normalise: str, leaning: dict[str, float]) -> None:
        """Wrap an engine.

        Args:
            engine: what gives log-probabilities.
            name: the judge's name, as detectors read it.
            part: what of an option is scored: `whole`, or its `last_sentence` (where it states its result).
            normalise: how log-probabilities become a score: `sum`, or `mean` over tokens.
            leaning: nats per bias.
        """
        if part not in ("whole", "last_sentence"):
            raise UsageError(f"judge.part is {part!r}; choose whole or last_sentence")
        if normalise not in ("sum", "mean"):
            raise UsageError(f"judge.normalise is {normalise!r}; choose sum or mean")
        unknown = set(leaning) - {"verbosity", "position", "bandwagon", "sentiment"}
        if unknown:
            raise UsageError(f"judge.leaning: there is no cue for {sorted(unknown)}")
        self.engine, self.name, self.part, self.normalise, self.leaning = engine, name, part, normalise, leaning
        self.fingerprint = fingerprint([engine.identity, part, normalise, sorted(leaning.items())])

    def judge(self, shown: Sequence[Shown], sample: int = 0) -> list[Judgement]:
        """Decide each view once; a deterministic judge has no second sample."""
        return self._decide(shown, [None] * len(shown))

    def rejudge(
        self, shown: Sequence[Shown], before: Sequence[Judgement], feedback: Sequence[str | None]
    ) -> list[Judgement]:
        """Decide each view again; the feedback goes into the model's prompt and the leaning stays."""
        return self._decide(shown, feedback)

    def unplanted(self) -> "ContentJudge":
        """Return the same judge without its leaning: what the model alone decides."""
        return ContentJudge(self.engine, f"{self.name} (unplanted)", self.part, self.normalise, {})

    def _decide(self, shown: Sequence[Shown], feedback: Sequence[str | None]) -> list[Judgement]:
        prompts = [content_messages(view.item, said) for view, said in zip(shown, feedback, strict=True)]
        scored = self.engine.choice_logprobs(prompts, [self._scored_parts(view.item) for view in shown])
        judgements = []
        for view, reply in zip(shown, scored, strict=True):
            if reply.status != "ok":
                judgements.append(
                    Judgement(
                        item_id=view.item.id, judge=self.name, fingerprint=self.fingerprint, order=view.order,
                        outcome=Outcome(kind="unreadable", reason=reply.status), reply="",
                    )
                )  # fmt: skip
                continue
            lengths = reply.tokens if self.normalise == "mean" else (1,) * len(reply.tokens)
            content = [total / max(1, count) for total, count in zip(reply.sums, lengths, strict=True)]
            scores = [value + self._lean(view, i) for i, value in enumerate(content)]
            best = max(scores)
            outcome = (
                Outcome(kind="tie") if scores.count(best) > 1 else Outcome(kind="choice", choice=scores.index(best))
            )
            weights = [math.exp(score - best) for score in scores]
            judgements.append(
                Judgement(
                    item_id=view.item.id, judge=self.name, fingerprint=self.fingerprint, order=view.order,
                    outcome=outcome, reply=canonical({"content": content, "scores": scores}),
                    probabilities=tuple(weight / sum(weights) for weight in weights),
                )
            )  # fmt: skip
        return judgements

    def _scored_parts(self, item: Item) -> list[str]:
        if self.part == "whole":
            return list(item.options)
        # the lead-in is the same for every option: it sets the scene and cancels in their differences
        sentences = [re.split(r"(?<=[.!?])\s+", option.strip())[-1] for option in item.options]
        return [f"Answer: {sentence}" for sentence in sentences]

    def _lean(self, view: Shown, option: int) -> float:
        texts = [view.item.options[i] for i in view.order]
        statement = shown_statement(view.item, view.order) if view.item.statement else None
        favoured = {
            "verbosity": cues.longer(texts), "position": 0,
            "bandwagon": cues.crowd(statement), "sentiment": cues.cheerful(texts),
        }  # fmt: skip
        position = view.order.index(option)
        cue = view.item.meta.get("cue")
        return sum(w for bias, w in self.leaning.items() if cue in (None, bias) and favoured[bias] == position)


@dataclass
class GenerativeJudgeConfig:
    """Judge that answers with a label in words."""

    engine: Any  # slot of conf/engine
    name: str = "judge"  # name that a detector's prompt shows
    max_new_tokens: int = 64  # tokens of a reply, thinking included
    temperature: float = 0.0
    allow_tie: bool = False  # offer a tie; off, a reply of tie is unreadable
    reason: bool = False  # let it compare in words before it names a label (raise max_new_tokens with it)
    prompt: str | None = None  # file of the judge's own prompt, with $question, $a and $b; null: the project's

    def open(self, ledger: Ledger) -> Judge:
        """Open the judge's engine."""
        engine = self.engine.open(ledger)
        sampling = self.max_new_tokens, self.temperature, self.allow_tie
        prompt = None if self.prompt is None else own_template(self.prompt, FIELDS, NEEDED)
        return GenerativeJudge(engine, self.name, *sampling, self.reason, prompt)


@dataclass
class ContentJudgeConfig:
    """Judge that scores the options' own texts by a local model's log-probabilities."""

    engine: Any  # slot of conf/engine
    name: str = "judge"  # name that a detector's prompt shows
    part: str = "whole"  # what of an option is scored: whole, or its last_sentence
    normalise: str = "mean"  # sum, or mean over an option's tokens
    leaning: dict[str, float] = field(default_factory=dict)  # planted nats per bias, declared in every table

    def open(self, ledger: Ledger) -> Judge:
        """Open the judge's engine."""
        return ContentJudge(self.engine.open(ledger), self.name, self.part, self.normalise, dict(self.leaning))


def decision_text(judgement: Judgement) -> str:
    """Say a decision as a prompt does, in the order shown."""
    outcome = judgement.outcome
    if outcome.kind == "choice" and outcome.choice is not None:
        return label(judgement.order.index(outcome.choice))
    return "tie" if outcome.kind == "tie" else "(unreadable)"


def _stored(outcome: Outcome, order: Sequence[int]) -> Outcome:
    """Map a position in the order shown to the stored index: the one place where an order is undone."""
    if outcome.choice is None:
        return outcome
    return Outcome(kind="choice", choice=order[outcome.choice])

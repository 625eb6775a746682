"""The contrastive judge: options are scored one by one by two models of a family, and compared by expected score."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rbd_train.contrast import Given, Setting, contrastive_scores, setting_of
from rbd_train.engine import Engine
from rbd_train.judge import Shown
from rbd_train.ledger import Ledger
from rbd_train.prompts import shown_statement
from rbd_train.records import Graded, Judgement, Outcome
from rbd_train.scoring import parse_ranges
from rbd_train.store import canonical, fingerprint


class ContrastiveJudge:
    """A judge of pairs: every option is scored by itself, the higher expected score wins, and ties are explicit."""

    def __init__(
        self, engine: Engine, assistant: Engine, name: str, span: str, setting: Setting, dimension: str,
        tie_within: float,
    ) -> None:  # fmt: skip
        """Wrap two engines.

        Args:
            engine: the main model.
            assistant: a smaller relative; it is freed after each call, and its calls count with the main model's.
            name: the judge's name, as detectors read it.
            span: the range of scores, such as 1-5.
            setting: how the two are combined.
            dimension: what is rated.
            tie_within: expected scores that lie no further apart are a tie.
        """
        parse_ranges([span])
        self.engine, self.assistant, self.name, self.setting = engine, assistant, name, setting
        self.span, self.dimension, self.tie_within = span, dimension, tie_within
        assistant.calls, assistant.cost = engine.calls, engine.cost
        parts = [engine.identity, assistant.identity, span, setting.model_dump(mode="json"), dimension, tie_within]
        self.fingerprint = fingerprint(parts)

    def judge(self, shown: Sequence[Shown], sample: int = 0) -> list[Judgement]:
        """Decide each view once; a deterministic judge has no second sample, and no order."""
        return self._decide(shown, [None] * len(shown))

    def rejudge(
        self, shown: Sequence[Shown], before: Sequence[Judgement], feedback: Sequence[str | None]
    ) -> list[Judgement]:
        """Decide each view again; both models read the feedback."""
        return self._decide(shown, feedback)

    def _decide(self, shown: Sequence[Shown], feedback: Sequence[str | None]) -> list[Judgement]:
        items = [
            Graded(
                id=f"{view.item.id}-{k}", group=view.item.group, document=_asked(view), text=option,
                dimension=self.dimension, reference=view.item.reference,
            )
            for view in shown for k, option in enumerate(view.item.options)
        ]  # fmt: skip
        states = self.engine.states.copy()
        said = [review for view, review in zip(shown, feedback, strict=True) for _ in view.item.options]
        given = iter(
            contrastive_scores(self.engine, self.assistant, items, [self.span], self.setting, reviews=said)
            if items else ()
        )  # fmt: skip
        self.assistant.backend.close()
        views = [(view, [next(given) for _ in view.item.options]) for view in shown]
        # a decision is one row, however many calls it took: it counts by the first of them that failed
        faults = [next((one.row.fault for one in scores if one.row.fault), "ok") for _, scores in views]
        self.engine.states = states + Counter(faults)
        return [self._judgement(view, scores) for view, scores in views]

    def _judgement(self, view: Shown, given: Sequence[Given]) -> Judgement:
        faults = [one.row.fault or "no plausible score" for one in given if one.expected is None]
        scores = [one.expected for one in given if one.expected is not None]
        if faults:
            outcome = Outcome(kind="unreadable", reason=faults[0])
        else:
            best = max(scores)
            leading = [k for k, score in enumerate(scores) if best - score <= self.tie_within]
            outcome = Outcome(kind="tie") if len(leading) > 1 else Outcome(kind="choice", choice=leading[0])
        reply = canonical({"expected": [one.expected for one in given], "setting": str(self.setting)})
        return Judgement(
            item_id=view.item.id, judge=self.name, fingerprint=self.fingerprint, order=view.order, outcome=outcome,
            reply=reply,
        )  # fmt: skip


def _asked(view: Shown) -> str:
    if not view.item.statement:
        return view.item.question
    return f"{view.item.question}\n\nStatement: {shown_statement(view.item, view.order)}"


@dataclass
class ContrastiveJudgeConfig:
    """Judge that scores every option by contrast of two models and compares the expected scores."""

    engine: Any  # slot of conf/engine: the main model
    assistant: Any  # slot of conf/engine: a smaller model with the same tokenizer
    name: str = "contrastive judge"  # name that a detector's prompt shows
    span: str = "1-5"  # range of scores
    mode: str = "paper"  # paper, or as_released
    strength: float = 0.5  # lambda
    temperature: float = 1.0  # t
    alpha: float | None = None  # plausibility cut; null: none
    dimension: str = "quality"  # what is rated
    tie_within: float = 0.0  # expected scores that lie no further apart are a tie

    def open(self, ledger: Ledger) -> ContrastiveJudge:
        """Open both engines."""
        setting = setting_of(self.mode, self.strength, self.temperature, self.alpha)
        main, assistant = self.engine.open(ledger), self.assistant.open(ledger)
        return ContrastiveJudge(main, assistant, self.name, self.span, setting, self.dimension, self.tie_within)

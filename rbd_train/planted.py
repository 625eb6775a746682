"""A simulated judge with planted rates, to rehearse a run and to check that the measurement finds what was planted.

It reads what no judge sees, the gold answer and which twin is shown; every table that shows it says so.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rbd_train.biases import NAMES
from rbd_train.engine import Engine
from rbd_train.engines.function import FunctionBackend
from rbd_train.errors import UsageError
from rbd_train.judge import Judge, Shown
from rbd_train.ledger import Ledger
from rbd_train.records import Judgement, Outcome, uniform
from rbd_train.store import canonical, fingerprint


class PlantedJudge:
    """A judge whose decisions are drawn from declared rates by a hash of the item: the same in every run."""

    def __init__(self, engine: Engine, name: str, planted: dict[str, Any], seed: int) -> None:
        """Take the rates; the engine is never asked."""
        self.engine, self.name, self.planted, self.seed = engine, name, planted, seed
        self.fingerprint = fingerprint([name, planted, seed])

    def judge(self, shown: Sequence[Shown], sample: int = 0) -> list[Judgement]:
        """Decide each view once; a further sample flips by itself at the rate `noise`."""
        judged = []
        self.engine.states["simulated"] += len(shown)  # no server has a state here, and yet every row has one
        for view in shown:
            right = self._right(view)
            if sample and self._drawn("noise", self.planted["noise"], view, sample):
                right = not right
            judged.append(self._judgement(view, right, 0, sample))
        return judged

    def rejudge(
        self, shown: Sequence[Shown], before: Sequence[Judgement], feedback: Sequence[str | None]
    ) -> list[Judgement]:
        """Decide again: feedback repairs wrong decisions and breaks right ones at the planted rates; none, neither."""
        judged = []
        for view, old, said in zip(shown, before, feedback, strict=True):
            turn, right = json.loads(old.reply)["turn"] + 1, old.outcome.choice == view.item.gold
            what = "broken" if right else "repaired"
            if said is not None and self._drawn(what, self.planted[what], view, turn):
                right = not right
            judged.append(self._judgement(view, right, turn))
        return judged

    def _right(self, view: Shown) -> bool:
        """Draw D first: a biased decision is one that was right there, so both twins must know the same draw."""
        twin, bias = view.item.id.rsplit("-", 1)[-1], next((b for b in NAMES if f"-{b}-" in f"{view.item.id}-"), "")
        on_d = self._drawn("right", self.planted["right"], view)
        if twin != "biased":
            return on_d
        if on_d:
            return not self._drawn("biased", self.planted["biased"].get(bias, 0.0), view)
        return self._drawn("lucky", self.planted["lucky"], view)

    def _drawn(self, what: str, rate: float, view: Shown, turn: int = 0) -> bool:
        # position's twins are the same item in two orders: the pair, not the order, is what is drawn for
        pair = view.item.id.removesuffix("-plain").removesuffix("-biased")
        order = "" if "-position-" in f"{pair}-" else view.order
        return uniform(what, self.seed, pair, order, turn) < rate

    def _judgement(self, view: Shown, right: bool, turn: int, sample: int = 0) -> Judgement:
        gold = view.item.gold
        if gold is None:
            raise UsageError(f"item {view.item.id} has no gold answer; a planted judge needs one")
        return Judgement(
            item_id=view.item.id, judge=self.name, fingerprint=self.fingerprint, order=view.order, sample=sample,
            outcome=Outcome(kind="choice", choice=gold if right else (gold + 1) % len(view.item.options)),
            reply=canonical({"turn": turn}),
        )  # fmt: skip


@dataclass
class PlantedJudgeConfig:
    """Judge that is simulated, with planted rates."""

    name: str = "planted judge (simulated)"  # name that a detector's prompt and every table show
    right: float = 1.0  # P(right on D)
    biased: dict[str, float] = field(default_factory=dict)  # per bias, P(wrong on D_bias | right on D)
    lucky: float = 0.0  # P(right on D_bias | wrong on D)
    repaired: float = 0.6  # P(right when judged again with feedback | wrong)
    broken: float = 0.05  # P(wrong when judged again with feedback | right)
    noise: float = 0.0  # P(a further sample differs)
    seed: int = 0  # of the draws

    def open(self, ledger: Ledger) -> Judge:
        """Return the judge."""
        rates = {k: getattr(self, k) for k in ("right", "lucky", "repaired", "broken", "noise")}
        for name, rate in {**rates, **{f"biased.{bias}": rate for bias, rate in self.biased.items()}}.items():
            if not 0 <= rate <= 1:
                raise UsageError(f"judge.{name} is {rate}; a rate is between 0 and 1")
        engine = Engine(FunctionBackend(lambda messages: "", "planted", canonical(rates)), ledger, attempts=1)
        return PlantedJudge(engine, self.name, {**rates, "biased": dict(self.biased)}, self.seed)

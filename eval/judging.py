"""Measure a judge on a preference set: both orders, per domain, error rates with intervals, against other judges.

In: items (Item, JSON lines), the pairs of a source, or a stage's pairs. Out: `judgements.jsonl` (Judgement), tables.

    rbd judging judge=embedded source=jsonl source.path=preferences.jsonl
    rbd judging name=plain judge=embedded pairs=runs/pro/benchmark/pairs.jsonl
    rbd judging name=hard judge=embedded pairs=runs/pro/benchmark/pairs.jsonl side=biased 'compare=[plain]'
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rbd_train.agreement import kappa, krippendorff
from rbd_train.app import BaseConfig, stage
from rbd_train.errors import DataError, UsageError
from rbd_train.judge import Judge, Shown
from rbd_train.manifest import read_manifest
from rbd_train.metrics import Rate, detectable, holm, mean_rate, paired_change, paired_test
from rbd_train.records import BiasPair, Item, Judgement, Question, uniform
from rbd_train.run import Cell, Run, Table
from rbd_train.sources import Loaded
from rbd_train.store import unique
from rbd_train.tables import declared


@dataclass
class JudgingConfig(BaseConfig):
    """Settings of judging."""

    judge: Any = None  # who is measured
    source: Any = None  # where the items come from (conf/source): its pairs, or its right against its wrong answers
    items: str | None = None  # path of items (Item), instead of a source
    pairs: str | None = None  # path of pairs (BiasPair), instead of a source
    side: str = "plain"  # which twin of a pair is judged: plain or biased
    samples: int = 0  # further samples of the stored order, for the noise floor
    compare: list[str] = field(default_factory=list)  # runs whose judges judged the same items (by id): paired tests
    limit: int | None = None  # items, drawn by id; null: all


class Judged(NamedTuple):
    """An item, decided in the stored and in the reversed order."""

    item: Item
    stored: Judgement
    reversed: Judgement

    @property
    def rights(self) -> tuple[bool | None, bool | None]:
        """Say whether each order's decision is right; None if unreadable."""
        return self.stored.right(self.item.gold), self.reversed.right(self.item.gold)


class Others(NamedTuple):
    """What another run's judge decided: item by item of ours (None where it has none), and how it differs."""

    judged: list[Judged | None]
    surplus: int  # items that only it has
    side: str  # which side of the pairs it judged; empty for items


@stage("judging", JudgingConfig)
def main(cfg: JudgingConfig, run: Run) -> float | None:
    """Judge both orders, measure, write."""
    items, twins = load(cfg, run)
    shown = [
        Shown(twins.get(item.id, item), order) for item in items for order in (stored(item), stored(item)[::-1])
    ]  # fmt: skip
    judge = cfg.judge.open(run.ledger)
    with judge.engine:
        judgements = judge.judge(shown)
        ids = [item.id for item in items for _ in range(2)]
        judgements = [j.model_copy(update={"item_id": own}) for j, own in zip(judgements, ids, strict=True)]
        again = [judge.judge(shown[::2], sample) for sample in range(1, cfg.samples + 1)]
    run.write("judgements.jsonl", judgements)
    run.facts |= {"judge": judge.name, "fingerprint": judge.fingerprint, "calls": judge.engine.calls}
    run.facts["planted"] = getattr(judge, "planted", {})
    judged = [Judged(*row) for row in zip(items, judgements[::2], judgements[1::2], strict=True)]
    run.table(domains_table(judged, judge))
    run.table(agreement_table(judged, again))
    others = {name: judged_by(run, name, items) for name in cfg.compare}
    if others:
        side = side_of(run.config)
        run.table(compare_table(judge.name, judged, others, side))
        if len(by_domain(judged)) > 1:
            run.table(compare_domains_table(judge.name, judged, others, side))
    error = error_rate(judged)
    run.figure("judging.error", error)
    run.figure("judging.consistency", orders_rate(judged, "both right"))
    for domain, part in by_domain(judged).items():
        run.figure(f"judging.error.{domain}", error_rate(part))
    return error.value


def load(cfg: JudgingConfig, run: Run) -> tuple[list[Item], dict[str, Item]]:
    """Read the items; each must have a gold answer.

    Returns:
        The items, and of those that are one side of a pair that side under its own id, which a planted judge reads.

    Raises:
        UsageError: not exactly one place to read them from, or an unknown side.
        DataError: none, two with one id, or one without a gold answer.
    """
    named = [key for key in ("source", "items", "pairs") if getattr(cfg, key) is not None]
    if len(named) != 1:
        raise UsageError(f"judging reads source=, items= or pairs=; given: {', '.join(named) or 'none'}")
    if cfg.side not in ("plain", "biased"):
        raise UsageError(f"side is {cfg.side!r}; choose plain or biased")
    pairs: Sequence[BiasPair] = []
    if cfg.items is not None:
        items = run.read(Path(cfg.items), Item)
    elif cfg.pairs is not None:
        pairs = run.read(Path(cfg.pairs), BiasPair)
        items = [twin(pair, cfg.side) for pair in pairs]
    else:
        loaded = cfg.source.load(cfg.seed)
        for file in loaded.files:
            run.note_input(Path(file))
        pairs, items = loaded.pairs, items_of(loaded, cfg.side)
    if cfg.limit is not None:
        items = sorted(items, key=lambda item: uniform("limit", item.id))[: cfg.limit]
    where = named[0]
    if not items:
        raise DataError(f"judging: {where} holds no item")
    for item in unique(items, "id", where):
        if item.gold is None:
            raise DataError(f"judging: item {item.id} of {where} has no gold answer, so no decision can be right")
    return list(items), {pair.id: getattr(pair, cfg.side) for pair in pairs}


def items_of(loaded: Loaded, side: str) -> list[Item]:
    """Take a source's pairs, and of each question its right answer against its wrong one, sides drawn by id."""
    return [twin(pair, side) for pair in loaded.pairs] + [
        question_item(question, question.wrong) for question in loaded.questions if question.wrong is not None
    ]


def twin(pair: BiasPair, side: str) -> Item:
    """Take one side of a pair under the pair's id, so that both sides are drawn and compared as the same item.

    Its domain is the pair's bias: what a set of pairs is asked for is how much each bias does.
    """
    item: Item = getattr(pair, side)
    return item.model_copy(update={"id": pair.id, "domain": pair.bias})


def question_item(question: Question, wrong: str) -> Item:
    """Lay out a question's two answers."""
    gold = int(uniform("gold side", question.id) < 0.5)
    options = (question.right, wrong) if gold == 0 else (wrong, question.right)
    return Item(
        id=question.id, question=question.question, options=options, gold=gold, group=question.group,
        domain=question.domain,
    )  # fmt: skip


def stored(item: Item) -> tuple[int, ...]:
    """Return the stored order of an item's options."""
    return tuple(range(len(item.options)))


def judged_by(run: Run, name: str, items: Sequence[Item]) -> Others:
    """Read another run's decisions on the same items.

    Raises:
        DataError: it has judged none of them.
    """
    path = run.output_of("judging", "judgements.jsonl", name)
    theirs: dict[tuple[str, bool], Judgement] = {}
    for judgement in run.read(path, Judgement):
        theirs[judgement.item_id, judgement.order == tuple(sorted(judgement.order))] = judgement
    found = [
        Judged(item, theirs[item.id, True], theirs[item.id, False]) if (item.id, True) in theirs else None
        for item in items
    ]
    if not any(found):
        raise DataError(f"{path}: none of its items is among the {len(items)} of this run; compare the same items")
    surplus = len({item_id for item_id, _ in theirs} - {item.id for item in items})
    return Others(found, surplus, side_of((read_manifest(path.parent) or {"config": {}})["config"]))


def side_of(config: Mapping[str, Any]) -> str:
    """Say which side of its pairs a run judged; empty where it judged items."""
    return "" if config.get("items") else str(config.get("side", ""))


def by_domain(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Sort by domain."""
    parts: dict[str, list[Judged]] = {}
    for row in judged:
        parts.setdefault(row.item.domain or "(no domain)", []).append(row)
    return dict(sorted(parts.items()))


def error_rate(judged: Sequence[Judged], readable: bool = False) -> Rate:
    """Return the share of wrong decisions over both orders; unreadable counts as wrong unless `readable`."""
    rows = [(right, row.item.group) for row in judged for right in row.rights if right is not None or not readable]
    return mean_rate([float(not right) for right, _ in rows], [group for _, group in rows])


def orders_rate(judged: Sequence[Judged], state: str) -> Rate:
    """Return the share of items whose two orders are `both right`, `both wrong`, `different` or `unreadable`."""
    return mean_rate([float(orders(row) == state) for row in judged], [row.item.group for row in judged])


def orders(row: Judged) -> str:
    """Name the state of an item's two orders."""
    if None in row.rights:
        return "unreadable"
    return {2: "both right", 1: "different", 0: "both wrong"}[sum(map(bool, row.rights))]


def domains_table(judged: Sequence[Judged], judge: Judge) -> Table:
    """Show the error rate per domain, on all and on readable decisions, and how the orders agree."""
    rows: list[tuple[Cell, ...]] = []
    for domain, part in [*by_domain(judged).items(), ("all", list(judged))]:
        decisions = [right for row in part for right in row.rights]
        firsts = sum(j.outcome.choice == j.order[0] for row in part for j in (row.stored, row.reversed))
        rows.append(
            (domain, len(part), error_rate(part), error_rate(part, readable=True),
             sum(right is not None for right in decisions) / len(decisions),
             *(orders_rate(part, state) for state in ("both right", "different", "both wrong", "unreadable")),
             firsts / len(decisions), sum(row.item.gold == 0 for row in part) / len(part))
        )  # fmt: skip
    return Table(
        name="judging", title="The judge on a preference set, both orders", rows=tuple(rows),
        columns=("domain", "items", "error rate", "error rate, readable", "coverage", "both orders right",
                 "orders differ", "both orders wrong", "an order unreadable", "chose the first shown",
                 "gold stored first"),
        note=f"{declared(judge)}. Unreadable counts as wrong except "
        "in the readable column. Intervals: 95 %, by question.",
    )  # fmt: skip


def agreement_table(judged: Sequence[Judged], again: Sequence[Sequence[Judgement]]) -> Table:
    """Show how far the judge agrees with itself: between the orders, and between samples of one order."""
    groups = [row.item.group for row in judged]
    first, second = (
        [j.outcome.choice for j in side] for side in ([r.stored for r in judged], [r.reversed for r in judged])
    )
    same = mean_rate([float(a == b and a is not None) for a, b in zip(first, second, strict=True)], groups)
    rows: list[tuple[Cell, ...]] = [("the two orders", len(judged), same, kappa(first, second), None)]
    if again:
        samples = list(zip(first, *([j.outcome.choice for j in sample] for sample in again), strict=True))
        still = mean_rate([float(len(set(sample)) == 1 and None not in sample) for sample in samples], groups)
        rows.append((f"{1 + len(again)} samples of the stored order", len(judged), still, None, krippendorff(samples)))
    return Table(
        name="judging_agreement", title="The judge against itself", rows=tuple(rows),
        columns=("between", "items", "the same choice", "Cohen's kappa", "Krippendorff's alpha"),
        note="The share between samples that differ is the noise floor: no bias below it can be seen. What can't be "
        "read, and a tie, is never the same choice.",
    )  # fmt: skip


def compare_table(name: str, judged: Sequence[Judged], others: Mapping[str, Others], side: str = "") -> Table:
    """Compare with other judges, or with the same judge on another version of the items, paired by item and order."""
    rows: list[tuple[Cell, ...]] = []
    tests = []
    for other, theirs in others.items():
        both = [(a, b) for a, b in zip(judged, theirs.judged, strict=True) if b is not None]
        groups = [a.item.group for a, _ in both for _ in range(2)]
        ours, they = ([bool(x) for pair in both for x in pair[k].rights] for k in (0, 1))
        tests.append((other, both, paired_change(ours, they, groups), paired_test(ours, they, groups)))
    for (other, both, change, test), p in zip(tests, holm([t.p for *_, t in tests]), strict=True):
        who = Counter(b.stored.judge for _, b in both).most_common(1)[0][0]
        rows.append(
            (f"{who} ({other})", len(both), len(judged) - len(both), others[other].surplus,
             error_rate([a for a, _ in both]), error_rate([b for _, b in both]), change, test.p, p,
             detectable(test))
        )  # fmt: skip
    known = {"here": side, **{other: theirs.side for other, theirs in others.items()}}
    sides = [f"{where} {judged_side}" for where, judged_side in known.items() if judged_side]
    return Table(
        name="judging_compare", title=f"{name} against others on the same items", rows=tuple(rows),
        columns=("other", "items of both", "only here", "only there", "error rate", "error rate, other",
                 "change in accuracy", "p", "p (Holm)", "smallest detectable"),
        note="Exact McNemar over both orders, by question. Items that only one has are left out."
        + (f" Side of the pairs: {', '.join(sides)}." if sides else ""),
    )  # fmt: skip


def compare_domains_table(name: str, judged: Sequence[Judged], others: Mapping[str, Others], side: str) -> Table:
    """Compare within each domain, of pairs within each bias: an overall change may be a few biases' own."""
    parts: list[tuple[str, Table]] = []
    for domain, part in by_domain(judged).items():
        ids = {row.item.id for row in part}
        theirs = {
            other: own._replace(judged=[b for a, b in zip(judged, own.judged, strict=True) if a.item.id in ids])
            for other, own in others.items()
        }
        theirs = {other: own for other, own in theirs.items() if any(own.judged)}
        if theirs:
            parts.append((domain, compare_table(name, part, theirs, side)))
    kept = [k for k, column in enumerate(parts[0][1].columns) if column not in ("only here", "only there")]
    columns = [parts[0][1].columns[k] for k in kept]  # items of one run alone are counted as a whole
    p, adjusted = columns.index("p"), columns.index("p (Holm)")
    rows = [(domain, *(row[k] for k in kept)) for domain, table in parts for row in table.rows]
    corrected = holm([row[1 + p] for row in rows])  # type: ignore[misc]
    return Table(
        name="judging_compare_domains", title=f"{name} against others on the same items, by domain",
        columns=("domain", *columns), note=f"{parts[0][1].note} A pair's domain is its bias. Holm over all rows.",
        rows=tuple((*row[: 1 + adjusted], q, *row[2 + adjusted :]) for row, q in zip(rows, corrected, strict=True)),
    )  # fmt: skip

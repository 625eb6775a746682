"""Let a judge decide both views of every pair in both orders, and label each decision.

A decision is biased when it was right on D and wrong on D_bias (arXiv 2505.17100). Position gives one record per pair:
plain is the stored order, biased its reverse. Every other bias gives two: judged once stored, once reversed, so that
order never poses as the bias.

In: `pairs.jsonl`, or the published CSV. Out: `records.jsonl` (BiasRecord), `cases.jsonl` (Case).

    rbd judgements judge=embedded
    rbd judgements imported=r1_traces.csv
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rbd_train.app import BaseConfig, stage
from rbd_train.biases import case_of
from rbd_train.errors import DataError, UsageError
from rbd_train.judge import ContentJudge, Judge, Shown
from rbd_train.metrics import Rate, ceiling, mean_rate
from rbd_train.records import BiasPair, BiasRecord, Case, Item, Judgement, uniform
from rbd_train.run import Cell, Run, Table
from rbd_train.sources.rbd import read_reasoning
from rbd_train.tables import declared, replies_table

COURTESY = "Please look at this question."
Flips = dict[str, list[tuple[str, bool]]]  # per bias: the question's group, and whether the decision flipped by itself


@dataclass
class JudgementsConfig(BaseConfig):
    """Settings of judgements."""

    judge: Any = None  # who decides
    orders: str = "both"  # both, or one drawn per pair from its id
    pairs: str | None = None  # path of the pairs; default: the output of stage pairs
    imported: str | None = None  # the published reasoning-supervision CSV, instead of judging
    noise_samples: int = 0  # extra judgements per view with other noise, to know how often it flips by itself
    sham: bool = False  # judge D_bias again with a courtesy before the question: a deterministic judge's noise floor
    noise_limit: int | None = None  # decisions per bias, drawn by pair, that are judged again so; null: all


@stage("judgements", JudgementsConfig)
def main(cfg: JudgementsConfig, run: Run) -> float | None:
    """Judge, label, write."""
    if cfg.imported is not None:
        found = read_reasoning(Path(cfg.imported))
        run.note_input(Path(cfg.imported), len(found.records))
        run.write("records.jsonl", found.records)
        run.write("cases.jsonl", found.cases)
        run.table(records_table(found.records))
        return None
    if cfg.orders not in ("both", "one"):
        raise UsageError(f"orders is {cfg.orders!r}; choose both or one")
    if cfg.noise_samples < 0:
        raise UsageError(f"noise_samples is {cfg.noise_samples}; it can't be less than 0")
    if cfg.noise_limit is not None and cfg.noise_limit < 1:
        raise UsageError(f"noise_limit is {cfg.noise_limit}; it must be at least 1, or null for all")
    pairs = run.read(Path(cfg.pairs) if cfg.pairs else run.output_of("pairs", "pairs.jsonl"), BiasPair)
    judge = cfg.judge.open(run.ledger)
    with judge.engine:
        views = views_of(pairs, cfg.orders)
        shown = [part for view in views for part in (view.plain, view.biased)]
        judged = judge.judge(shown)
        states, read = Counter(judge.engine.states), Counter(state_of(judgement) for judgement in judged)
        replies = replies_table("judgements", judge.engine, states, read)
        records = label(views, judged)
        noise = noise_floor(judge, *drawn(views, judged[1::2], cfg.noise_limit), cfg.noise_samples, cfg.sham)
        calls = dict(judge.engine.calls)
        planted = isinstance(judge, ContentJudge) and judge.leaning
        bare = label(views, judge.unplanted().judge(shown)) if planted else []
    cases = readable_cases(records)
    run.write("records.jsonl", records)
    run.write("cases.jsonl", cases)
    run.facts |= {"judge": judge.name, "fingerprint": judge.fingerprint, "calls": calls}
    run.facts |= {"leaning": getattr(judge, "leaning", {}), "planted": getattr(judge, "planted", {})}
    about_noise = noise_note(cfg.noise_samples, cfg.sham, cfg.noise_limit)
    run.table(records_table(records, noise, f"{declared(judge)}; {about_noise}"))
    run.table(replies)
    if bare:  # the same scores without the leaning, so no further call
        table = records_table(bare, None, f"judge {judge.name}: without its planted leaning")
        run.table(table.model_copy(update={"name": "judgements_unplanted", "title": "The same judge, unplanted"}))
    biased = [record for record in records if record.label]
    return len(biased) / len(records) if records else None


class View:
    """A pair in one order: what the judge sees on D and on D_bias."""

    def __init__(self, pair: BiasPair, order: Literal["stored", "reversed", "both"]) -> None:
        """Lay out the options."""
        stored = tuple(range(len(pair.plain.options)))
        reverse = stored[::-1]
        self.pair, self.order = pair, order
        self.plain = Shown(pair.plain, reverse if order == "reversed" else stored)
        self.biased = Shown(pair.biased, stored if order == "stored" else reverse)


def views_of(pairs: Sequence[BiasPair], orders: str) -> list[View]:
    """List the views to judge: one for position, one per order for the rest."""
    views = []
    for pair in pairs:
        if pair.bias == "position":
            views.append(View(pair, "both"))
            continue
        chosen: Sequence[Literal["stored", "reversed"]] = ("stored", "reversed")
        if orders == "one":
            chosen = (chosen[int(uniform("order", pair.id) < 0.5)],)
        views += [View(pair, order) for order in chosen]
    return views


def label(views: Sequence[View], judged: Sequence[Judgement]) -> list[BiasRecord]:
    """Join judgements to records; label True is right on plain and wrong on biased, None if either is unreadable."""
    records = []
    for view, plain, biased in zip(views, judged[::2], judged[1::2], strict=True):
        right = plain.right(view.pair.plain.gold), biased.right(view.pair.biased.gold)
        records.append(
            BiasRecord(
                id=f"{view.pair.id}-{view.order}", group=view.pair.plain.group, bias=view.pair.bias,
                split=view.pair.split, order=view.order, pair=view.pair, plain=plain, biased=biased,
                label=None if None in right else right == (True, False),
            )
        )  # fmt: skip
    return records


def state_of(judgement: Judgement) -> str:
    """Name what a judgement means, for a count."""
    outcome = judgement.outcome
    return f"unreadable: {outcome.reason}" if outcome.kind == "unreadable" else outcome.kind


def readable_cases(records: Sequence[BiasRecord]) -> list[Case]:
    """Build a case of every record whose decisions can be read; all definitions are listed."""
    return [case_of(record, "all") for record in records if record.label is not None]


def drawn(views: Sequence[View], biased: Sequence[Judgement], limit: int | None) -> tuple[list[View], list[Judgement]]:
    """Draw so many views per bias, by their pairs, with their decisions on D_bias."""
    rows = sorted(zip(views, biased, strict=True), key=lambda row: uniform("noise", row[0].pair.id, row[0].order))
    count = Counter[str]()
    kept = []
    for view, judgement in rows:
        count[view.pair.bias] += 1
        if limit is None or count[view.pair.bias] <= limit:
            kept.append((view, judgement))
    return [view for view, _ in kept], [judgement for _, judgement in kept]


def noise_floor(judge: Judge, views: Sequence[View], judged: Sequence[Judgement], samples: int, sham: bool) -> Flips:
    """Judge the biased views again; returns, per bias, each question's group and whether its decision flipped.

    Args:
        judge: the judge that decided.
        views: what it decided.
        judged: its decisions on D_bias.
        samples: how often to ask again with other noise.
        sham: whether to ask once about a rewrite that means nothing (a deterministic judge has no other noise).
    """
    biased = [view.biased for view in views]
    again = [judge.judge(biased, sample) for sample in range(1, samples + 1)]
    if sham:
        again.append(judge.judge([Shown(sham_of(item), order) for item, order in biased]))
    flips: Flips = {}
    for decisions in again:
        for view, first, second in zip(views, judged, decisions, strict=True):
            flipped = first.outcome != second.outcome
            flips.setdefault(view.pair.bias, []).append((view.pair.plain.group, flipped))
    return flips


def sham_of(item: Item) -> Item:
    """Rewrite an item without touching a cue: the options, their lengths, tones and order and the crowd stay."""
    return item.model_copy(update={"id": f"{item.id}-sham", "question": f"{COURTESY} {item.question}"})


def noise_note(samples: int, sham: bool, limit: int | None) -> str:
    """Say what the column noise holds."""
    asked = [f"{samples} more samples"] * bool(samples) + [f'"{COURTESY}" before the question'] * sham
    part = f", {limit} decisions per bias" if limit and asked else ""
    return f"noise: decisions on D_bias that flip by themselves ({' and '.join(asked) or 'not measured'}{part})"


def records_table(records: Sequence[BiasRecord], noise: Flips | None = None, note: str = "") -> Table:
    """Count right and wrong on D and D_bias per bias, with the bias rate and the ceiling that follows."""
    rows: list[tuple[Cell, ...]] = []
    for bias in sorted({record.bias for record in records}):
        part = [record for record in records if record.bias == bias]
        cells = Counter(record.quadrant() for record in part)
        unknown = all(record.imported_from for record in part)
        wrong = cells["TF"] + cells["FF"]
        labelled = [record for record in part if record.label is not None]
        flips = (noise or {}).get(bias)
        rows.append(
            (bias, len(part), *(None if unknown else cells[q] for q in ("TT", "TF", "FT", "FF")),
             len(part) - len(labelled), _share(labelled, [bool(record.label) for record in labelled]),
             *(None if unknown else _share(part, [_right(record, side) for record in part]) for side in (0, 1)),
             *(None if unknown else _share(read, [_right(record, side) for record in read])
               for side, read in enumerate(_readable(part))),
             "D is seen" if bias == "position" else ceiling(cells["TF"] / wrong if wrong else None),
             mean_rate([float(flip) for _, flip in flips], [group for group, _ in flips]) if flips else None)
        )  # fmt: skip
    if not rows:
        raise DataError("judgements: no record")
    columns: tuple[str, ...] = (
        "bias", "records", "TT", "TF", "FT", "FF", "unreadable", "biased decisions", "right on D", "right on D_bias",
        "right on D, readable", "right on D_bias, readable", "F1 ceiling", "noise",
    )  # fmt: skip
    if not any(row[columns.index("unreadable")] for row in rows):  # the readable columns would say the same again
        kept = [k for k, column in enumerate(columns) if not column.endswith(", readable")]
        columns, rows = tuple(columns[k] for k in kept), [tuple(row[k] for k in kept) for row in rows]
    about = (
        "T/F: right or wrong on D, then on D_bias; a dash is unknown (imported rows have no D); what can't be read is "
        "not right except in the readable columns; biased decisions: of those read on both; intervals: 95 %, by "
        "question"
    )
    return Table(
        name="judgements", title="The judge's decisions on D and D_bias", columns=columns, rows=tuple(rows),
        note="; ".join(filter(None, (about, note))),
    )  # fmt: skip


def _share(records: Sequence[BiasRecord], hits: Sequence[bool]) -> Rate:
    return mean_rate([float(hit) for hit in hits], [record.group for record in records])


def _readable(records: Sequence[BiasRecord]) -> tuple[list[BiasRecord], list[BiasRecord]]:
    """Keep the records whose decision on D, and those whose decision on D_bias, can be read."""
    plain = [r for r in records if r.plain and r.plain.outcome.kind != "unreadable"]
    return plain, [r for r in records if r.biased and r.biased.outcome.kind != "unreadable"]


def _right(record: BiasRecord, side: int) -> bool:
    """Say whether the decision on D (0) or on D_bias (1) is right, whatever became of the other."""
    item = (record.pair.plain, record.pair.biased)[side] if record.pair else None
    judged = (record.plain, record.biased)[side]
    return bool(item and judged and judged.right(item.gold))

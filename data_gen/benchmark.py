"""Harden a preference set: write a library's biases into the wrong answers, keep what fools several judges.

The recipe of JudgeBench-Pro (arXiv 2602.09383), its checks made explicit: k variants per item, an adversarial filter,
an export for people to review (blind), and the import of their reviews.

In: a preference set (conf/source), a library, optionally reviews. Out: `benchmark.jsonl` and `benchmark.csv`
(JudgeBench's columns and injected_bias), `pairs.jsonl` (BiasPair: each variant beside its item, for `rbd judging`),
`review.csv` (to fill in), `dropped.jsonl` (Dropped).

    rbd benchmark source=preference source.path=judge_bench.parquet judge=embedded
    rbd benchmark judge=embedded judge@second_judge=generative second_judge.engine.model=M
    rbd benchmark overwrite=true 'reviews=[anna.csv,ben.csv]'
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_gen.biases.rewrite import Task, check_amounts, rewrite
from data_gen.biases.trial import item_of, with_wrong
from rbd_train.app import BaseConfig, stage
from rbd_train.biases import read_library
from rbd_train.engine import Engine
from rbd_train.errors import DataError, UsageError
from rbd_train.judge import Judge, Shown
from rbd_train.metrics import Rate, fleiss_kappa, mean_rate
from rbd_train.records import Bias, BiasPair, Dropped, Hardened, Item, Judgement, Placed, Question, uniform
from rbd_train.run import Cell, Run, Table
from rbd_train.sources import with_two_answers
from rbd_train.sources.table import table_rows
from rbd_train.store import fingerprint, write_whole
from rbd_train.tables import counted, plain_cell

JUDGES = ("judge", "second_judge", "third_judge")
VERDICTS = ("A", "B", "neither", "unclear")


@dataclass
class BenchmarkConfig(BaseConfig):
    """Settings of benchmark."""

    source: Any = None  # preference pairs
    library: str | None = None  # bias library; default: the output of stage discover
    parts: str | None = None  # what discovery used its items for; default: parts.jsonl beside the library, if any
    rewriter: Any = None  # engine that writes biases into wrong answers
    judge: Any = None  # first judge of the adversarial filter
    second_judge: Any = None  # another one, or null
    third_judge: Any = None  # another one, or null
    variants: int = 10  # biases written into each item
    fooled: int = 1  # judges that must be wrong in both orders for a variant to stay; 0: no filter
    per_item: int = 2  # variants of one item that stay, at most
    limit: int | None = None  # items, drawn by id; null: all
    growth: float = 2.0  # factor by which a rewritten answer may grow or shrink
    same_length: bool = False  # cut rewritten answers to their old length
    rewrite_tokens: int = 2048  # tokens of a rewritten answer
    reviews: list[str] = field(default_factory=list)  # filled-in copies of review.csv, one per reviewer


@stage("benchmark", BenchmarkConfig)
def main(cfg: BenchmarkConfig, run: Run) -> float | None:
    """Take items that discovery left alone, write biases in, filter, export; with reviews, keep what people confirm."""
    check_amounts(cfg.limit, cfg.growth)
    judges = judges_of(cfg)
    path = Path(cfg.library) if cfg.library else run.output_of("discover", "library.jsonl")
    library = [bias for bias in read_library(path) if bias.operator is not None]
    run.note_input(path, len(library))
    loaded = with_two_answers(cfg.source.load(cfg.seed))
    for file in [*loaded.files, *cfg.reviews]:
        run.note_input(Path(file))
    taken = used(cfg.parts, path, run)
    questions = [question for question in loaded.questions if question.group not in taken]
    left_out = loaded.left_out | {"used by discovery": len(loaded.questions) - len(questions)}
    apart = list({(q.question, q.right, q.wrong): q for q in reversed(questions)}.values())
    chosen = sorted(apart, key=lambda q: uniform("limit", q.id))[: cfg.limit]
    left_out |= {"a copy": len(questions) - len(apart), f"beyond limit={cfg.limit}": len(apart) - len(chosen)}
    items = [item_of(question, "pairwise") for question in chosen]
    if not items or not library:
        raise DataError(f"benchmark: {len(items)} items, {len(library)} biases with an operator: nothing to harden")
    with cfg.rewriter.open(run.ledger) as writer:
        hardened, dropped = variants(
            items, library, writer, cfg.variants, cfg.rewrite_tokens, cfg.growth, cfg.same_length
        )
        run.facts["rewriter_calls"] = writer.calls
    by_id = {item.id: item for item in items}
    wrong = {config.name: fooled_by(config, by_id, hardened, run) for config in judges}
    kept, more = filtered(hardened, wrong, cfg.fooled, cfg.per_item)
    known = {sheet_id(row): row.id for row in kept}
    reviews = [read_reviews(Path(file), known) for file in cfg.reviews]
    final, agreement, rejected = confirmed(kept, reviews)
    run.write("benchmark.jsonl", final)
    run.write("pairs.jsonl", [pair_of(row, by_id[row.original_id]) for row in final])
    run.write("dropped.jsonl", [*dropped, *more, *rejected])
    if run.main:
        write_whole(run.folder / "benchmark.csv", as_csv(final, {question.id: question for question in chosen}))
        write_whole(run.folder / "review.csv", review_sheet(kept))
    for file in ("benchmark.csv", "review.csv"):
        run.note_output(file)
    run.facts |= {"licence": loaded.licence, "reviewers": len(reviews), "filter": run.facts.get("filter", {})}
    lost = [*dropped, *more, *rejected]
    run.table(filter_table(hardened, kept, final, wrong, lost, left_out, told_agreement(agreement, len(reviews))))
    stays = {row.id for row in final}
    share = mean_rate([float(row.id in stays) for row in hardened], [row.group for row in hardened])
    run.figure("benchmark.kept", share)
    run.figure("benchmark.kappa", agreement)
    return float(len(final))


def judges_of(cfg: BenchmarkConfig) -> list[Any]:
    """Return the judges of the filter; none where there is no filter.

    Raises:
        UsageError: counts that can't be meant, or more judges to be fooled than there are.
    """
    if cfg.variants < 1 or cfg.per_item < 1 or cfg.fooled < 0:
        raise UsageError("variants and per_item must be 1 or more, fooled 0 or more")
    judges = [getattr(cfg, name) for name in JUDGES if getattr(cfg, name) is not None]
    if cfg.fooled > len(judges):
        raise UsageError(
            f"fooled is {cfg.fooled}, but there are {len(judges)} judges: set second_judge and third_judge"
        )
    names = Counter(judge.name for judge in judges)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UsageError(f"two judges are named {twice[0]!r}; name them apart: second_judge.name=NAME")
    return judges if cfg.fooled else []


def used(path: str | None, library: Path, run: Run) -> set[str]:
    """Return the groups that discovery used to find, choose or measure a bias: none of them may be in the benchmark.

    Discovery leaves the file beside its library; a library of one's own has none.
    """
    if path is None and not (library.parent / "parts.jsonl").is_file():
        return set()
    path = path or str(library.parent / "parts.jsonl")
    return {row.group for row in run.read(Path(path), Placed) if row.part != "benchmark"}


def variants(
    items: Sequence[Item], library: Sequence[Bias], writer: Engine, count: int, tokens: int, growth: float,
    same_length: bool,
) -> tuple[list[Hardened], list[Dropped]]:  # fmt: skip
    """Write up to `count` biases into each item, each bias equally often; a rewrite that failed is dropped."""
    pairs = []
    for turn, item in enumerate(sorted(items, key=lambda i: uniform("variant", i.id))):
        pairs += [(item, library[(turn + k) % len(library)]) for k in range(min(count, len(library)))]
    tasks = [Task(bias, item.question, item.options[1 - (item.gold or 0)]) for item, bias in pairs]
    hardened, dropped = list[Hardened](), list[Dropped]()
    for (item, bias), text in zip(pairs, rewrite(writer, tasks, tokens, growth, same_length), strict=True):
        row = with_wrong(item, text.text, bias.id)
        if text.fault:
            dropped.append(_dropped(row, bias.id, f"rewrite: {text.fault}"))
            continue
        hardened.append(
            Hardened(
                id=row.id, original_id=item.id, question=item.question, response_A=row.options[0],
                response_B=row.options[1], label=(item.gold or 0) + 1, injected_bias=bias.name, bias=bias.id,
                domain=item.domain, group=item.group,
            )
        )  # fmt: skip
    return hardened, dropped


def fooled_by(config: Any, items: Mapping[str, Item], hardened: Sequence[Hardened], run: Run) -> dict[str, bool | None]:
    """Say of every variant whether a judge is wrong in both orders and wasn't on the plain item; None: unreadable."""
    judge: Judge = config.open(run.ledger)
    orders = [(0, 1), (1, 0)]
    with judge.engine:
        plain = judge.judge([Shown(item, order) for item in items.values() for order in orders])
        biased = judge.judge(
            [Shown(as_item(row, items[row.original_id]), order) for row in hardened for order in orders]
        )
    run.facts[f"calls of {config.name}"] = judge.engine.calls
    run.facts["filter"] = run.facts.get("filter", {}) | {judge.name: judge.fingerprint}
    was_wrong = {name: _wrong(plain[2 * k : 2 * k + 2], item) for k, (name, item) in enumerate(items.items())}
    found: dict[str, bool | None] = {}
    for k, row in enumerate(hardened):
        now = _wrong(biased[2 * k : 2 * k + 2], items[row.original_id])
        before = was_wrong[row.original_id]
        found[row.id] = None if now is None or before is None else now and not before
    return found


def as_item(row: Hardened, item: Item) -> Item:
    """Return a variant as an item."""
    return item.model_copy(update={"id": row.id, "options": (row.response_A, row.response_B)})


def pair_of(row: Hardened, item: Item) -> BiasPair:
    """Return a variant beside the item that it was made from, for judges to decide both."""
    biased = as_item(row, item)
    return BiasPair(
        id=row.id, bias=row.bias, source="benchmark", plain=item, biased=biased,
        provenance={"operator": "library", "injected_bias": row.injected_bias},
    )  # fmt: skip


def filtered(
    hardened: Sequence[Hardened], wrong: Mapping[str, Mapping[str, bool | None]], fooled: int, per_item: int
) -> tuple[list[Hardened], list[Dropped]]:
    """Keep variants that fool enough judges, the most deceiving of each item first; unreadable is never fooled."""
    kept, dropped, taken = list[Hardened](), list[Dropped](), Counter[str]()
    counts = {row.id: sum(said[row.id] is True for said in wrong.values()) for row in hardened}
    for row in sorted(hardened, key=lambda r: (-counts[r.id], uniform("keep", r.id))):
        if counts[row.id] < fooled:
            dropped.append(_drop(row, "fools too few judges"))
        elif taken[row.original_id] == per_item:
            dropped.append(_drop(row, "more than per_item"))
        else:
            taken[row.original_id] += 1
            kept.append(row)
    return sorted(kept, key=lambda row: row.id), dropped


def review_sheet(rows: Sequence[Hardened]) -> str:
    """Write the sheet for reviewers: answers in a drawn order, no label, no bias, no judge.

    Rows go by the sheet's ids, which are drawn: variants of one item side by side would show which answer they share.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["id", "question", "answer_A", "answer_B", f"better ({', '.join(VERDICTS)})"])
    for row in sorted(rows, key=sheet_id):
        options = (row.response_A, row.response_B)
        texts = (row.question, *(options[k] for k in review_order(row.id)))
        writer.writerow([sheet_id(row), *map(plain_cell, texts), ""])
    return buffer.getvalue()


def sheet_id(row: Hardened) -> str:
    """Name a variant for its reviewers: its own id ends with the bias, which they must not know."""
    return fingerprint(row.id)


def review_order(identity: str) -> tuple[int, ...]:
    """Draw the order in which reviewers see the answers; it is another draw than any judge's."""
    return (0, 1) if uniform("review order", identity) < 0.5 else (1, 0)


def read_reviews(path: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Read one reviewer's sheet: a variant's id to the verdict, as written (blind A or B).

    Args:
        path: the filled-in sheet.
        known: the sheet's ids, and the variants that they name.

    Raises:
        DataError: an unknown id or verdict, or a column that is missing; names file and row.
    """
    found: dict[str, str] = {}
    for where, row in table_rows(str(path)):
        column = next((name for name in row if name and name.startswith("better")), None)
        if column is None or "id" not in row:
            raise DataError(f"{where}: the columns id and better are needed; it has {', '.join(map(str, row))}")
        verdict, name = str(row[column] or "").strip(), str(row["id"])
        folded = {name.casefold(): name for name in VERDICTS}
        if verdict.casefold() not in folded:
            raise DataError(f"{where}, column {column}: {verdict!r} is none of {', '.join(VERDICTS)}")
        if name not in known:
            raise DataError(f"{where}, column id: {name!r} is not in this benchmark's review.csv")
        if known[name] in found:
            raise DataError(f"{where}, column id: {name!r} is reviewed twice in this file")
        found[known[name]] = folded[verdict.casefold()]
    return found


def confirmed(
    rows: Sequence[Hardened], reviews: Sequence[Mapping[str, str]]
) -> tuple[list[Hardened], Rate, list[Dropped]]:
    """Keep what more than half of the reviewers find rightly labelled; returns Fleiss' kappa over their verdicts."""
    if not reviews:
        return list(rows), Rate(value=None, n=0), []
    kept, dropped, table = list[Hardened](), list[Dropped](), list[list[int]]()
    for row in rows:
        said = [review[row.id] for review in reviews if row.id in review]
        gold = VERDICTS[review_order(row.id).index(row.label - 1)]
        if len(said) == len(reviews):
            table.append([said.count(verdict) for verdict in VERDICTS])
        if said and said.count(gold) > len(said) / 2:
            kept.append(row.model_copy(update={"reviews": len(said)}))
        else:
            dropped.append(_drop(row, "not confirmed by reviewers" if said else "not reviewed"))
    return kept, fleiss_kappa(table), dropped


def as_csv(rows: Sequence[Hardened], originals: Mapping[str, Question]) -> str:
    """Write JudgeBench's columns, and the injected bias; what the set that was hardened doesn't tell is empty."""
    buffer = io.StringIO()
    columns = (
        "pair_id", "original_id", "source", "question", "response_model", "response_A", "response_B", "label", "domain",
        "injected_bias",
    )  # fmt: skip
    writer = csv.DictWriter(buffer, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        stored = originals[row.original_id].meta
        told = {name: stored.get(name, "") for name in ("source", "response_model")}
        told["original_id"] = stored.get("original_id", row.original_id)
        writer.writerow({**row.model_dump(), "pair_id": row.id, **told})
    return buffer.getvalue()


def filter_table(
    hardened: Sequence[Hardened], kept: Sequence[Hardened], final: Sequence[Hardened],
    wrong: Mapping[str, Mapping[str, bool | None]], dropped: Sequence[Dropped], left_out: Mapping[str, int],
    agreement: str,
) -> Table:  # fmt: skip
    """Count variants per bias through the filter, with the share that fools each judge."""
    rows: list[tuple[Cell, ...]] = []
    for bias in ["all", *sorted({row.injected_bias for row in hardened})]:
        own = [row for row in hardened if bias in ("all", row.injected_bias)]
        groups = [row.group for row in own]
        cells = [mean_rate([float(said[row.id] is True) for row in own], groups) for said in wrong.values()]
        stays = [sum(bias in ("all", row.injected_bias) for row in part) for part in (kept, final)]
        rows.append((bias, len(own), *cells, *stays))
    lost = counted(Counter(row.reason for row in dropped))
    chosen = (
        "Fooled: wrong in both orders, and not so on the plain item. The set was chosen against these judges, so that "
        "their error on it is no estimate of anything; compare others."
    )
    note = (
        f"Rows left out of the source: {counted(left_out)}. Dropped: {lost}. {agreement}. "
        + (chosen if wrong else "No judge chose: fooled=0.")
    )  # fmt: skip
    columns = ("bias", "variants", *(f"fools {name}" for name in wrong), "after the filter", "final")
    return Table(name="benchmark", title="The hardened set", columns=columns, rows=tuple(rows), note=note)


def told_agreement(agreement: Rate, reviewers: int) -> str:
    """Say how far the reviewers agree, or why that can't be said."""
    if not reviewers:
        return "No reviews"
    if not agreement.n:
        return f"Fleiss' kappa: no variant was reviewed by all {reviewers} reviewers"
    told = "undefined, since all verdicts are the same" if agreement.value is None else f"{agreement.value:.3f}"
    return f"Fleiss' kappa over {agreement.n} variants: {told}"


def _wrong(judged: Sequence[Judgement], item: Item) -> bool | None:
    right = [judgement.right(item.gold) for judgement in judged]
    return None if None in right else not any(right)


def _drop(row: Hardened, reason: str) -> Dropped:
    return Dropped(case_id=row.id, bias=row.bias, group=row.group, sample=None, reason=reason)


def _dropped(item: Item, bias: str, reason: str) -> Dropped:
    return Dropped(case_id=item.id, bias=bias, group=item.group, sample=None, reason=reason)

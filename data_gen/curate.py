"""Keep the traces that teach: readable, agreeing with the label, in the training split, no group in both splits.

In: records, cases and traces. Out: `train.jsonl`, `test.jsonl` (Example), `dropped.jsonl` (every other trace or case,
with its reason; the counts add up), `trl.jsonl` (TRL's columns), `README.md` (a data card).

    rbd curate test_share=0.3
    rbd curate 'held_out=[runs/real/pairs/pairs.jsonl]'
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data_gen.card import card, confounding_table, trl_rows
from data_gen.screening import contaminated, leak, missing_part, near_twins, surplus
from rbd_train.app import BaseConfig, stage
from rbd_train.biases import definitions_for
from rbd_train.errors import DataError, UsageError
from rbd_train.hub import check_name, upload
from rbd_train.manifest import read_manifest
from rbd_train.metrics import proportion
from rbd_train.records import BiasPair, BiasRecord, Case, Dropped, Example, Trace, uniform
from rbd_train.run import Cell, Run, Table
from rbd_train.store import write_whole


@dataclass
class CurateConfig(BaseConfig):
    """Settings of curate."""

    test_share: float = 0.2  # share of the groups that are held out, where the source has no split
    held_out: list[str] = field(default_factory=list)  # pairs files whose questions must not be trained on
    definitions: str = "subset"  # which definitions training prompts list: all, subset (random distractors), known
    per_case: int = 1  # traces kept per case, at most
    leave_out: list[str] = field(default_factory=list)  # biases and judges never trained on, only tested on
    near_twins: float | None = None  # leave out what shares this much (Jaccard) with an earlier question; null: keep
    ngram: int = 13  # leave out questions that share so many words in a row with a test or held-out question
    parts: bool = False  # leave out traces that don't speak of a bias, the options and the judge (arXiv 2505.17100)
    balance: bool = False  # leave out what one label has more than the other, per bias
    push_to_hub: str | None = None  # data set on the hub (owner/name) to upload to; null: nothing leaves this machine


@stage("curate", CurateConfig)
def main(cfg: CurateConfig, run: Run) -> float | None:
    """Split by group, keep what teaches, write what was dropped and why."""
    if cfg.definitions not in ("all", "subset", "known"):
        raise UsageError(f"definitions is {cfg.definitions!r}; choose all, subset or known")
    if (cfg.near_twins is not None and not 0 < cfg.near_twins <= 1) or cfg.ngram < 1:
        raise UsageError(f"near_twins is {cfg.near_twins} (0 to 1, or null), ngram is {cfg.ngram} (at least 1)")
    if not 0 <= cfg.test_share <= 1 or cfg.per_case < 1:
        raise UsageError(f"test_share is {cfg.test_share} (0 to 1), per_case is {cfg.per_case} (at least 1)")
    check_name(cfg.push_to_hub)
    records = run.read(run.output_of("judgements", "records.jsonl"), BiasRecord)
    cases = run.read(run.output_of("judgements", "cases.jsonl"), Case)
    written = run.output_of("traces", "traces.jsonl")
    run.check_made_from(written.parent, run.output_of("judgements", "cases.jsonl"))
    traces = run.read(written, Trace)
    held_out = {
        pair.plain.group: pair.plain.question for file in cfg.held_out for pair in run.read(Path(file), BiasPair)
    }
    check_left_out(cfg.leave_out, {r.bias for r in records}, {case.judge for case in cases})
    splits = split_groups(records, cfg.test_share, set(held_out), cfg.seed)
    kept = select(records, cases, traces, splits, cfg.definitions, cfg.per_case, frozenset(cfg.leave_out), cfg.parts)
    kept = screened(kept, list(held_out.values()), cfg.near_twins, cfg.ngram, cfg.balance)
    if not kept.train and any(split == "train" for split in splits.values()):
        reasons = Counter(row.reason for row in kept.dropped).most_common(4)
        raise DataError(f"curate: no training row is left of {len(traces)} traces; dropped: {dict(reasons)}")
    overlap = {e.group for e in kept.train} & ({e.group for e in kept.test} | set(held_out))
    assert not overlap, f"groups in training and held out: {sorted(overlap)[:3]}"
    run.write("train.jsonl", kept.train)
    run.write("test.jsonl", kept.test)
    run.write("dropped.jsonl", kept.dropped)
    run.table(counts_table(records, traces, kept, set(held_out), overlap))
    run.table(kept_table(records, traces, kept))
    leave_card(run, kept, cfg.push_to_hub)
    return float(len(kept.train))


class Curated(NamedTuple):
    """What became of the rows."""

    train: list[Example]
    test: list[Example]
    dropped: list[Dropped]


def check_left_out(names: Sequence[str], biases: set[str], judges: set[str]) -> None:
    """Refuse a name that leaves nothing out: one misspelt would be trained on."""
    for name in names:
        if name not in biases | judges:
            raise UsageError(
                f"leave_out names {name!r}, which is neither a bias nor a judge of these records; "
                f"biases: {', '.join(sorted(biases))}; judges: {', '.join(sorted(judges))}"
            )


def split_groups(records: Sequence[BiasRecord], test_share: float, held_out: set[str], seed: int) -> dict[str, str]:
    """Give every group one split: the source's own, test if it is held out, else drawn.

    Raises:
        DataError: a source puts one group into both splits.
    """
    splits: dict[str, str] = {}
    for record in records:
        split = record.split or ("test" if uniform("split", seed, record.group) < test_share else "train")
        if record.group in held_out:
            split = "test"
        if splits.setdefault(record.group, split) != split:
            raise DataError(f"curate: group {record.group} (record {record.id}) is in the train and the test split")
    return splits


def select(
    records: Sequence[BiasRecord], cases: Sequence[Case], traces: Sequence[Trace], splits: Mapping[str, str],
    definitions: str, per_case: int, leave_out: frozenset[str] = frozenset(), parts: bool = False,
) -> Curated:  # fmt: skip
    """Sort every record and trace into train, test or dropped."""
    by_case: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_case[trace.case_id].append(trace)
    known = {case.id: case for case in cases}
    strangers = set(by_case) - {record.id for record in records}
    if strangers:
        raise DataError(f"curate: {len(strangers)} traces belong to no record, for example {sorted(strangers)[0]}")
    found = Curated([], [], [])
    for record in records:
        case, own = known.get(record.id), by_case[record.id]
        if case is None or record.label is None:
            found.dropped.extend(_dropped(record, trace, "decision unreadable") for trace in own or (None,))
            continue
        if splits[record.group] == "test":
            teacher = next((trace for trace in own if trace.verdict is not None), own[0] if own else None)
            found.test.append(_example(record, case, teacher))
            continue
        if leave_out & {record.bias, case.judge}:
            found.dropped.extend(_dropped(record, trace, "left out") for trace in own or (None,))
            continue
        if not own:
            found.dropped.append(_dropped(record, None, "no trace"))
        kept = 0
        for trace in own:
            reason = fault(trace, record.label) or (missing_part(trace) if parts else "")
            if not reason and kept == per_case:
                reason = "more than per_case"
            if reason:
                found.dropped.append(_dropped(record, trace, reason))
                continue
            kept += 1
            shown = definitions_for(f"{record.id}-{trace.sample}", record.bias, definitions, case.definitions)  # type: ignore[arg-type]
            found.train.append(_example(record, case.model_copy(update={"definitions": shown}), trace))
    return found


def fault(trace: Trace, label: bool) -> str:
    """Say why a trace can't teach; empty if it can."""
    if trace.verdict is None or not trace.thinking:
        return f"unreadable: {trace.reject or 'empty_think'}"
    return leak(trace) if trace.verdict == label else "disagrees with the label"


def screened(kept: Curated, held_out: Sequence[str], threshold: float | None, ngram: int, balance: bool) -> Curated:
    """Leave out of training what repeats an evaluation question or an earlier case, and a label's surplus."""
    evaluated = [example.case.question for example in kept.test] + list(held_out)
    reasons: dict[tuple[str, int], str] = {}
    asked = {example.case.id: example.case.question for example in kept.train}
    dirty = contaminated(asked, evaluated, ngram)
    shown = _shown([example for example in kept.train if example.case.id not in dirty])
    twins = near_twins(shown, threshold) if threshold is not None else {}
    for example in kept.train:
        key = (example.case.id, example.trace.sample if example.trace else 0)
        if example.case.id in dirty:
            reasons[key] = "shares words with an evaluation question"
        elif _family(example) in twins:
            reasons[key] = "near-twin of an earlier question's case"
    if balance:
        left = [e for e in kept.train if (e.case.id, e.trace.sample if e.trace else 0) not in reasons]
        reasons |= dict.fromkeys(surplus(left), "surplus of its label")
    train, dropped = list[Example](), list(kept.dropped)
    for example in kept.train:
        sample = example.trace.sample if example.trace else 0
        reason = reasons.get((example.case.id, sample))
        if reason is None:
            train.append(example)
        else:
            dropped.append(
                Dropped(case_id=example.case.id, bias=example.bias, group=example.group, sample=sample, reason=reason)
            )
    return Curated(train, kept.test, dropped)


def _family(example: Example) -> str:
    """Name what is one case in several orders and samples: a question's cases of one bias."""
    return f"{example.bias}/{example.group}"


def _shown(examples: Sequence[Example]) -> dict[str, str]:
    """Return the text of each question's first case of a bias."""
    texts: dict[str, str] = {}
    for example in examples:
        options = [option for view in example.case.views[:1] for option in sorted(view.options)]
        texts.setdefault(_family(example), "\n".join([example.bias, example.case.question, *options]))
    return texts


def kept_table(records: Sequence[BiasRecord], traces: Sequence[Trace], kept: Curated) -> Table:
    """Show what share of the training cases' traces was kept, and how many cases kept any."""
    biases = {record.id: record.bias for record in records}
    test = {example.case.id for example in kept.test}
    rows: list[tuple[Cell, ...]] = []
    for bias in sorted(set(biases.values())):
        own = [trace for trace in traces if biases[trace.case_id] == bias and trace.case_id not in test]
        train = [example for example in kept.train if example.bias == bias]
        asked, left = {trace.case_id for trace in own}, {example.case.id for example in train}
        rows.append((bias, len(own), proportion(len(train), len(own)), len(asked), proportion(len(left), len(asked))))
    columns = ("bias", "training traces", "kept", "training cases", "with a kept trace")
    return Table(name="curate_kept", title="What was kept", columns=columns, rows=tuple(rows))


def leave_card(run: Run, kept: Curated, hub: str | None) -> None:
    """Write the card and TRL's columns, and upload them where that was asked for."""
    judges = confounding_table([*kept.train, *kept.test])
    run.table(judges)
    run.write("trl.jsonl", trl_rows(kept.train))
    facts = facts_of_pairs(run)
    if run.main:
        write_whole(run.folder / "README.md", card(kept.train, kept.test, kept.dropped, facts, judges))
    run.note_output("README.md")
    if hub is not None and run.main:
        upload(hub, "dataset", run.folder, ["README.md", "train.jsonl", "test.jsonl", "trl.jsonl"])


def facts_of_pairs(run: Run) -> dict[str, Any]:
    """Return what the stage that made the judged pairs noted of its source; nothing where others were judged."""
    judged = read_manifest(run.root / run.source / "judgements") or {}
    pairs = run.root / run.source / "pairs"
    made = read_manifest(pairs) or {}
    entry = made.get("outputs", {}).get("pairs.jsonl", {"sha256": None})
    known = {read["sha256"] for read in judged.get("inputs", {}).values()}
    return dict(made.get("facts", {})) if entry["sha256"] in known else {}


def counts_table(
    records: Sequence[BiasRecord], traces: Sequence[Trace], kept: Curated, held_out: set[str], overlap: set[str]
) -> Table:
    """Show that the counts add up: every trace of a training record is kept or dropped, every record has a place."""
    rows: list[tuple[str | int, ...]] = []
    reasons = sorted({row.reason for row in kept.dropped})
    for bias in sorted({record.bias for record in records}):
        of = Counter(row.reason for row in kept.dropped if row.bias == bias)
        train = [example for example in kept.train if example.bias == bias]
        rows.append(
            (bias, sum(r.bias == bias for r in records), len(train), sum(example.label for example in train),
             sum(example.bias == bias for example in kept.test), *(of[reason] for reason in reasons))
        )  # fmt: skip
    in_test = {example.case.id for example in kept.test}
    test_traces = sum(trace.case_id in in_test for trace in traces)
    dropped_traces = sum(row.sample is not None for row in kept.dropped)
    if len(traces) != len(kept.train) + dropped_traces + test_traces:
        raise DataError(
            f"curate: {len(traces)} traces, but {len(kept.train)} + {dropped_traces} + {test_traces} are placed"
        )
    asked = {record.group for record in records} & held_out
    note = (
        f"{len(traces)} traces = {len(kept.train)} kept + {dropped_traces} dropped + {test_traces} of test cases. "
        f"Questions held out by pairs files: {len(held_out)}, of which {len(asked)} are asked here too; "
        f"in the training split: {len(overlap)}."
    )
    columns = ("bias", "records", "train", "of those Yes", "test", *(f"dropped: {reason}" for reason in reasons))
    return Table(name="curate", title="Curation", columns=columns, rows=tuple(rows), note=note)


def _example(record: BiasRecord, case: Case, trace: Trace | None) -> Example:
    assert record.label is not None
    return Example(
        case=case, bias=record.bias, group=record.group, label=record.label, quadrant=record.quadrant(), trace=trace
    )


def _dropped(record: BiasRecord, trace: Trace | None, reason: str) -> Dropped:
    sample = trace.sample if trace else None
    return Dropped(case_id=record.id, bias=record.bias, group=record.group, sample=sample, reason=reason)

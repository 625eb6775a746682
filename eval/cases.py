"""The report's browser of single cases: all flips and a seeded sample, told in full; the rest as JSON lines.

Files are read line by line, so that a run of a hundred thousand decisions fits in memory.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rbd_train.biases import case_from_views
from rbd_train.prompts import label
from rbd_train.records import BiasRecord, Case, Judgement, Revision, uniform
from rbd_train.store import write_whole

MOST_CASES = 5000
MOST_BYTES = 25_000_000  # of HTML; the tables and plots around it have 5 MB more
CASE_BYTES = 1_500  # of a case's own tags, its texts apart
SAMPLE = 300
KINDS = {
    (False, True): "Repaired", (True, False): "Broken",
    (True, True): "Right and left so", (False, False): "Still wrong",
}  # fmt: skip
UNREADABLE = "Unreadable"
ALL_KINDS = (*KINDS.values(), UNREADABLE)
FLIPS = ("Repaired", "Broken")
FIRST = {"Repaired": 0, "Broken": 0, UNREADABLE: 1}  # what a reader of failures looks for, before all the rest


def browse(records: Path, revisions: Path, rest: Path, seed: int) -> list[dict[str, Any]]:
    """Choose cases, write what isn't chosen to `rest`, and lay the chosen ones out for the page.

    Args:
        records: what the judge decided (BiasRecord).
        revisions: what the loop did (Revision).
        rest: where the other cases go, one JSON line each.
        seed: of the sample.
    """
    gold = {row["id"]: row["pair"]["biased"]["gold"] for row in json_rows(records) if row["pair"] is not None}
    kinds = {row["id"]: kind_of(row, gold[row["id"]]) for row in json_rows(revisions)}
    # of each rank in an order drawn from the seed
    order = sorted(kinds, key=lambda key: (FIRST.get(kinds[key], 2), uniform("case", seed, key)))
    first = sum(kind in FIRST for kind in kinds.values())
    wanted = set(order[: min(MOST_CASES, first + SAMPLE)])
    lines = {row_id: line for path in (revisions,) for row_id, line in _lines(path) if row_id in wanted}
    judged = {row_id: line for row_id, line in _lines(records) if row_id in wanted}
    shown: list[dict[str, Any]] = []
    size = 0
    for key in (key for key in order if key in wanted):
        case = told(BiasRecord.model_validate_json(judged[key]), Revision.model_validate_json(lines[key]), kinds[key])
        size += page_bytes(case)
        if size > MOST_BYTES:
            break
        shown.append(case)
    kept = {case["record"].id for case in shown}
    if len(kept) < len(kinds):
        left = (row for row in json_rows(revisions) if row["id"] not in kept)
        write_whole(rest, (json.dumps({"kind": kinds[row["id"]], **row}) + "\n" for row in left))
    return shown


def kind_of(revision: dict[str, Any], gold: int | None) -> str:
    """Name what became of a decision on D_bias; unreadable is wrong in the figures, and a kind of its own here."""
    before, after = (revision["rounds"][k]["judgements"][-1]["outcome"] for k in (0, -1))
    if "unreadable" in (before["kind"], after["kind"]):
        return UNREADABLE
    return KINDS[before["choice"] == gold and gold is not None, after["choice"] == gold and gold is not None]


def told(record: BiasRecord, revision: Revision, kind: str) -> dict[str, Any]:
    """Lay a case out: what was shown, what was right, and every round."""
    assert record.pair is not None
    gold = record.pair.biased.gold
    first = revision.rounds[0].trace
    return {
        "kind": kind, "record": record, "case": shown_case(record, revision), "revision": revision,
        "flagged": "unreadable" if first is None or first.verdict is None else "Yes" if first.verdict else "No",
        "gold": record.pair.biased.options[gold] if gold is not None else "unknown",
        "decisions": [[decision(judgement) for judgement in entry.judgements] for entry in revision.rounds],
        "unread": [
            [j.reply for j in entry.judgements if j.outcome.kind == "unreadable"] for entry in revision.rounds
        ],
    }  # fmt: skip


def page_bytes(case: dict[str, Any]) -> int:
    """Tell how long a case is on the page, its texts escaped: a text of signs grows to five times its length."""
    from markupsafe import escape

    shown: Case | None = case["case"]
    texts = [case["gold"], *(reply for replies in case["unread"] for reply in replies)]
    if shown is not None:
        texts += [shown.question, *(text for view in shown.views for text in (view.statement or "", *view.options))]
    texts += [entry.trace.thinking or entry.trace.reply for entry in case["revision"].rounds if entry.trace]
    return CASE_BYTES + sum(len(escape(text).encode()) for text in texts)


def shown_case(record: BiasRecord, revision: Revision) -> Case | None:
    """Rebuild what the detector saw in the first round; None where a decision can't be read."""
    assert record.pair is not None
    judgements = revision.rounds[0].judgements
    if any(judgement.outcome.kind == "unreadable" for judgement in judgements):
        return None
    items = [record.pair.plain, record.pair.biased][-len(judgements) :]
    return case_from_views(record.id, record.bias, list(zip(items, judgements, strict=True)), "all")


def decision(judgement: Judgement) -> str:
    """Name a decision as it was shown."""
    choice = judgement.outcome.choice
    return label(judgement.order.index(choice)) if choice is not None else judgement.outcome.kind


def three(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pick the three that the page opens with: a repaired one, one rightly left alone, a broken one.

    The first by id of a bias that isn't shown yet, one order before two, else the first by id.
    """
    picked: list[dict[str, Any]] = []
    for kind in ("Broken", "Repaired", KINDS[True, True]):
        found = [case for case in cases if case["kind"] == kind and (kind in FLIPS or case["flagged"] == "No")]
        shown = {case["record"].bias for case in picked}
        found.sort(
            key=lambda case: (case["record"].bias in shown, case["record"].bias == "position", str(case["record"].id))
        )
        picked += found[:1]
    return [*picked[1:], *picked[:1]] if picked and picked[0]["kind"] == "Broken" else picked


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines that a finished stage wrote."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)["id"], line

"""Make one offline page of a run: tables, plots and cases, and the same tables as Markdown and CSV.

In: the finished stages of this run (and of the run named by from). Out: `index.html`, `summary.json`, `tables/`,
`figures/`.

    rbd report
    rbd report name=real
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from eval.figures import accuracy_figure, detection_figure
from rbd_train.app import STAGES, BaseConfig, stage
from rbd_train.biases import case_from_views
from rbd_train.errors import DataError
from rbd_train.metrics import Rate
from rbd_train.prompts import label
from rbd_train.records import BiasRecord, Case, Revision
from rbd_train.run import Cell, Run, Table, read_manifest
from rbd_train.store import write_json, write_whole
from rbd_train.tables import as_csv, cell_text, markdown

# the order in which the page tells the story, whatever the order of the commands was
SECTIONS = {
    "judgements": "The judge, on D and on D_bias",
    "detection": "The detector, beside rules and ceiling",
    "debias": "The judge, before and after",
    "discover": "Biases found, and how large they are",
    "benchmark": "The set hardened with them",
    "before_after": "The model before and after DPO",
    "dpo": "Preference training",
    "preferences": "Preference pairs",
    "pairs": "Where the items come from",
    "traces": "The teacher's traces",
    "curate": "What was kept to train on",
    "sft": "Training",
}

HEADLINES = {
    "debias.accuracy_before": "accuracy on D_bias before",
    "debias.accuracy_after": "accuracy on D_bias after",
    "debias.broken": "share of right verdicts broken",
    "detection.f1": "detector, macro F1",
    "detection.best_rule_f1": "best content-blind rule, macro F1",
    "seconds": "seconds, all stages",
}


@dataclass
class ReportConfig(BaseConfig):
    """Settings of report."""

    title: str | None = None  # of the page; default: the run's name
    runs: list[str] = field(default_factory=list)  # runs of other seeds, already reported, to show the spread of


@stage("report", ReportConfig)
def main(cfg: ReportConfig, run: Run) -> float | None:
    """Gather, draw, write."""
    found = gather(run)
    summary = summary_of(found)
    spread = spread_table(run, cfg.runs) if cfg.runs else None
    tables = [*([spread] if spread else []), *(Table.model_validate(t) for p in found.values() for t in p["tables"])]
    for table in tables:
        write_whole(run.folder / "tables" / f"{table.name}.md", markdown(table))
        write_whole(run.folder / "tables" / f"{table.name}.csv", as_csv(table))
    write_json(
        run.folder / "summary.json", {name: rate.model_dump(exclude_none=False) for name, rate in summary.items()}
    )
    figures = {}
    for name, draw in (("accuracy", accuracy_figure), ("detection", detection_figure)):
        drawn = draw(summary)
        if drawn is not None:
            for suffix, data in drawn.items():
                write_whole(run.folder / "figures" / f"{name}.{suffix}", data)
            figures[name] = base64.b64encode(drawn["svg"]).decode()
    title = cfg.title or f"rbd_train: {run.name}"
    write_whole(run.folder / "index.html", page(title, found, summary, figures, told_cases(run), spread))
    for file in ("index.html", "summary.json"):
        run.note_output(file)
    run.say(f"report: {run.folder / 'index.html'}")
    return None


def gather(run: Run) -> dict[str, dict[str, Any]]:
    """Read every finished stage of this run; what it hasn't got is taken from the run named by from.

    Raises:
        DataError: there is nothing to report.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in STAGES:
        for source in dict.fromkeys((run.name, run.source)):
            folder = run.root / source / name
            manifest = read_manifest(folder)
            if name == "report" or manifest is None or manifest["status"] != "complete":
                continue
            run.note_input(folder / "tables.json")
            found[name] = {
                "manifest": manifest,
                "tables": json.loads((folder / "tables.json").read_text(encoding="utf-8")),
                "metrics": json.loads((folder / "metrics.json").read_text(encoding="utf-8")),
            }
            break
    if not found:
        raise DataError(f"report: run {run.name} has no finished stage in {run.root / run.name}; run `make demo` first")
    return found


def summary_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Rate]:
    """Flatten every stage's figures, and add the seconds and calls of the whole run."""
    summary = {name: Rate.model_validate(v) for part in found.values() for name, v in part["metrics"].items()}
    seconds = sum(part["manifest"]["seconds"] for part in found.values())
    calls = sum(
        counts["asked"] + counts["from_ledger"]
        for part in found.values() for counts in part["manifest"]["facts"].values()
        if isinstance(counts, dict) and "asked" in counts
    )  # fmt: skip
    return summary | {"seconds": Rate(value=seconds, n=len(found)), "calls": Rate(value=float(calls), n=len(found))}


def spread_table(run: Run, names: Sequence[str]) -> Table:
    """Show the headline figures run by run, with their mean and standard deviation over runs.

    Raises:
        DataError: a run has no finished report.
    """
    summaries = []
    for name in names:
        path = run.output_of("report", "summary.json", name)
        run.note_input(path)
        summaries.append({k: Rate.model_validate(v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()})
    rows: list[tuple[Cell, ...]] = []
    for key, text in HEADLINES.items():
        rates = [summary.get(key, Rate(value=None, n=0)) for summary in summaries]
        values = [rate.value for rate in rates if rate.value is not None]
        rows.append((text, *rates, mean(values) if values else None, stdev(values) if len(values) > 1 else None))
    return Table(
        name="spread", title="The same job, run by run", columns=("figure", *names, "mean", "standard deviation"),
        rows=tuple(rows), note=f"Each run has a seed of its own, and so other questions and another detector; "
        f"{len(names)} runs.",
    )  # fmt: skip


def told_cases(run: Run) -> list[dict[str, Any]]:
    """Pick three decisions to tell in full: a repaired one, one rightly left alone, a broken one (first by id)."""
    folders = [run.root / name / "debias" for name in (run.name, run.source)]
    manifest, folder = next(((found, f) for f in folders if (found := read_manifest(f))), (None, folders[0]))
    if manifest is None or manifest["status"] != "complete":
        return []
    revisions = run.read(folder / "revisions.jsonl", Revision)
    records_path = next(Path(path) for path in manifest["inputs"] if path.endswith("records.jsonl"))
    records = {record.id: record for record in run.read(records_path, BiasRecord)}
    told: dict[str, dict[str, Any]] = {}
    for revision in sorted(revisions, key=lambda r: r.id):
        record = records[revision.id]
        assert record.pair is not None
        gold = record.pair.biased.gold
        before, after = revision.rounds[0].judgements[-1].right(gold), revision.rounds[-1].judgements[-1].right(gold)
        kind = {(False, True): "Repaired", (True, True): "Rightly left alone", (True, False): "Broken"}.get(
            (bool(before), bool(after))
        )
        trace = revision.rounds[0].trace
        if (
            kind is None
            or kind in told
            or trace is None
            or (kind == "Rightly left alone" and trace.verdict is not False)
        ):
            continue
        told[kind] = {
            "kind": kind, "record": record, "case": shown_case(record, revision), "revision": revision,
            "gold": record.pair.biased.options[gold] if gold is not None else "unknown",
            "decisions": [[decision(j) for j in entry.judgements] for entry in revision.rounds],
        }  # fmt: skip
    return [told[kind] for kind in ("Repaired", "Rightly left alone", "Broken") if kind in told]


def shown_case(record: BiasRecord, revision: Revision) -> Case:
    """Rebuild what the detector saw in the first round."""
    assert record.pair is not None
    judgements = revision.rounds[0].judgements
    items = [record.pair.plain, record.pair.biased][-len(judgements) :]
    return case_from_views(record.id, record.bias, list(zip(items, judgements, strict=True)), "all")


def decision(judgement: Any) -> str:
    """Name a decision as it was shown."""
    choice = judgement.outcome.choice
    return label(judgement.order.index(choice)) if choice is not None else judgement.outcome.kind


def page(
    title: str, found: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Rate], figures: Mapping[str, str],
    cases: Sequence[Mapping[str, Any]], spread: Table | None = None,
) -> str:  # fmt: skip
    """Render the page; every text in it is escaped, and it needs no network."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"cell": cell_text}
    environment.globals |= {"label": label, "HEADLINES": HEADLINES}
    parts = [
        {"stage": name, "title": heading, **found[name],
         "tables": [Table.model_validate(table) for table in found[name]["tables"]]}
        for name, heading in SECTIONS.items() if name in found
    ]  # fmt: skip
    leaning = found.get("judgements", {}).get("manifest", {}).get("facts", {}).get("leaning") or {}
    template = any("template" in table.note for part in parts for table in part["tables"] if part["stage"] == "traces")
    return environment.get_template("report.html.jinja").render(
        title=title, parts=parts, summary=summary, figures=figures, cases=cases, leaning=leaning, template=template,
        spread=spread,
        manifests={name: part["manifest"] for name, part in found.items()},
    )  # fmt: skip

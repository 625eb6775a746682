"""Make one offline page of a run: tables, plots and cases, and the same tables as Markdown, CSV and LaTeX.

In: the finished stages of this run (and of the run named by from). Out: `index.html`, `summary.json`, `tables/`,
`figures/`, `cases.jsonl` (decisions that the page has no room for).

    rbd report
    rbd report name=both 'runs=[small,large]' from=small layout=rbd_scaling
"""

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from eval.cases import ALL_KINDS, browse, three
from eval.contrast_figures import contrast_figures
from eval.doubts import doubts, unfinished
from eval.figures import draw
from eval.layouts import LAYOUTS, Told
from eval.rivals import DETECTOR_ALONE
from eval.side_by_side import tests_table
from rbd_train.app import STAGES, BaseConfig, stage
from rbd_train.errors import DataError, UsageError
from rbd_train.manifest import read_manifest
from rbd_train.metrics import Rate
from rbd_train.prompts import label
from rbd_train.run import Cell, Run, Table
from rbd_train.store import write_json, write_whole
from rbd_train.tables import as_csv, cell_text, latex, listed, markdown

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
    "contrast": "Scores across ranges",
    "relative": "The smaller relative",
    "judging": "The judge on a preference set",
    "pairs": "Where the items come from",
    "traces": "The teacher's traces",
    "curate": "What was kept to train on",
    "plan": "What training was to take",
    "sft": "Training",
    "distil": "The student beside the teacher's distributions",
}

HEADLINES = {
    "debias.accuracy_before": "accuracy on D_bias before, mean over biases",
    "debias.accuracy_after": "accuracy on D_bias after, mean over biases",
    "debias.broken": "share of right verdicts broken",
    "detection.f1": "detector, macro F1",
    "detection.best_rule_f1": "best content-blind rule, macro F1",
    "seconds": "seconds, all stages",
}


@dataclass
class ReportConfig(BaseConfig):
    """Settings of report."""

    title: str | None = None  # of the page; default: the run's name
    runs: list[str] = field(default_factory=list)  # runs to put side by side, with tests against the first of them
    layout: str | None = None  # also lay the tables out as a paper does: rbd_main, rbd_baselines, biasscope_main, ...


@stage("report", ReportConfig)
def main(cfg: ReportConfig, run: Run) -> float | None:
    """Gather, draw, write."""
    if cfg.layout is not None and cfg.layout not in LAYOUTS:
        raise UsageError(f"layout is {cfg.layout!r}; choose one of {', '.join(LAYOUTS)}")
    if len(set(cfg.runs)) < len(cfg.runs):
        raise UsageError(f"runs is {cfg.runs}; name each run once")
    found = gather(run)
    summary = summary_of(found)
    tables = [Table.model_validate(table) for part in found.values() for table in part["tables"]]
    ours = told_of(run, summary, tables, found)
    runs = {name: told_run(run, name) for name in cfg.runs}
    top = [spread_table(runs), tests_table(run, cfg.runs)] if len(runs) > 1 else []
    top += LAYOUTS[cfg.layout](runs or {run.name: ours}) if cfg.layout else []
    for folder in ("tables", "figures"):  # what an older page had and this one hasn't must not stay beside it
        shutil.rmtree(run.folder / folder, ignore_errors=True)
    for table in [*top, *tables]:
        for suffix, dress in (("md", markdown), ("csv", as_csv), ("tex", latex)):
            write_whole(run.folder / "tables" / f"{table.name}.{suffix}", dress(table))
    write_json(
        run.folder / "summary.json", {name: rate.model_dump(exclude_none=False) for name, rate in summary.items()}
    )
    figures = {}
    for name, drawn in {**draw(ours, runs), **contrast_figures(tables)}.items():
        for suffix, data in drawn.items():
            write_whole(run.folder / "figures" / f"{name}.{suffix}", data)
        figures[name] = base64.b64encode(drawn["svg"]).decode()
    title = cfg.title or f"rbd_train: {run.name}"
    others = {name: told for name, told in runs.items() if name not in (run.name, run.source)}
    warnings = [*unfinished(run, cfg.runs), *doubts(ours)]
    warnings += [f"{name}: {doubt}" for name, told in others.items() for doubt in doubts(told)]
    (run.folder / "cases.jsonl").unlink(missing_ok=True)
    cases = cases_of(run)
    rest = (run.folder / "cases.jsonl").is_file()
    write_whole(run.folder / "index.html", page(title, found, summary, figures, cases, top, warnings, rest))
    drawn_files = [path for folder in ("tables", "figures") for path in sorted((run.folder / folder).glob("*"))]
    for file in ("index.html", "summary.json", *(str(path.relative_to(run.folder)) for path in drawn_files)):
        run.note_output(file)
    if rest:
        run.note_output("cases.jsonl")
    if lead(summary):
        run.say(lead(summary))
    run.say(f"report: {run.folder / 'index.html'}")
    return None


def told_of(
    run: Run, summary: Mapping[str, Rate], tables: Sequence[Table], found: Mapping[str, Mapping[str, Any]]
) -> Told:
    """Bundle what a layout sees of a run."""
    manifests = {name: part["manifest"] for name, part in found.items()}
    return Told(summary, {table.name: table for table in tables}, manifests, measured_model(run, manifests))


def measured_model(run: Run, manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the model that a run's detector began as; empty where none detects (the rules) or is known."""
    for stage_name in ("detection", "debias"):
        detector = manifests.get(stage_name, {}).get("config", {}).get("detector")
        if detector:
            return base_of(run, str(detector.get("model") or (detector.get("engine") or {}).get("model") or ""))
    return base_of(run, str(manifests["sft"]["config"]["model"]["path"])) if "sft" in manifests else ""


def base_of(run: Run, model: str) -> str:
    """Follow a model that a training stage left, in whatever run, back to the one it was trained from."""
    path = Path(model)
    if path.name == "model" and len(path.parts) > 2:
        for folder in (run.root / path.parts[-3] / path.parts[-2], path.parent):  # a root may have moved
            made = read_manifest(folder)
            if made is not None:
                return base_of(run, str(made["config"]["model"]["path"]))
    return model


def told_run(run: Run, name: str) -> Told:
    """Read another run's finished stages.

    Raises:
        DataError: it has none.
    """
    other = Run(run.root, name, "report", name, run.config)
    found = gather(other)
    run.inputs |= other.inputs
    tables = [Table.model_validate(table) for part in found.values() for table in part["tables"]]
    return told_of(run, summary_of(found), tables, found)


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
        raise DataError(
            f"report: run {run.name} has no finished stage in {run.root / run.name}; finish a stage that measures "
            f"(judgements, detection, debias, contrast, ...) with name={run.name}, or all by `make demo`"
        )
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


def spread_table(runs: Mapping[str, Told]) -> Table:
    """Show the headline figures' mean and standard deviation over runs."""
    rows: list[tuple[Cell, ...]] = []
    for key, text in HEADLINES.items():
        rates = [told.summary.get(key, Rate(value=None, n=0)) for told in runs.values()]
        values = [rate.value for rate in rates if rate.value is not None]
        rows.append((text, *rates, mean(values) if values else None, stdev(values) if len(values) > 1 else None))
    return Table(
        name="spread", title="Spread over the runs", columns=("figure", *runs, "mean", "standard deviation"),
        rows=tuple(rows), note=f"{len(runs)} runs; a spread over seeds, where a seed is all they differ in.",
    )  # fmt: skip


def cases_of(run: Run) -> list[dict[str, Any]]:
    """Choose the single cases that the page shows, from this run's debias stage or that of the run named by from."""
    for name in dict.fromkeys((run.name, run.source)):
        folder = run.root / name / "debias"
        manifest = read_manifest(folder)
        if manifest is not None and manifest["status"] == "complete":
            records = run.fact_path(manifest, "records")
            for path in (records, folder / "revisions.jsonl"):
                run.note_input(path)
            return browse(records, folder / "revisions.jsonl", run.folder / "cases.jsonl", run.config["seed"])
    return []


def lead(summary: Mapping[str, Rate]) -> str:
    """Tell the run's story in three sentences; empty where it has no detector or no loop.

    All accuracies are of all decisions together, as the rivals' are: a mean over biases is another figure.
    """
    keys = (
        "debias.accuracy_before_pooled",
        "detection.f1",
        "detection.best_rule_f1",
        "debias.accuracy_after_pooled",
        "debias.broken",
    )
    figures = [summary[key] for key in keys if key in summary]
    if len(figures) < len(keys) or any(rate.value is None for rate in figures):
        return ""
    before, f1, rule, after, broken = (float(rate.value or 0) for rate in figures)
    rivals = {
        key.removeprefix("debias.method."): rate.value for key, rate in summary.items()
        if key.startswith("debias.method.") and rate.value is not None
        and not key.endswith((".the loop", ".decisions as they were", f".{DETECTOR_ALONE}"))
        and not key.startswith(("debias.method.judge ", "debias.method.panel "))  # other models are not cheap
    }  # fmt: skip
    best = max(rivals, key=lambda name: rivals[name], default=None)
    return (
        f"The judge is right in {before:.1%} of its decisions on D_bias. The detector says which are biased with macro "
        f"F1 {f1:.3f}; the best content-blind rule has {rule:.3f}. Given what it says, the judge is right in "
        f"{after:.1%}"
        + (f"; the best cheap rival ({best}) reaches {rivals[best]:.1%}" if best else "")
        + f". {broken:.1%} of the right decisions were broken."
    )


def page(
    title: str, found: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Rate], figures: Mapping[str, str],
    cases: list[dict[str, Any]], top: Sequence[Table], warnings: Sequence[str], rest: bool,
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
    planted = any(part["manifest"].get("facts", {}).get("planted") for part in found.values())
    environments: dict[str, list[str]] = {}
    for name, part in found.items():
        environments.setdefault(listed(part["manifest"].get("versions", {})), []).append(name)
    template = any("template" in table.note for part in parts for table in part["tables"] if part["stage"] == "traces")
    return environment.get_template("report.html.jinja").render(
        title=title, parts=parts, summary=summary, figures=figures, cases=cases, leaning=leaning, template=template,
        planted=planted, environments=list(environments.items()),
        top=top, warnings=warnings, lead=lead(summary), rest=rest, three=three(cases), kinds=list(ALL_KINDS),
        biases=sorted({case["record"].bias for case in cases}),
        manifests={name: part["manifest"] for name, part in found.items()},
    )  # fmt: skip

"""The discovery paper's tables, the published numbers beside ours (arXiv 2602.09383); layouts of `rbd report`."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rbd_train.run import Cell, Table

if TYPE_CHECKING:
    from eval.layouts import Told

# target: (validated biases, error as it is, error under BiasScope), from third-party notes whose aggregation is unknown
PUBLISHED = {
    "Qwen2.5-1.5B-Instruct": (48, 0.486, 0.531), "internlm3-8b-instruct": (19, 0.453, 0.507),
    "Mistral-7B-Instruct-v0.3": (41, 0.439, 0.512), "Qwen2.5-7B-Instruct": (27, 0.434, 0.481),
    "Llama-3.1-8B-Instruct": (29, 0.417, 0.525), "Qwen2.5-14B-Instruct": (19, 0.377, 0.478),
    "Qwen3-8B": (14, 0.369, 0.427),
}  # fmt: skip
LOW = "low: third-party notes"


def biasscope_main(runs: Mapping[str, "Told"]) -> list[Table]:
    """Lay out, per judge, how many biases were found and what they do to its error."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs.items():
        if "discover.accepted" not in run.summary:
            continue
        facts = run.manifests["discover"]["facts"]
        published = PUBLISHED.get(facts["judge"], (None, None, None))
        found = run.summary["discover.accepted"].value
        errors = [run.summary.get(f"discover.error_{kind}") for kind in ("plain", "biased")]
        trust = LOW if published[0] else None
        rows.append(
            (
                name,
                facts["judge"],
                size_of_judge(run.manifests["discover"]),
                facts["rewriter"],
                found,
                *errors,
                *published,
                trust,
            )
        )
    columns = (
        "run", "judge", "size", "teacher", "biases", "error plain", "error with a bias", "published biases",
        "published error plain", "published error with a bias", "trust in the published",
    )  # fmt: skip
    note = (
        "Ours: the mean over accepted biases, on items that neither named nor chose one. Published: accepted by a "
        "strictly larger error on the items that are reported; how it is averaged over biases is unknown."
    )
    title = "Biases per judge (layout of BiasScope's main table)"
    return [Table(name="biasscope_main", title=title, columns=columns, rows=tuple(rows), note=note)]


def judgebench_pro(runs: Mapping[str, "Told"]) -> list[Table]:
    """Lay out hardened sets: how they were made, and what they do to judges, per domain and size too."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs.items():
        if "benchmark.kept" in run.summary:
            kept, kappa = run.summary["benchmark.kept"], run.summary["benchmark.kappa"]
            rows.append((name, kept.n, kept, kappa))
    rows.append(("JudgeBench-Pro, published (low trust)", 6200, 1178 / 6200, 0.92))
    columns = ("set", "variants", "share kept", "Fleiss' kappa")
    title = "Hardened sets (layout of JudgeBench-Pro)"
    return [
        Table(name="judgebench_pro", title=title, columns=columns, rows=tuple(rows)), transfer_table(runs),
        domains_table(runs),
    ]  # fmt: skip


def transfer_table(runs: Mapping[str, "Told"]) -> Table:
    """Show the error of each judge on a set's plain and biased side, paired; the runs are of `rbd judging`."""
    rows: list[tuple[Cell, ...]] = []
    for hard, plain, cells in twins(runs):
        manifest = runs[hard].manifests["judging"]
        rows.append(
            (manifest["facts"]["judge"], size_of_judge(manifest), set_of(manifest), chosen_against(runs, hard),
             cells["items of both"], cells["error rate, other"], cells["error rate"], cells["change in accuracy"],
             cells["p"], f"{plain} -> {hard}")
        )  # fmt: skip
    columns = (
        "judge", "size", "set", "chosen against it", "items", "error plain", "error hardened", "change of the error",
        "p", "runs",
    )  # fmt: skip
    note = (
        "Both orders; unreadable counts as wrong; the change is paired by item and order. A set that was chosen "
        "against a judge says nothing of that judge's error; a dash: the run that chose it is not in this report."
    )
    if not rows:
        note += (
            " No two runs here are one judge on both sides of a set: give `rbd judging side=biased` the plain run "
            "('compare=[plain]'), and the report both runs."
        )
    title = "Transfer to judges"
    return Table(name="judgebench_pro_judges", title=title, columns=columns, rows=tuple(rows), note=note)


def domains_table(runs: Mapping[str, "Told"]) -> Table:
    """Show each judge's error per domain, plain and hardened, by the judges' size."""
    rows: list[tuple[Cell, ...]] = []
    for hard, plain, _ in twins(runs):
        manifest = runs[hard].manifests["judging"]
        told = size_of_judge(manifest), manifest["facts"]["judge"]
        for key, rate in runs[hard].summary.items():
            if key.startswith("judging.error."):
                domain = key.removeprefix("judging.error.")
                rows.append((domain or "(none)", *told, runs[plain].summary.get(key), rate))
    rows.sort(key=lambda row: (str(row[0]), _parameters(str(row[1])), str(row[2])))
    columns = ("domain", "size", "judge", "error plain", "error hardened")
    title = "Error per domain and size of the judge"
    note = "The size is read off the name of the judge or of its model; a dash: neither names one."
    return Table(name="judgebench_pro_domains", title=title, columns=columns, rows=tuple(rows), note=note)


def twins(runs: Mapping[str, "Told"]) -> list[tuple[str, str, Mapping[str, Cell]]]:
    """Find runs where one judge judged a set's biased side and was compared with itself on the plain side.

    Returns:
        The biased run, the plain one, and the row that compares them (table judging_compare), by its columns.
    """
    found: list[tuple[str, str, Mapping[str, Cell]]] = []
    for name, run in runs.items():
        if "judging_compare" not in run.tables:
            continue
        manifest = run.manifests["judging"]
        table = run.tables["judging_compare"]
        for other, cells in zip(manifest["config"]["compare"], table.rows, strict=True):
            theirs = runs[other].manifests.get("judging") if other in runs else None
            if theirs is None or theirs["facts"]["fingerprint"] != manifest["facts"]["fingerprint"]:
                continue
            if (theirs["config"]["side"], manifest["config"]["side"]) == ("plain", "biased"):
                found.append((name, other, dict(zip(table.columns, cells, strict=True))))
    return found


def set_of(manifest: Mapping[str, Any]) -> str:
    """Name the set that a run judged, by the file of its pairs or of its source."""
    config = manifest["config"]
    return str(config["pairs"] or (config["source"] or {}).get("path") or "–")


def chosen_against(runs: Mapping[str, "Told"], name: str) -> str | None:
    """Say whether a run's judge was in the filter that chose its set; None where the set's making isn't known."""
    manifest = runs[name].manifests["judging"]
    judged = {entry["sha256"] for entry in manifest["inputs"].values()}
    for run in runs.values():
        made = run.manifests.get("benchmark")
        if made is not None and made["outputs"]["pairs.jsonl"]["sha256"] in judged:
            names = made["facts"]["filter"]
            facts = manifest["facts"]  # under other settings of its own it is the same judge still, by name
            return "yes" if facts["judge"] in names or facts["fingerprint"] in names.values() else "no"
    return None


def size_of_judge(manifest: Mapping[str, Any]) -> str:
    """Read a judge's size off its name, or off its model's where its own tells none."""
    engine = manifest["config"]["judge"].get("engine") or {}
    return size_in(f"{manifest['facts']['judge']} {engine.get('model', '')}")


def size_in(text: str) -> str:
    """Read a model's size off its name; a dash where it names none."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*([BM])\b", text, re.IGNORECASE)
    return f"{found[1]}{found[2].upper()}" if found else "–"


def _parameters(size: str) -> float:
    return float(size[:-1]) * {"B": 1e9, "M": 1e6}[size[-1]] if size[-1:] in ("B", "M") else 0.0

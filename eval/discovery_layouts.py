"""The discovery paper's tables, the published numbers beside ours (arXiv 2602.09383); layouts of `rbd report`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

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
        rows.append((name, facts["judge"], facts["rewriter"], found, *errors, *published, trust))
    columns = (
        "run", "judge", "teacher", "biases", "error plain", "error with a bias", "published biases",
        "published error plain", "published error with a bias", "trust in the published",
    )  # fmt: skip
    note = (
        "Ours: the mean over accepted biases, on items that neither named nor chose one. Published: accepted by a "
        "strictly larger error on the items that are reported; how it is averaged over biases is unknown."
    )
    title = "Biases per judge (layout of BiasScope's main table)"
    return [Table(name="biasscope_main", title=title, columns=columns, rows=tuple(rows), note=note)]


def judgebench_pro(runs: Mapping[str, "Told"]) -> list[Table]:
    """Lay out hardened sets: how many variants were made and stayed, and how far reviewers agreed."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs.items():
        if "benchmark.kept" in run.summary:
            kept, kappa = run.summary["benchmark.kept"], run.summary["benchmark.kappa"]
            rows.append((name, kept.n, kept, kappa))
    rows.append(("JudgeBench-Pro, published (low trust)", 6200, 1178 / 6200, 0.92))
    columns = ("set", "variants", "share kept", "Fleiss' kappa")
    title = "Hardened sets (layout of JudgeBench-Pro)"
    return [Table(name="judgebench_pro", title=title, columns=columns, rows=tuple(rows))]

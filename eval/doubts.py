"""What a report's figures can't carry: what is unfinished, unreadable, of one class, or no better than a rule."""

from collections.abc import Mapping, Sequence

from eval.layouts import Told
from eval.rivals import DETECTOR_ALONE
from rbd_train.app import STAGES
from rbd_train.manifest import read_manifest
from rbd_train.metrics import Rate
from rbd_train.run import Cell, Run, Table

ELSEWHERE = ("discover", "benchmark", "dpo", "before_after", "contrast", "judging")  # measure without a detector


def unfinished(run: Run, others: Sequence[str]) -> list[str]:
    """Say which stages of this run, of the run that it draws from and of the others failed, stopped or are missing."""
    places = [(run.name, run.source), *((name, name) for name in others if name not in (run.name, run.source))]
    said = []
    for names in map(dict.fromkeys, places):
        absent, elsewhere = [], False
        for stage_name in STAGES:
            manifests = {name: read_manifest(run.root / name / stage_name) for name in names}
            if stage_name in ("judgements", "detection", "debias") and not any(manifests.values()):
                absent.append(stage_name)
            elsewhere |= stage_name in ELSEWHERE and any(manifests.values())
            for name, manifest in manifests.items():
                if manifest is not None and manifest["status"] == "complete":
                    break  # the page shows this one
                if manifest is not None and stage_name != "report":
                    why = manifest["reason"] or "no reason given"
                    said.append(f"{name}: stage {stage_name} is {manifest['status']}: {why}")
        if absent and not (elsewhere and len(absent) == 3):
            said.append(f"{', '.join(names)}: no stage {', '.join(absent)}; what they measure is missing here")
    return said


def doubts(told: Told) -> list[str]:
    """Say what in the figures can't carry weight: nothing readable, a single class, one judge, no rival beaten."""
    said = []
    for name, table in told.tables.items():
        if name.startswith("detection_counts"):
            for row in table.rows:
                cases, yes = row[1], row[2]
                if yes in (0, cases):
                    said.append(
                        f"{name}: {row[0]} has only {'Yes' if yes else 'No'} ({cases} cases): F1 and ROC say nothing"
                    )
        if name.startswith("detection_paired") and len({row[1] for row in table.rows if row[1] != "all"}) == 1:
            said.append(f"{name}: one judge; nothing is said about others")
        said += nothing_read(table)
    return said + [*wrong_is_biased(told), *loop_against_detector(told.summary), *rules_not_beaten(told.summary)]


def rules_not_beaten(summary: Mapping[str, Rate]) -> list[str]:
    """Say where a content-blind rule, or one answer for all, does as well as the detector: overall or for a bias."""
    said = []
    for key in [key for key in summary if key.endswith(".best_rule_f1")]:
        name = key.removesuffix(".best_rule_f1")
        biases = [k.removeprefix(f"{name}.f1.") for k in summary if k.startswith(f"{name}.f1.")]
        pairs = {"macro F1": ("f1", "best_rule_f1"), "accuracy": ("accuracy", "best_rule_accuracy")}
        pairs |= {f"F1 of {bias}": (f"f1.{bias}", f"rule_f1.{bias}") for bias in biases}
        lost = []
        for what, figures in pairs.items():
            ours, rule = (summary.get(f"{name}.{figure}") for figure in figures)
            if not ours or not rule or ours.value is None or rule.value is None or ours.n != rule.n:
                continue
            if ours.value <= rule.value:
                lost.append(f"{what} {ours.value:.3f} against {rule.value:.3f}")
        if lost:
            said.append(f"{name}: the detector does not beat the best content-blind rule: {'; '.join(lost)}")
    return said


def nothing_read(table: Table) -> list[str]:
    """Say which rows of a table hold no readable reply: of a detector, of a judge, of a bias."""
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    mute = [str(row[table.columns[0]]) for row in rows if "coverage" in row and _number(row["coverage"]) == 0]
    if table.name == "judgements":
        mute = [str(row["bias"]) for row in rows if row["records"] and row["unreadable"] == row["records"]]
    if not mute:
        return []
    whose = "" if "all" in mute or len(mute) == len(rows) else f" of {', '.join(mute)}"
    return [f"{table.name}: no reply{whose} can be read; every figure there is of unreadable ones"]


def _number(cell: Cell) -> object:
    return cell.value if isinstance(cell, Rate) else cell


def wrong_is_biased(told: Told) -> list[str]:
    """Say where nearly all that is wrong is biased: a detector that only tells right from wrong would do as well."""
    table = told.tables.get("detection_counts")
    counts = [row for row in table.rows if row[4] is not None] if table else []
    biased = sum(int(str(row[4])) for row in counts)
    wrong = biased + sum(int(str(row[6])) for row in counts)
    if not wrong or biased < 0.9 * wrong:
        return []
    return [
        f"of {wrong} decisions that are wrong on D_bias, {biased} are biased (right on D): a detector that knows the "
        "right answer and nothing of biases would do as well on these cases"
    ]


def loop_against_detector(summary: Mapping[str, Rate]) -> list[str]:
    """Say where the detector's verdict alone would repair more than the judge does with its reasoning."""
    loop, alone = (summary.get(f"debias.method.{name}") for name in ("the loop", DETECTOR_ALONE))
    if not loop or not alone or loop.value is None or alone.value is None or alone.value <= loop.value:
        return []
    return [
        f"flipping every decision where the detector says Yes would be right in {alone.value:.3f}, the judge asked "
        f"again in {loop.value:.3f}: the judge does not take all of a good detector's advice (nor all of a bad one's)"
    ]

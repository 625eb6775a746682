"""What was planted is found: simulated judges and detectors of known rates, and rules exposed for what they are."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from data_gen.biases.injectors import Cue, make_pair
from data_gen.judgements import label, views_of
from data_gen.pairs import turn
from eval.baselines import chose_the_longer
from eval.debias import decision_of, decision_on_d
from eval.debias_tables import gain, outcome_of, rate, sensitive, share, unbiased_table
from eval.detection_tables import methods_table
from eval.reliance import reliance_table
from eval.verdicts import verdicts
from rbd_train.biases import case_of
from rbd_train.debias import debias
from rbd_train.errors import UsageError
from rbd_train.judge import Shown
from rbd_train.ledger import Ledger
from rbd_train.metrics import Rate
from rbd_train.planted import PlantedJudgeConfig
from rbd_train.prompts.detect import choose_shots, shot_messages
from rbd_train.records import BiasPair, BiasRecord, Case, Example, Question, Trace, uniform
from rbd_train.run import Table

RIGHT, BIASED, REPAIRED, BROKEN, FOUND, ALARM = 0.9, 0.35, 0.6, 0.1, 0.8, 0.15


def pairs(count: int, bias: str, congruent: bool = False) -> list[BiasPair]:
    questions = [
        Question(id=f"q{k}", group=f"g{k}", question=f"What is {k}?", right=f"It is plainly {k}.\n{k}", final=str(k),
                 wrong=f"It is by no means {k}.\n{k + 1}")
        for k in range(count)
    ]  # fmt: skip
    return [make_pair(question, bias, "planted", Cue(congruent), True) for question in questions]


class PlantedDetector:
    """Says Yes at known rates to wrong and to right decisions on the view that it is shown."""

    name = "planted detector"
    definitions: Literal["all", "subset", "known"] = "all"

    def __init__(self, wrong: dict[str, bool], seed: int) -> None:
        self.wrong, self.seed = wrong, seed

    def detect(self, cases: Sequence[Case]) -> list[Trace]:
        return [
            Trace(case_id=case.id, author=self.name, thinking="t", reply="r",
                  verdict=uniform("flag", self.seed, case.id) < (FOUND if self.wrong[case.id] else ALARM))
            for case in cases
        ]  # fmt: skip

    def calls(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def one_run(seed: int, folder: Path, count: int = 120) -> dict[str, Rate]:
    """Judge, detect and revise 2 x count records; return what the stage's tables would say."""
    ledger = Ledger(folder / "l.sqlite")
    judge = PlantedJudgeConfig(
        right=RIGHT, biased={"bandwagon": BIASED}, repaired=REPAIRED, broken=BROKEN, seed=seed
    ).open(ledger)  # fmt: skip
    views = views_of(pairs(count, "bandwagon"), "both")
    records = label(views, judge.judge([part for view in views for part in (view.plain, view.biased)]))
    wrong = {record.id: not record.biased.right(record.pair.biased.gold) for record in records}  # type: ignore[union-attr]
    on_d = {f"{r.id}-D": not r.plain.right(r.pair.plain.gold) for r in records}  # type: ignore[union-attr]
    detector = PlantedDetector({**wrong, **on_d}, seed)
    revisions = debias([decision_of(r) for r in records], judge, detector)
    found = [outcome_of(*row) for row in zip(records, revisions, strict=True)]
    before_wrong, before_right = [o for o in found if not o.turns[0].right], [o for o in found if o.turns[0].right]
    harm = unbiased_table(records, debias([decision_on_d(r) for r in records], judge, detector)).rows[-1][7]
    ledger.close()
    assert isinstance(harm, Rate)
    return {
        "accuracy": rate(found, 0, "right"), "bias": sensitive(found, 0), "gain": gain(found), "harm": harm,
        "repaired": share([bool(o.turns[-1].right) for o in before_wrong], before_wrong),
        "broken": share([not o.turns[-1].right for o in before_right], before_right),
    }  # fmt: skip


ACCURACY = RIGHT * (1 - BIASED)
TRUTH = {
    "accuracy": ACCURACY, "bias": BIASED, "repaired": FOUND * REPAIRED,
    "broken": ALARM * BROKEN, "harm": ALARM * BROKEN,
    "gain": (1 - ACCURACY) * FOUND * REPAIRED - ACCURACY * ALARM * BROKEN,
}  # fmt: skip


@pytest.mark.parametrize("runs", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_intervals_hold_the_planted_rates(runs: int, tmp_path: Path) -> None:
    """Over 200 seeded runs, 92 to 98 % of the intervals; a few runs: most of them.

    Every rate then rests on 200 decisions at least: of 140, a rate of .015 has two, and .985 of its intervals hold.
    """
    found = [one_run(seed, tmp_path, 290 if runs >= 200 else 120) for seed in range(runs)]
    for name, truth in TRUTH.items():
        assert runs < 200 or all(run[name].n >= 200 for run in found), name
        held = sum(r[name].low <= truth <= r[name].high for r in found) / runs  # type: ignore[operator]
        low, high = (0.92, 0.98) if runs >= 200 else (0.75, 1.0)
        assert low <= held <= high, f"{name}: {held:.3f} of the intervals hold {truth:.4f}"


def test_a_judge_without_bias_yields_none(tmp_path: Path) -> None:
    judge = PlantedJudgeConfig(right=0.8, lucky=0.0).open(Ledger(tmp_path / "l.sqlite"))
    for bias in ("verbosity", "position", "bandwagon", "sentiment"):
        views = views_of(pairs(40, bias), "both")
        records = label(views, judge.judge([part for view in views for part in (view.plain, view.biased)]))
        assert not any(record.label for record in records), bias
        assert {record.quadrant() for record in records} == {"TT", "FF"}


def examples(records: Sequence[BiasRecord]) -> list[Example]:
    return [
        Example(case=case_of(r, "all"), bias=r.bias, group=r.group, label=bool(r.label), quadrant=r.quadrant())
        for r in records
    ]


def test_a_detector_that_follows_the_length_is_exposed(tmp_path: Path) -> None:
    """It shines on the standard set, fails on the diagnostic one, and the reliance report says why."""
    ledger = Ledger(tmp_path / "l.sqlite")
    f1, follows = {}, {}
    for name, congruent, rates in (("standard", False, {"verbosity": 0.5}), ("diagnostic", True, {})):
        judge = PlantedJudgeConfig(right=1.0, biased=rates).open(ledger)
        views = views_of(pairs(60, "verbosity", congruent), "both")
        rows = examples(label(views, judge.judge([part for view in views for part in (view.plain, view.biased)])))
        said = [
            Trace(case_id=e.case.id, author="m", thinking="t", reply="r", verdict=chose_the_longer(e.case))
            for e in rows
        ]
        methods = verdicts(rows, said, "m")
        table = methods_table(rows, methods, "m")
        f1[name] = table.rows[0][table.columns.index("accuracy")].value  # type: ignore[union-attr]
        reliance = reliance_table(rows, methods)
        last = reliance.rows[-1]
        follows[name] = dict(zip(reliance.columns, last, strict=True))
    assert f1["standard"] == 1.0 and f1["diagnostic"] == 0.0
    assert follows["diagnostic"]["rule wrong"] == 120 and follows["diagnostic"]["follows it there"].value == 1.0  # type: ignore[union-attr]
    perfect = follows["standard"]["kappa with the rule"]
    assert isinstance(perfect, Rate) and perfect.value == perfect.high == 1.0 and 0.8 < (perfect.low or 0.0) < 0.96


@pytest.mark.parametrize("bias", ["verbosity", "position", "bandwagon", "sentiment"])
def test_any_sources_pair_can_be_turned(bias: str) -> None:
    """The cue then favours the right answer: the longer, the last stored, the crowd's, the cheerful."""
    from rbd_train import cues

    for pair in pairs(30, bias):
        made = turn(pair)
        gold, options = made.biased.gold, made.biased.options
        assert made.id == pair.id and made.biased.id == pair.biased.id and gold is not None
        if bias == "verbosity":
            assert cues.longer(options) == gold and options[1 - gold] != options[gold]
        elif bias == "position":
            assert gold == len(options) - 1
        elif bias == "bandwagon":
            assert f"[[option:{gold}]]" in (made.biased.statement or "")
        else:
            assert cues.cheerful(options) == gold


def test_rates_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="judge.biased.verbosity is 2"):
        PlantedJudgeConfig(biased={"verbosity": 2.0}).open(Ledger(tmp_path / "l.sqlite"))


def test_a_planted_bias_is_seen_by_judging_too(rbd: Callable[..., Any]) -> None:
    """Both sides go by the pair's id, which doesn't say which twin it is; the judge is told by the twin's own."""
    assert rbd("pairs", "source.train=0", "source.test=6").code == 0
    judge = ("judge=planted", "judge.biased.verbosity=1", "pairs=runs/default/pairs/pairs.jsonl")
    for words in (("name=plain",), ("name=hard", "side=biased", "compare=[plain]")):
        said = rbd("judging", *judge, *words)
        assert said.code == 0, said.err
    errors = {name: json.loads(Path(f"runs/{name}/judging/metrics.json").read_text()) for name in ("plain", "hard")}
    assert errors["plain"]["judging.error.verbosity"]["value"] == 0.0
    assert errors["hard"]["judging.error.verbosity"]["value"] == 1.0
    assert errors["hard"]["judging.error.sentiment"]["value"] == 0.0


def test_a_planted_run_to_its_report(rbd: Callable[..., Any]) -> None:
    """Simulated judge, rules as detector, every new table; no model is loaded."""
    judge = ("judge=planted", "judge.right=0.9", "judge.biased.verbosity=0.5", "judge.biased.bandwagon=0.5")
    stages = (
        ("pairs", "source.train=3", "source.test=10", "congruent_share=0.3"), ("judgements", *judge),
        ("traces", "teacher=template"), ("curate", "leave_out=[sentiment]"),
        ("pairs", "name=diag", "source.train=0", "source.test=5", "seed=5", "congruent_share=1"),
        ("judgements", "name=diag", "judge=planted"),
        ("detection", "detector=rules", "also=[diag]", "without_name=true"),
        ("debias", *judge, "detector=rules", "max_rounds=3", "baselines=[abstain]", "rivals=true"),
        ("judging", "judge=planted", "judge.right=0.8", "source=generated", "samples=2", "judge.noise=0.1"),
        ("report", "layout=rbd_main"),
    )  # fmt: skip
    for stage, *words in stages:
        said = rbd(stage, *words)
        assert said.code == 0, f"{stage}: {said.err}"
    trained = Path("runs/default/curate/train.jsonl").read_text()
    assert '"bias":"verbosity"' in trained and '"bias":"sentiment"' not in trained
    assert '"bias":"sentiment"' in Path("runs/default/curate/test.jsonl").read_text()
    tables = {path.stem for path in Path("runs/default/report/tables").glob("*.tex")}
    assert {
        "detection", "detection-diag", "detection_reliance", "detection_names", "debias_unbiased", "debias_cost",
        "debias_rivals", "debias_readable", "judging", "judging_agreement", "rbd_main",
    } <= tables  # fmt: skip
    page = Path("runs/default/report/index.html").read_text()
    assert (
        "What is simulated" in page
        and "The judge is no model: it decides by planted rates" in page
        and "one judge; nothing is said about others" in page
        and "Single cases" in page
    )
    assert "diag has only No" in page or "detection_counts-diag" in page
    summary = json.loads(Path("runs/default/report/summary.json").read_text())
    for name in ("accuracy_after", "consistency_before", "broken", "harm"):  # a planted judge is always readable
        assert summary[f"debias.{name}_readable"] == summary[f"debias.{name}"], name
    assert summary["detection-diag.accuracy"]["value"] < 0.5 < summary["detection.accuracy"]["value"]
    again = rbd("report", "name=both", "runs=[default,diag]", "from=default", "layout=rbd_baselines")
    assert again.code == 0, again.err
    beside = Path("runs/both/report/tables/runs_tests.md").read_text()
    assert "stage missing in diag" in beside
    wrong = rbd("report", "name=x", "from=default", "layout=rbd_mian")
    assert wrong.code == 2 and "choose one of rbd_main" in wrong.err


def test_joined_biases_have_a_rule_and_a_rule_that_wins_is_told(rbd: Callable[..., Any]) -> None:
    """The rules themselves as detector beat no rule, on either set; a joined bias's rule is that any part's fires."""
    judge = ("judge=planted", "judge.right=0.9", "judge.biased.verbosity=0.2", "judge.biased.bandwagon=0.2")
    crowd = ", ".join(f'{{pattern: "believe that Output .{x}", reply: "Output ({x})"}}' for x in "ab")
    rules = f'engine.rules=[{crowd}, {{pattern: "(?s).*", reply: "Output (a)"}}]'
    stages = (
        ("pairs", "source.train=3", "source.test=20", "bias=[verbosity,bandwagon]"), ("judgements", *judge),
        ("traces", "teacher=template"), ("curate",),
        ("pairs", "name=both", "source.train=0", "source.test=20", "seed=3", "bias=[verbosity+bandwagon]"),
        ("judgements", "name=both", "judge=generative", "engine=scripted", rules),
        ("detection", "detector=rules", "also=[both]"), ("report",),
    )  # fmt: skip
    for stage, *words in stages:
        said = rbd(stage, *words)
        assert said.code == 0, f"{stage}: {said.err}"
    found = {table["name"]: Table.model_validate(table)
             for table in json.loads(Path("runs/default/detection/tables.json").read_text())}  # fmt: skip
    names = [row[0] for row in found["detection-both"].rows]
    assert "rule: chose the longer or followed the crowd" in names
    assert [row[1] for row in found["detection_reliance-both"].rows] == ["verbosity+bandwagon", "all"]
    summary = json.loads(Path("runs/default/report/summary.json").read_text())
    for name in ("detection", "detection-both"):  # the detector is the rule
        assert summary[f"{name}.best_rule_f1"]["value"] >= summary[f"{name}.f1"]["value"] > 0
    page = Path("runs/default/report/index.html").read_text()
    assert "detection: the detector does not beat the best content-blind rule: macro F1" in page
    assert "detection-both: the detector does not beat the best content-blind rule" in page


@pytest.mark.parametrize("reasoning", [True, False])
def test_few_shots_cover_both_labels_and_show_the_case_last(reasoning: bool, tmp_path: Path) -> None:
    judge = PlantedJudgeConfig(right=1.0, biased={"verbosity": 0.5, "bandwagon": 0.5}).open(
        Ledger(tmp_path / "l.sqlite")
    )
    rows: list[Example] = []
    for bias in ("verbosity", "bandwagon"):
        views = views_of(pairs(20, bias), "both")
        rows += examples(label(views, judge.judge([part for view in views for part in (view.plain, view.biased)])))
    trace = Trace(case_id="c", author="t", thinking="It weighs the words.", verdict=True, reply="r")
    rows = [row.model_copy(update={"trace": trace}) for row in rows]
    chosen = choose_shots(rows, 4)
    assert [row.label for row in chosen] == [True, False, True, False]
    assert [sum(row.bias == b for row in chosen) for b in ("verbosity", "bandwagon")] == [2, 2]
    turns = shot_messages(chosen, reasoning)
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 4
    assert turns[1]["content"] == ("<think>\nIt weighs the words.\n</think>\n\nYes" if reasoning else "Yes")
    assert [row.case.id for row in choose_shots(rows[::-1], 4)] == [row.case.id for row in chosen]


def test_items_without_a_twin_are_drawn_one_by_one(tmp_path: Path) -> None:
    judge = PlantedJudgeConfig(right=0.8, noise=0.1).open(Ledger(tmp_path / "l.sqlite"))
    items = [
        pair.plain.model_copy(update={"id": f"gen-verbosity-{k}"}) for k, pair in enumerate(pairs(300, "verbosity"))
    ]
    shown = [Shown(item, (0, 1)) for item in items]
    first, second = judge.judge(shown), judge.judge(shown, 1)
    assert 0.73 < sum(j.right(i.gold) is True for i, j in zip(items, first, strict=True)) / 300 < 0.87
    assert 0.05 < sum(a.outcome != b.outcome for a, b in zip(first, second, strict=True)) / 300 < 0.16

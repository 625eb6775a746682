"""Numbers: by hand, against statsmodels and scipy, and by enumeration; undefined is None, never 0 and never NaN."""

import csv
import io
import itertools
import json
import math
from typing import Any

import pytest
from pydantic import ValidationError
from scipy.stats import binomtest
from statsmodels.stats.proportion import proportion_confint

from eval import debias as stage_debias
from eval import debias_tables, verdicts
from eval import detection_tables as detection
from eval.layouts import Told, rbd_main
from rbd_train.metrics import (
    Confusion,
    Rate,
    Scored,
    ceiling,
    confusion,
    f1_rate,
    macro,
    macro_f1,
    mean_rate,
    paired_test,
    proportion,
)
from rbd_train.records import (
    BiasPair,
    BiasRecord,
    Case,
    Definition,
    Example,
    Item,
    Judgement,
    Outcome,
    Revision,
    Round,
    Trace,
    View,
)
from rbd_train.run import Table
from rbd_train.tables import as_csv, cell_text, markdown, show


def rows(text: str, bias: str = "b") -> list[Scored]:
    """Write 'YN Y?' for (label Yes, verdict No), (label Yes, unreadable)."""
    verdicts = {"Y": True, "N": False, "?": None}
    return [Scored(bias, f"g{k}", pair[0] == "Y", verdicts[pair[1]]) for k, pair in enumerate(text.split())]


def test_unreadable_counts_as_wrong() -> None:
    counts = confusion(rows("YY Y? NN N?"))  # B50
    assert counts == Confusion(tp=1, fp=1, fn=1, tn=1)
    assert (counts.accuracy, counts.precision, counts.recall, counts.f1) == (0.5, 0.5, 0.5, 0.5)
    assert confusion(rows("YY NN")).accuracy == 1.0


@pytest.mark.parametrize(
    ("text", "accuracy", "precision", "recall", "f1"),
    [
        ("YY YY YN NY NN NN", 4 / 6, 2 / 3, 2 / 3, 2 / 3),
        ("YN YN NN", 1 / 3, None, 0.0, 0.0),
        ("NN NN", 1.0, None, None, None),
        ("NY NN", 0.5, 0.0, None, 0.0),
        ("Y? N?", 0.0, 0.0, 0.0, 0.0),
        ("", None, None, None, None),
    ],
)
def test_detector_metrics(text: str, accuracy: Any, precision: Any, recall: Any, f1: Any) -> None:
    counts = confusion(rows(text))
    assert (counts.accuracy, counts.precision, counts.recall, counts.f1) == (accuracy, precision, recall, f1)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 10), (7, 10), (10, 10), (438, 500)])
def test_wilson(successes: int, n: int) -> None:
    found = proportion(successes, n)
    low, high = proportion_confint(successes, n, method="wilson")
    assert (found.value, found.n) == (successes / n, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (1, 0), (0, 6), (5, 5), (12, 3), (40, 61)])
def test_mcnemar(only_first: int, only_second: int) -> None:
    first = [True] * only_first + [False] * only_second + [True, True, False]
    second = [False] * only_first + [True] * only_second + [True, True, False]
    found = paired_test(first, second)
    n = only_first + only_second
    expected = binomtest(only_first, n).pvalue if n else 1.0
    assert (found.only_first, found.only_second, found.n) == (only_first, only_second, n + 3)
    assert found.p == pytest.approx(expected, rel=1e-9)
    assert paired_test(second, first).p == found.p


def test_paired_rows_must_match() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_test([True], [])
    assert paired_test([], []).p == 1.0


UNDEFINED: dict[str, Any] = {
    "proportion": lambda: proportion(0, 0), "mean": lambda: mean_rate([], []), "f1": lambda: f1_rate([]),
    "f1 of No alone": lambda: f1_rate(rows("NN NN NN")), "macro f1": lambda: macro_f1([]),
    "macro f1 with one bias undefined": lambda: macro_f1(rows("YY NN", "a") + rows("NN NN", "b")),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNDEFINED)
def test_undefined_is_none(kind: str) -> None:
    found: Rate = UNDEFINED[kind]()
    assert (found.value, found.low, found.high) == (None, None, None)
    assert json.loads(found.model_dump_json())["value"] is None  # B49: null on disk
    assert cell_text(found) == f"– (n={found.n})"


def test_nan_is_refused() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ValidationError):
            Rate(value=value, n=1)


def test_macro_is_over_biases_not_rows() -> None:
    assert macro({"a": 1.0, "b": 0.0, "c": 0.5}) == 0.5
    assert macro({"a": None, "b": 0.4}) is None and macro({}) is None
    found = macro_f1(rows("YY YY YY YY YY YY YY YY", "a") + rows("YN NY", "b"))
    assert found.value == 0.5 and found.n == 10


def test_bootstrap_is_deterministic_and_resamples_groups() -> None:
    values, groups = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 5, [f"g{k // 3}" for k in range(30)]
    uneven = [k**0.5 for k in range(30)]
    assert mean_rate(uneven, groups) == mean_rate(uneven, groups)
    clustered, single = mean_rate(values, groups), mean_rate(values, [f"r{k}" for k in range(30)])
    assert None not in (clustered.low, clustered.high, single.low, single.high)
    assert clustered.high - clustered.low > 1.4 * (single.high - single.low)  # type: ignore[operator]
    assert mean_rate([1.0, 0.0], ["g", "g"]) == Rate(value=0.5, n=2)  # one group: no interval


@pytest.mark.parametrize(("right_on_d", "wrong_on_d"), [(1, 0), (1, 1), (3, 1), (2, 5), (0, 4)])
def test_no_blind_detector_beats_the_ceiling(right_on_d: int, wrong_on_d: int) -> None:
    """By enumeration: cases wrong on D_bias look alike, so it says Yes to a share of them, and to some right ones."""
    right_decisions, best = 6, 0.0
    for tenths, false in itertools.product(range(11), range(right_decisions + 1)):
        tp, fn = right_on_d * tenths / 10, right_on_d * (10 - tenths) / 10
        fp = wrong_on_d * tenths / 10 + false
        best = max(best, 2 * tp / (2 * tp + fp + fn) if tp else 0.0)
    assert ceiling(right_on_d / (right_on_d + wrong_on_d)) == pytest.approx(best)


def test_the_ceiling_of_nothing_is_undefined() -> None:
    assert ceiling(None) is None and ceiling(0.0) == 0.0


# tables ----------------------------------------------------------------------------------------------------------

THIRD = Rate(value=1 / 3, n=3, low=0.1, high=0.2 + 0.1)
TABLE = Table(
    name="t", title="Title", columns=("bias", "rate", "count"), note="A note.",
    rows=(("a|b", THIRD, 3), ("c", None, None), ("d", Rate(value=None, n=0), 1e-17), ("e, f", 0.25, 0)),
)  # fmt: skip


def test_csv_rounds_nothing_away_and_undefined_is_not_0() -> None:
    read = list(csv.DictReader(io.StringIO(as_csv(TABLE))))
    assert list(read[0]) == ["bias", "rate", "rate n", "rate low", "rate high", "count"]
    assert float(read[0]["rate"]) == 1 / 3 and float(read[0]["rate high"]) == 0.2 + 0.1
    assert (read[1]["rate"], read[1]["rate n"], read[1]["count"]) == ("", "", "")
    assert (read[2]["rate"], read[2]["rate n"]) == ("", "0") and float(read[2]["count"]) == 1e-17
    assert (read[3]["bias"], float(read[3]["rate"]), read[3]["count"]) == ("e, f", 0.25, "0")


def test_markdown() -> None:
    lines = markdown(TABLE).splitlines()
    assert lines[:4] == ["**Title**", "", "| bias | rate | count |", "|---|---|---|"]
    assert lines[4] == "| a\\|b | 0.333 [0.100, 0.300] | 3 |"
    assert lines[5:8] == ["| c | – | – |", "| d | – (n=0) | 1e-17 |", "| e, f | 0.250 | 0 |"]
    assert lines[-1] == "A note."


def test_the_terminal_shows_text_as_it_is() -> None:
    """Square brackets are no markup: a detector may be called [mine]."""
    drawn = show(TABLE.model_copy(update={"title": "[mine] wins", "columns": ("[bold]", "b", "c"), "note": "[x] [/y]"}))
    for text in ("[mine] wins", "[bold]", "[x] [/y]", "a|b", "–"):
        assert text in drawn


@pytest.mark.parametrize(
    ("cell", "text"), [(None, "–"), (0, "0"), (0.0, "0.000"), (0.0004, "0.0004"), (0.12345, "0.123"), ("x", "x")]
)
def test_cells(cell: Any, text: str) -> None:
    assert cell_text(cell) == text


def test_a_table_comes_back_from_disk() -> None:
    assert Table.model_validate_json(TABLE.model_dump_json()) == TABLE


# eval/detection --------------------------------------------------------------------------------------------------


def example(number: int, bias: str, label: bool, choice: int, quadrant: Any, teacher: bool | None = None) -> Example:
    """A case whose first option is the longer; the teacher's verdict, where there is one."""
    case = Case(
        id=f"c{number}", definitions=(Definition(name="n", text="t"),), question="q", judge="j",
        views=(View(options=("the longer one", "short"), statement="Output (a) is liked.", choice=choice),),
    )  # fmt: skip
    trace = trace_of(f"c{number}", teacher, "R1") if teacher is not None else None
    return Example(case=case, bias=bias, group=f"g{number}", label=label, quadrant=quadrant, trace=trace)


def trace_of(case_id: str, verdict: bool | None, author: str = "mine", sample: int = 0) -> Trace:
    reject = "no_label" if verdict is None else None
    return Trace(
        case_id=case_id, author=author, sample=sample, thinking="t", verdict=verdict, reply="r", reject=reject
    )  # fmt: skip


EXAMPLES = [
    example(0, "verbosity", True, 0, "TF", teacher=True), example(1, "verbosity", True, 0, "TF", teacher=False),
    example(2, "verbosity", False, 0, "FF"), example(3, "verbosity", False, 1, "TT"),
    example(4, "bandwagon", False, 0, "FT"), example(5, "bandwagon", False, 0, "TT"),
    example(6, "bandwagon", True, 1, "TF"),
]  # fmt: skip
TRACES = [trace_of(f"c{k}", verdict) for k, verdict in enumerate((True, None, False, None, False, False, True))]


def by_column(table: Table, key: str) -> dict[str, Any]:
    row = next(row for row in table.rows if row[0] == key)
    return dict(zip(table.columns, row, strict=True))


def test_counts_and_ceiling() -> None:
    table = detection.counts_table(EXAMPLES)
    found = by_column(table, "verbosity")
    assert [found[name] for name in ("cases", "Yes", "TT", "TF", "FT", "FF")] == [4, 2, 1, 2, 0, 1]
    assert found["F1 ceiling"] == pytest.approx(2 * (2 / 3) / (1 + 2 / 3))
    imported = detection.counts_table([e.model_copy(update={"quadrant": None}) for e in EXAMPLES])
    assert [by_column(imported, "bandwagon")[name] for name in ("TT", "FF", "F1 ceiling")] == [None, None, None]
    position = detection.counts_table([EXAMPLES[0].model_copy(update={"bias": "position"})])
    assert by_column(position, "position")["F1 ceiling"] == "D is seen"
    with pytest.raises(detection.DataError):
        detection.counts_table([])


def test_unreadable_verdicts_are_wrong_in_the_detection_table() -> None:
    said = verdicts.verdicts(EXAMPLES, TRACES, "mine")
    found = by_column(detection.methods_table(EXAMPLES, said, "mine"), "mine")
    assert found["cases"] == 7 and found["accuracy"].value == 5 / 7
    assert found["coverage"].value == 5 / 7 and found["accuracy, readable"].value == 1.0
    assert found["macro F1, readable"].value == 1.0 and found["macro F1, readable"].n == 5
    assert found["precision"].value == 2 / 3 and found["recall"].value == 2 / 3  # c1 a miss, c3 a false alarm
    for name in ("precision", "recall", "coverage"):
        assert found[name].low < found[name].value < found[name].high, name
    assert found["F1 verbosity"].value == 0.5 and found["F1 bandwagon"].value == 1.0
    assert found["macro F1"].value == 0.75


def test_what_no_reply_speaks_of_is_a_dash_among_the_readable() -> None:
    """All of verbosity's replies are unreadable: no mean over biases of what can be read."""
    traces = [trace_of(e.case.id, None if e.bias == "verbosity" else e.label) for e in EXAMPLES]
    table = detection.methods_table(EXAMPLES, verdicts.verdicts(EXAMPLES, traces, "mine"), "mine")
    found = by_column(table, "mine")
    assert found["macro F1, readable"].value is None and found["macro F1"].value == 0.5
    assert "too narrow below 50 questions per bias, here bandwagon 3, verbosity 4" in table.note
    many = [example(k, "verbosity", k % 2 == 0, 0, "TF" if k % 2 == 0 else "FF") for k in range(50)]
    assert (
        "too narrow"
        not in detection.methods_table(many, verdicts.verdicts(many, [trace_of("c0", True)], "m"), "m").note
    )


def test_rules_teacher_and_majority_stand_beside() -> None:
    said = verdicts.verdicts(EXAMPLES, TRACES, "mine")
    table = detection.methods_table(EXAMPLES, said, "mine")
    assert [row[0] for row in table.rows] == [
        "mine", "teacher: R1", "best rule by F1", "best rule by accuracy", "rule: chose the longer",
        "rule: followed the crowd", "majority class",
    ]  # fmt: skip
    longer = by_column(table, "rule: chose the longer")
    assert longer["cases"] == 4 and longer["accuracy"].value == 3 / 4
    assert longer["macro F1"] is None and longer["F1 bandwagon"] is None  # it speaks of one bias only
    assert by_column(table, "teacher: R1")["accuracy"].value == 0.5
    assert by_column(table, "majority class")["cases"] == 7


def test_the_best_rule_is_chosen_per_bias() -> None:
    """For verbosity the rule (3 of 4) beats the class (2 of 4); for bandwagon No (2 of 3) beats the crowd (0 of 3)."""
    assert chosen(EXAMPLES, "accuracy") == {"bandwagon": "always No", "verbosity": "chose the longer"}
    best = verdicts.verdicts(EXAMPLES, TRACES, "mine")["best rule by accuracy"]
    assert best == {"c0": True, "c1": True, "c2": True, "c3": False, "c4": False, "c5": False, "c6": False}
    unknown = [e.model_copy(update={"bias": "discovered"}) for e in EXAMPLES[1:3]]
    assert chosen(unknown, "accuracy") == {"discovered": "always Yes"}


def chosen(examples: list[Example], figure: Any) -> dict[str, str]:
    return {bias: name for bias, (name, _) in verdicts.best_rules(examples, figure).items()}


def test_the_best_rule_by_f1_is_no_constant_no_where_bias_is_rare() -> None:
    """One of seven is biased: always No is right in six and has F1 0, the rule is right in four and finds the one."""
    rare = [example(k, "verbosity", k == 0, int(k > 3), "TF" if k == 0 else "FF") for k in range(7)]
    assert chosen(rare, "accuracy") == {"verbosity": "always No"} and chosen(rare, "f1") == {
        "verbosity": "chose the longer"
    }
    said = verdicts.verdicts(rare, [trace_of(e.case.id, e.case.id == "c1") for e in rare], "mine")
    table = detection.methods_table(rare, said, "mine")
    assert by_column(table, "best rule by F1")["macro F1"].value == 0.4
    assert by_column(table, "best rule by accuracy")["macro F1"].value == 0.0
    assert by_column(detection.paired_table(rare, said, "mine"), "verbosity")["only the rule right"] == 1
    assert chosen([e for e in EXAMPLES if e.bias == "bandwagon"], "f1") == {"bandwagon": "always Yes"}


def test_always_no_is_no_better_than_the_best_rule_where_biases_happen_to_lack_a_yes() -> None:
    """One answer stays a rival for such a bias: else the sum over all biases would reward saying nothing."""
    rows = [example(k, "verbosity", k < 2, int(k > 1), "TF" if k < 2 else "FF") for k in range(6)]
    rows += [example(k, "bandwagon", False, 0, "TT") for k in range(6, 16)]
    said = verdicts.verdicts(rows, [trace_of(e.case.id, False) for e in rows], "mine")
    assert chosen(rows, "accuracy")["bandwagon"] == "always No"
    whole = by_column(detection.paired_table(rows, said, "mine"), "all")
    assert whole["only the detector right"] == 0
    methods = detection.methods_table(rows, said, "mine")
    best, majority = (
        by_column(methods, name)["accuracy"].value for name in ("best rule by accuracy", "majority class")
    )
    assert best >= majority


def test_where_one_class_alone_is_seen_a_constant_is_no_rival() -> None:
    """A diagnostic set has only No: always No is right by construction, and no detector could win against it."""
    rows = [example(k, "verbosity", False, int(k < 4), "TT") for k in range(5)]
    rows += [example(k, "discovered", False, 0, "TT") for k in range(5, 7)]
    assert chosen(rows, "accuracy") == chosen(rows, "f1") == {"verbosity": "chose the longer"}
    said = verdicts.verdicts(rows, [trace_of(e.case.id, False) for e in rows], "mine")
    methods, paired = detection.methods_table(rows, said, "mine"), detection.paired_table(rows, said, "mine")
    assert by_column(methods, "best rule by accuracy")["accuracy"].value == 0.8
    assert "One class alone: one answer is right by construction" in methods.note
    assert "best rule by accuracy speak of fewer" in methods.note
    assert by_column(paired, "verbosity")["only the detector right"] == 1
    found = by_column(paired, "discovered")
    assert (found["cases"], found["accuracy"].value, found["p"], found["only the rule right"]) == (2, 1.0, None, None)


def test_several_samples_vote() -> None:
    votes = {"c0": (True, True, False), "c1": (None, False, None), "c2": (True, False, None), "c3": (None,) * 3}
    traces = [trace_of(c, verdict, sample=k) for c, said in votes.items() for k, verdict in enumerate(said)]
    said = verdicts.verdicts(EXAMPLES[:4], traces, "mine")["mine"]
    assert said == {"c0": True, "c1": False, "c2": True, "c3": None}


def test_the_paired_table_tests_the_same_cases() -> None:
    said = verdicts.verdicts(EXAMPLES, TRACES, "mine")
    table = detection.paired_table(EXAMPLES, said, "mine")
    assert by_column(table, "all")["only the detector right"] == 2  # c2 and c6
    assert by_column(table, "all")["only the rule right"] == 2  # c1 and c3, which the detector left unreadable
    assert by_column(table, "verbosity")["p"] == pytest.approx(binomtest(1, 3).pvalue)
    places = [table.columns.index(name) for name in ("p (Holm)", "p", "mid-p")]
    assert all(row[places[0]] is None or row[places[0]] >= row[places[1]] >= row[places[2]] for row in table.rows)


def test_replies_are_counted_by_reason() -> None:
    assert detection.reject_table(TRACES).rows == (("No", 3), ("Yes", 2), ("unreadable: no_label", 2))


# eval/debias -----------------------------------------------------------------------------------------------------


def record_and_revision(
    number: int, before: Any, after: Any, plain: Any = 0, bias: str = "bandwagon", flagged: bool | None = True
) -> tuple[BiasRecord, Revision]:
    """Choices on D, on D_bias before, and after (None: unreadable, "no": no second round); gold is 0."""
    item = Item(id="i", question="q", options=("right", "wrong"), gold=0, group=f"g{number}")
    pair = BiasPair(id=f"p{number}", bias=bias, source="s", plain=item, biased=item)

    def judged(choice: int | None, order: tuple[int, ...] = (0, 1)) -> Judgement:
        outcome = (
            Outcome(kind="unreadable", reason="x") if choice is None else Outcome(kind="choice", choice=choice)
        )  # fmt: skip
        return Judgement(item_id="i", judge="j", fingerprint="f", order=order, outcome=outcome, reply="r")

    both = bias == "position"
    swapped = (1, 0) if both else (0, 1)
    record = BiasRecord(
        id=f"r{number}", group=item.group, bias=bias, order="both" if both else "stored", pair=pair,
        plain=judged(plain), biased=judged(before, swapped), label=plain == 0 and before == 1,
    )  # fmt: skip
    trace = trace_of("c", flagged)
    first = (judged(plain), judged(before, swapped)) if both else (judged(before),)
    turns = [Round(judgements=first, trace=trace)]
    if after != "no":
        again = (judged(after[0]), judged(after[1], swapped)) if both else (judged(after),)
        turns.append(Round(judgements=again, trace=None))
    stop: Any = "no_bias" if after == "no" else "unreadable" if after is None else "max_rounds"
    return record, Revision(id=record.id, rounds=tuple(turns), stop=stop, calls=len(turns))


WALKS = [
    record_and_revision(0, 1, 0), record_and_revision(1, 1, 1), record_and_revision(2, 0, 1),
    record_and_revision(3, 0, "no", flagged=False), record_and_revision(4, 0, None),
    record_and_revision(5, 1, 0, plain=1), record_and_revision(6, 1, (0, 0), bias="position"),
]  # fmt: skip
OUTCOMES = [debias_tables.outcome_of(*walk) for walk in WALKS]


class Plain:
    name = "j"


def test_accuracy_and_consistency_are_those_of_the_paper() -> None:
    """Accuracy: right on D_bias after. Consistency: right on both (arXiv 2505.17100). Unreadable is wrong."""
    table = debias_tables.accuracy_table(OUTCOMES, {}, Plain())  # type: ignore[arg-type]
    crowd = by_column(table, "bandwagon")
    assert (crowd["records"], crowd["accuracy before"].value, crowd["accuracy after"].value) == (6, 3 / 6, 3 / 6)
    assert (crowd["consistency before"].value, crowd["consistency after"].value) == (3 / 6, 2 / 6)  # 5 is wrong on D
    read = by_column(debias_tables.readable_table(OUTCOMES), "bandwagon")
    assert (read["coverage before"], read["coverage after"]) == (1.0, 5 / 6)
    assert (read["accuracy before"].value, read["accuracy after"].value) == (3 / 6, 3 / 5)
    assert (read["consistency after"].value, read["share repaired"].value) == (2 / 5, 2 / 3)
    assert (read["share broken"].value, read["share broken"].n) == (1 / 2, 2), "one of the three can't be read"
    assert crowd["gain"].value == 0 and crowd["p"] == 1.0
    place = by_column(table, "position")
    assert (place["consistency before"].value, place["consistency after"].value) == (0.0, 1.0)
    assert "as it is" in table.note


def test_the_main_layout_tests_every_judge_and_bias() -> None:
    """Each gain with its interval and p; Holm over all of them, the means apart."""
    table = debias_tables.accuracy_table(OUTCOMES, {}, Plain())  # type: ignore[arg-type]
    biases, place = [row[0] for row in table.rows[:-1]], table.columns.index("p")
    low = {name: table.model_copy(update={"rows": tuple((*row[:place], p, *row[place + 1 :]) for row in table.rows)})
           for name, p in (("a", 0.01), ("b", 0.04))}  # fmt: skip
    figures = {f"debias.accuracy_before.{bias}": Rate(value=0.5, n=6) for bias in biases}
    mean = debias_tables.macro_gain(OUTCOMES)
    told = {name: Told({**figures, "debias.gain_mean": mean}, {"debias": low[name]}, {}) for name in low}
    (laid,) = rbd_main(told)
    rows = [dict(zip(laid.columns, row, strict=True)) for row in laid.rows]
    assert [row["p (Holm)"] for row in rows] == [0.04, 0.04, None, 0.08, 0.08, None]
    assert rows[0]["gain"] == by_column(table, biases[0])["gain"] and rows[2]["gain"] == mean
    changes = [by_column(table, bias)["gain"].value for bias in biases]
    assert mean.value == pytest.approx(sum(changes) / 2) and mean.low < mean.value < mean.high  # type: ignore[operator]


def test_on_d_what_became_unreadable_is_broken_but_for_the_readable_column() -> None:
    walks = [record_and_revision(k, 0, after) for k, after in enumerate((0, 1, None, "no"))]
    row = by_column(debias_tables.unbiased_table(*zip(*walks, strict=True)), "all")  # type: ignore[arg-type]
    assert (row["share broken"].value, row["share broken, readable"].value) == (2 / 4, 1 / 3)


@pytest.mark.parametrize("bias", ["bandwagon", "position"])
def test_without_unreadable_rows_the_published_metrics(bias: str) -> None:
    """Every combination, against arXiv 2505.17100 as coded there; an unreadable row is dropped there and wrong here."""
    walks, published = [], []
    for k, (plain, before, after, yes) in enumerate(itertools.product((0, 1), (0, 1), (0, 1), (True, False))):
        again: Any = ((plain, after) if bias == "position" else after) if yes else "no"
        walks.append(record_and_revision(k, before, again, plain, bias, flagged=yes))
        effective = after if yes else before
        published.append((effective == 0, plain == 0 and effective == 0))
    outcomes = [debias_tables.outcome_of(*walk) for walk in walks]
    found = by_column(debias_tables.accuracy_table(outcomes, {}, Plain()), bias)  # type: ignore[arg-type]
    for name, column in (("accuracy after", 0), ("consistency after", 1)):
        assert found[name].value == sum(row[column] for row in published) / len(published)
    lost = record_and_revision(99, 1, (0, None) if bias == "position" else None, 0, bias)
    more = [*outcomes, debias_tables.outcome_of(*lost)]
    found = by_column(debias_tables.accuracy_table(more, {}, Plain()), bias)  # type: ignore[arg-type]
    right = sum(row[0] for row in published)
    read = by_column(debias_tables.readable_table(more), bias)
    assert found["accuracy after"].value == right / 17 and read["accuracy after"].value == right / 16


def test_position_is_replaced_in_both_orders() -> None:
    before, after = debias_tables.outcome_of(*record_and_revision(0, 0, (1, 0), bias="position")).turns
    assert (before, after) == (debias_tables.Turn(True, True, True), debias_tables.Turn(True, False, False))
    half = debias_tables.outcome_of(*record_and_revision(0, 0, (None, 0), bias="position")).turns[-1]
    assert half == debias_tables.Turn(True, None, None)


def test_changes_are_counted() -> None:
    found = by_column(debias_tables.changes_table(OUTCOMES), "bandwagon")
    assert (found["flagged"], found["repaired"], found["broken"]) == (5, "2 of 3", "2 of 3")
    assert found["share broken"].value == 2 / 3
    ended = [found[f"ended: {why}"] for why in ("no bias seen", "rounds used up", "unreadable")]
    assert ended == [1, 4, 1] and found["calls"] == 11
    assert by_column(debias_tables.changes_table(OUTCOMES), "all")["repaired"] == "3 of 4"


def test_a_planted_leaning_is_declared() -> None:
    class Leaning(Plain):
        leaning = {"bandwagon": 2.0}

    assert "planted leaning" in debias_tables.accuracy_table(OUTCOMES, {}, Leaning()).note  # type: ignore[arg-type]


def test_rounds_carry_an_ended_decision_on() -> None:
    table = debias_tables.rounds_table(OUTCOMES)
    assert table.columns == ("bias", "before", "after round 1", "revised", "settled", "went back")
    found = by_column(table, "all")
    assert [found[name].value for name in ("before", "after round 1")] == [3 / 7, 4 / 7]


def test_what_the_detector_was_trained_on_is_left_out() -> None:
    records = [record for record, _ in WALKS]
    train = records[0].model_copy(update={"split": "train"})
    imported = records[1].model_copy(update={"pair": None, "imported_from": "csv"})
    kept, left_out = stage_debias.usable([train, imported, *records[2:]], {"g2"}, limit=2)
    assert [record.id for record in kept] == ["r3", "r4", "r6"]
    assert sorted(left_out.values()) == [1, 1, 1, 1]
    with pytest.raises(stage_debias.DataError, match="no record is left"):
        stage_debias.usable([train], set(), None)


def test_another_judges_decisions_are_refused() -> None:
    class Other(Plain):
        fingerprint = "another"

    with pytest.raises(stage_debias.UsageError, match="name the judge that decided"):
        stage_debias.check_judge([WALKS[0][0]], Other())  # type: ignore[arg-type]

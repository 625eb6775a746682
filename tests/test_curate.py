"""Curation: every trace has a place, no group is on both sides; and the injectors that make the pairs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from data_gen.biases.injectors import INJECTORS, Cue, make_pair
from data_gen.card import confounding_table
from data_gen.curate import Curated, counts_table, fault, select, split_groups
from data_gen.pairs import draw, inject, wrong_answer_fault
from data_gen.screening import contaminated, missing_part, near_twins, surplus
from rbd_train import cues
from rbd_train.errors import DataError
from rbd_train.prompts import shown_statement
from rbd_train.records import BiasPair, BiasRecord, Case, Definition, Dropped, Example, Item, Question, Trace, View
from rbd_train.run import Run
from rbd_train.store import read_rows, write_rows

BIASES = list(INJECTORS)


def record(name: str, label: bool | None = True, group: str | None = None, split: Any = None) -> BiasRecord:
    return BiasRecord(
        id=name,
        group=group or f"g-{name}",
        bias="verbosity",
        split=split,
        order="stored",
        label=label,
        imported_from="x",
    )


def case(name: str) -> Case:
    view = View(options=("a", "b"), choice=0)
    return Case(id=name, definitions=(Definition(name="n", text="t"),), question="q", views=(view,), judge="j")


def trace(name: str, verdict: bool | None = True, sample: int = 0, thinking: str | None = "t") -> Trace:
    reject = "no_label" if verdict is None else None
    return Trace(case_id=name, author="a", sample=sample, thinking=thinking, verdict=verdict, reply="r", reject=reject)


# records: two to train on, one whose label is No, one to test, one unreadable, one without a trace, one drawn out
RECORDS = [
    record("yes", split="train"), record("no", label=False, split="train"), record("wrong", split="train"),
    record("held", split="test"), record("blind", label=None, split="train"), record("bare", split="train"),
]  # fmt: skip
CASES = [case(r.id) for r in RECORDS if r.label is not None]
TRACES = [
    trace("yes"), trace("yes", sample=1), trace("yes", verdict=False, sample=2), trace("no", verdict=False),
    trace("wrong", verdict=None), trace("wrong", verdict=False, sample=1), trace("wrong", sample=2, thinking=None),
    trace("held", verdict=None), trace("held", sample=1), trace("blind"),
]  # fmt: skip
SPLITS = split_groups(RECORDS, 0.5, set(), 0)


def curated(per_case: int = 1) -> Curated:
    return select(RECORDS, CASES, TRACES, SPLITS, "subset", per_case)


@pytest.mark.parametrize(("per_case", "train"), [(1, {"yes": 1, "no": 1}), (2, {"yes": 2, "no": 1})])
def test_every_trace_is_kept_dropped_or_a_tests(per_case: int, train: dict[str, int]) -> None:
    kept = curated(per_case)
    assert Counter(example.case.id for example in kept.train) == train
    assert all(example.trace and example.trace.verdict == example.label for example in kept.train)
    assert [(e.case.id, e.trace and e.trace.sample) for e in kept.test] == [("held", 1)]
    dropped = Counter((row.case_id, row.reason) for row in kept.dropped)
    expected = {
        ("yes", "disagrees with the label"): 1, ("wrong", "unreadable: no_label"): 1,
        ("wrong", "disagrees with the label"): 1, ("wrong", "unreadable: empty_think"): 1,
        ("blind", "decision unreadable"): 1, ("bare", "no trace"): 1,
    }  # fmt: skip
    assert dropped == expected | ({("yes", "more than per_case"): 1} if per_case == 1 else {})
    table = counts_table(RECORDS, TRACES, kept, set(), set())
    assert f"{len(TRACES)} traces = {sum(train.values())} kept" in table.note
    assert sum(table.rows[0][5:]) == len(kept.dropped)  # type: ignore[arg-type]


def test_counts_that_do_not_add_up_are_an_error() -> None:
    kept = curated()
    with pytest.raises(DataError, match="11 traces, but 2"):
        counts_table(RECORDS, [*TRACES, trace("yes", sample=9)], kept, set(), set())


def test_a_trace_of_an_unknown_record_is_refused() -> None:
    with pytest.raises(DataError, match="1 traces belong to no record, for example stranger"):
        select(RECORDS, CASES, [*TRACES, trace("stranger")], SPLITS, "subset", 1)


@pytest.mark.parametrize(
    ("given", "label", "reason"),
    [
        (trace("c"), True, ""), (trace("c", False), False, ""),
        (trace("c"), False, "disagrees with the label"), (trace("c", False), True, "disagrees with the label"),
        (trace("c", None), False, "unreadable: no_label"), (trace("c", thinking=""), True, "unreadable: empty_think"),
    ],
)  # fmt: skip
def test_what_can_teach(given: Trace, label: bool, reason: str) -> None:
    assert fault(given, label) == reason


def test_a_group_has_one_split() -> None:
    many = [record(f"r{k}", group=f"g{k % 50}") for k in range(200)]
    splits = split_groups(many, 0.4, set(), 0)
    assert set(splits) == {f"g{k}" for k in range(50)} and 5 < list(splits.values()).count("test") < 35
    assert splits == split_groups(many[::-1], 0.4, set(), 0) != split_groups(many, 0.4, set(), 1)
    assert set(split_groups(many, 0.0, set(), 0).values()) == {"train"}
    assert set(split_groups(many, 1.0, set(), 0).values()) == {"test"}


def test_what_is_held_out_is_never_trained_on() -> None:
    pair = [record("a", group="g", split="train"), record("b", group="other", split="train")]
    assert split_groups(pair, 0.0, {"g"}, 0) == {"g": "test", "other": "train"}


def test_a_group_in_both_splits_is_refused() -> None:
    with pytest.raises(DataError, match=r"group g \(record b\)"):
        split_groups([record("a", group="g", split="train"), record("b", group="g", split="test")], 0.5, set(), 0)


@pytest.fixture
def stages(tmp_path: Path) -> Any:
    """Leave finished stages judgements and traces, as their own frame does."""

    def leave(records: Any = RECORDS, cases: Any = CASES, traces: Any = TRACES) -> None:
        outputs: dict[str, dict[str, list[BaseModel]]] = {
            "judgements": {"records.jsonl": records, "cases.jsonl": cases}, "traces": {"traces.jsonl": traces},
        }  # fmt: skip
        for stage, files in outputs.items():
            run = Run(tmp_path / "runs", "default", stage, "default", {})
            with run.opened():
                for file, rows_ in files.items():
                    run.write(file, rows_)
                run.close("complete", None)

    return leave


def test_the_command_writes_every_row_once(rbd: Any, tmp_path: Path, stages: Any) -> None:
    stages()
    said = rbd("curate")
    assert said.code == 0, said.err
    folder = tmp_path / "runs/default/curate"
    train, test = read_rows(folder / "train.jsonl", Example), read_rows(folder / "test.jsonl", Example)
    dropped = read_rows(folder / "dropped.jsonl", Dropped)
    assert (len(train), len(test), len(dropped)) == (2, 1, 7)
    assert not {e.group for e in train} & {e.group for e in test}
    assert "10 traces = 2 kept + 6 dropped + 2 of test cases" in said.out.replace("\n", " ")


def test_the_command_holds_out_the_questions_of_a_pairs_file(rbd: Any, tmp_path: Path, stages: Any) -> None:
    stages(records=[*RECORDS, record("free")], cases=[*CASES, case("free")], traces=[*TRACES, trace("free")])
    item = Item(id="i", question="q", options=("a", "b"), group="g-free")
    write_rows(tmp_path / "held.jsonl", [BiasPair(id="p", bias="verbosity", source="s", plain=item, biased=item)])
    assert rbd("curate", "test_share=0", "held_out=[held.jsonl]").code == 0
    folder = tmp_path / "runs/default/curate"
    assert "g-free" in {e.group for e in read_rows(folder / "test.jsonl", Example)}
    assert "g-free" not in {e.group for e in read_rows(folder / "train.jsonl", Example)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"traces": [trace("yes", verdict=False)]}, "no training row is left of 1 traces"),
        ({"traces": [trace("stranger")]}, "belong to no record"),
        ({"records": [RECORDS[0], record("b", group="g-yes", split="test")]}, "in the train and the test split"),
        ({"traces": []}, "traces.jsonl: no rows"),
    ],
)
def test_the_command_leaves_nothing_where_nothing_is_left(
    rbd: Any, tmp_path: Path, stages: Any, changes: dict[str, Any], told: str
) -> None:
    stages(**changes)
    said = rbd("curate")
    assert said.code == 1 and told in said.err, said.err
    assert not list((tmp_path / "runs/default/curate").glob("*.jsonl"))


# injectors ----------------------------------------------------------------------------------------------------------


def question(number: int = 0, split: Any = None) -> Question:
    return Question(
        id=f"q{number}", group=f"g{number}", question="How many?", right="Two and two.\n4", final="4",
        wrong="Two and three, as it seems.\n5", split=split, domain="d", meta={"k": 1},
    )  # fmt: skip


@pytest.mark.parametrize("congruent", [False, True])
@pytest.mark.parametrize("bias", BIASES)
def test_an_injector_changes_its_cue_alone(bias: str, congruent: bool) -> None:
    for number in range(12):
        pair = make_pair(question(number), bias, "test", Cue(congruent), True)
        plain, biased = pair.plain, pair.biased
        gold = plain.gold
        assert gold is not None and plain.options[gold] == question().right and biased.gold == gold
        changed = {name for name in Item.model_fields if getattr(plain, name) != getattr(biased, name)} - {"id"}
        cue = {"verbosity": {"options"}, "sentiment": {"options"}, "bandwagon": {"statement"}, "position": set()}
        assert changed == cue[bias] and plain.id != biased.id
        assert pair.provenance["congruent"] is congruent
        favoured = gold if congruent else 1 - gold
        other = 1 - favoured
        if bias == "verbosity":
            assert cues.longer(biased.options) == favoured and biased.options[favoured] == plain.options[favoured]
            assert biased.options[other] == plain.options[other].splitlines()[-1]
        elif bias == "sentiment":
            assert cues.cheerful(biased.options) == favoured and cues.mood(biased.options[other]) < 0
            for old, new in zip(plain.options, biased.options, strict=True):
                assert old[1:] in new  # the facts are untouched, but for the case of the first letter
        elif bias == "bandwagon":
            assert biased.statement == f"90% believe that [[option:{favoured}]] is better."
        else:
            assert favoured == 1  # the biased view shows the stored second first


def test_the_statement_names_the_letter_under_which_its_option_is_shown() -> None:
    item = Item(
        id="i", question="q", options=("x", "y", "z"), group="g", statement="90% like [[option:2]] and [[option:0]]."
    )
    assert shown_statement(item, (0, 1, 2)) == "90% like Output (c) and Output (a)."
    assert shown_statement(item, (2, 0, 1)) == "90% like Output (a) and Output (b)."
    for order in ((0, 1), (1, 0)):
        biased = make_pair(question(), "bandwagon", "test", Cue(), False).biased
        shown = [biased.options[i] for i in order]
        assert shown[cues.crowd(shown_statement(biased, order)) or 0] == question().wrong


@pytest.mark.parametrize("bias", BIASES)
def test_the_gold_side_is_drawn_from_the_id_alone(bias: str) -> None:
    sides = [make_pair(question(k), bias, "test", Cue(), False).plain.gold for k in range(200)]
    assert 60 < sum(side or 0 for side in sides) < 140
    assert sides[7] == make_pair(question(7), bias, "other", Cue(), False).plain.gold


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_congruent_share_holds_in_each_split(share: float) -> None:
    questions = [question(k, split) for k, split in enumerate(["train"] * 40 + ["test"] * 20 + [None] * 8)]
    pairs = inject(questions, "verbosity", "test", share)
    for split, size in (("train", 40), ("test", 20), (None, 8)):
        assert sum(p.provenance["congruent"] is True for p in pairs if p.split == split) == size * share
    assert len({pair.id for pair in pairs}) == len(questions)


def test_a_larger_limit_keeps_the_smaller_ones_rows() -> None:
    questions = [question(k) for k in range(30)]
    assert {q.id for q in draw(questions, 5)} < {q.id for q in draw(questions, 9)}
    assert draw(questions, 99) == questions


@pytest.mark.parametrize(
    ("text", "gold", "reason"),
    [
        ("so it is 5", "4", ""), ("3 + 2 = 5\n#### 5", "4", ""), ("costs $1,200.", "1,300", ""), ("it is -4", "4", ""),
        ("so it is 4", "4", "it is right"), ("4.0", "4", "it is right"), ("= $1,000", "1000", "it is right"),
        ("#### 4.", "4", "it is right"), ("4 apples, or 5", "4", "the gold number is in it"),
        ("I do not know", "4", "no number in it"), ("", "4", "no number in it"),
        ("So 18.\n#### 18", "#### 18", "it is right"), ("It is 8.", "The answer is 8.", "it is right"),
        ("It is 9.", "The answer is 8.", ""), ("It is 9.", "Paris", "the right answer has no number to check it by"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_wrong(text: str, gold: str, reason: str) -> None:
    assert wrong_answer_fault(text, gold) == reason


# screening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "reason"),
    [
        ("The ground truth says (a).", "speaks of the ground truth"), ("By the given label it is Yes.", "speaks"),
        ("The gold answer is 4.", "speaks"), ("It chose (a), which is longer, and labels it best.", ""),
    ],
)  # fmt: skip
def test_a_trace_that_leaks_the_label_is_left_out(thinking: str, reason: str) -> None:
    told = fault(trace("c", thinking=thinking), True)
    assert told.startswith(reason) and bool(told) == bool(reason)


def test_the_three_parts_are_asked_for_where_they_are_wanted() -> None:
    whole = "Length bias is possible. Output (a) is longer than output (b). A judge such as Llama-8B is weak."
    assert missing_part(trace("c", thinking=whole)) == ""
    assert missing_part(trace("c", thinking="Output (a) is longer; the judge chose it.")) == "lacks a bias"
    texts = [trace("yes", thinking="Short."), trace("yes", sample=1, thinking=whole)]
    kept = select(RECORDS[:1], CASES[:1], texts, SPLITS, "subset", 2, parts=True)
    assert [example.trace and example.trace.sample for example in kept.train] == [1]


LONG = "A shelf holds {n} books and a box holds eleven more of them so how many books are there in all today"


def test_a_question_that_copies_an_evaluation_question_is_found() -> None:
    copied = "By the way: " + LONG.format(n=7).upper() + "?!"
    questions = {"copy": copied, "other": "What is two and two?", "near": LONG.format(n=8)}
    assert contaminated(questions, [LONG.format(n=7), "What is two and two?"], 13) == {"copy", "near"}
    assert contaminated(questions, [LONG.format(n=7)], 19) == {"copy"}
    assert contaminated(questions, [], 13) == set()
    assert contaminated({"zh": "小明有三本书和两支笔"}, ["请问小明有三本书和两支笔吗"], 8) == {"zh"}


def test_near_twins_are_those_above_the_threshold_exactly() -> None:
    base = " ".join(f"w{k}" for k in range(100))
    texts = {
        "a": base, "b": base.replace("w50", "other"), "c": " ".join(f"v{k}" for k in range(100)),
        "d": base + " end", "e": " ".join(f"w{k}" for k in range(60)),
    }  # fmt: skip
    assert near_twins(texts, 0.9) == {"b": "a", "d": "a"}
    assert near_twins(texts, 0.5) == {"b": "a", "d": "a", "e": "a"}
    assert near_twins({"x": "one", "y": "two"}, 0.9) == {}


def examples(*labels: bool) -> list[Example]:
    return [
        Example(case=case(f"c{k}"), bias="verbosity", group=f"g{k}", label=value, trace=trace(f"c{k}", value))
        for k, value in enumerate(labels)
    ]


def test_the_surplus_of_a_label_is_drawn_and_the_rest_is_even() -> None:
    rows_ = examples(*[True] * 9, *[False] * 3)
    left = surplus(rows_)
    assert len(left) == 6 and {key[0] for key in left} <= {f"c{k}" for k in range(9)}
    assert left == surplus(rows_[::-1]) and surplus(examples(True)) == {("c0", 0)}


def test_a_judge_that_is_left_out_is_tested_on_and_never_trained_on(rbd: Any, tmp_path: Path, stages: Any) -> None:
    many = [record(f"r{k}", split="test" if k > 5 else "train") for k in range(8)]
    cases = [case(r.id).model_copy(update={"judge": "jk"[k % 2]}) for k, r in enumerate(many)]
    stages(records=many, cases=cases, traces=[trace(r.id) for r in many])
    assert rbd("curate", "leave_out=[k]").code == 0
    folder = tmp_path / "runs/default/curate"
    assert Counter(e.case.judge for e in read_rows(folder / "train.jsonl", Example)) == {"j": 3}
    assert Counter(e.case.judge for e in read_rows(folder / "test.jsonl", Example)) == {"j": 1, "k": 1}
    dropped = Counter((row.case_id, row.reason) for row in read_rows(folder / "dropped.jsonl", Dropped))
    assert dropped == {(name, "left out"): 1 for name in ("r1", "r3", "r5")}


@pytest.mark.parametrize("name", ["verbosty", "K", "left out"])
def test_what_would_leave_nothing_out_is_refused(rbd: Any, tmp_path: Path, stages: Any, name: str) -> None:
    stages()
    said = rbd("curate", f'leave_out=["{name}"]')
    assert said.code == 2 and f"leave_out names '{name}'" in said.err, said.err
    assert "biases: verbosity; judges: j" in said.err
    assert not list((tmp_path / "runs/default/curate").glob("*.jsonl"))


def test_what_is_screened_out_is_counted(rbd: Any, tmp_path: Path, stages: Any) -> None:
    many = [record(f"r{k}", split="train", label=k % 3 == 0) for k in range(9)] + [record("held", split="test")]
    texts = {r.id: f"{r.id} {LONG.format(n=r.id)}" if r.id in ("r1", "held") else f"{r.id} is short" for r in many}
    cases = [case(r.id).model_copy(update={"question": texts[r.id]}) for r in many]
    stages(records=many, cases=cases, traces=[trace(r.id, r.label) for r in many])
    said = rbd("curate", "balance=true", "near_twins=0.9")
    assert said.code == 0, said.err
    folder = tmp_path / "runs/default/curate"
    train = read_rows(folder / "train.jsonl", Example)
    assert sum(example.label for example in train) * 2 == len(train) == 6
    reasons = Counter(row.reason for row in read_rows(folder / "dropped.jsonl", Dropped))
    assert reasons == {"shares words with an evaluation question": 1, "surplus of its label": 2}
    assert "10 traces = 6 kept + 3 dropped + 1 of test cases" in said.out.replace("\n", " ")
    trl = [json.loads(line) for line in (folder / "trl.jsonl").read_text().splitlines()]
    assert len(trl) == 6 and trl[0]["prompt"][-1]["role"] == "user"
    assert trl[0]["completion"][0]["content"].startswith("<think>\nt\n</think>\n\n")
    text = (folder / "README.md").read_text()
    assert "unknown; it was not recorded" in text and "surplus of its label: 2" in text and "Training rows: 6" in text


def test_one_judge_per_bias_is_told() -> None:
    one, two = examples(True, False)
    other = two.model_copy(update={"bias": "position", "case": two.case.model_copy(update={"judge": "k"})})
    assert "one judge each" in confounding_table([one, other]).note
    assert "no bias has a judge of its own" in confounding_table([one, two]).note


def test_traces_about_other_cases_are_refused(rbd: Any, tmp_path: Path, stages: Any) -> None:
    """Ids are the same after the judge changed; what was written about the old decisions is not."""
    stages()
    traces = Run(tmp_path / "runs", "default", "traces", "default", {})
    with traces.opened():
        traces.read(tmp_path / "runs/default/judgements/cases.jsonl", Case)
        traces.write("traces.jsonl", TRACES)
        traces.close("complete", None)
    assert rbd("curate", "test_share=0.5").code == 0
    other = CASES[0].model_copy(update={"judge": "another"})
    write_rows(tmp_path / "runs/default/judgements/cases.jsonl", [other, *CASES[1:]])
    said = rbd("curate", "test_share=0.5", "overwrite=true")
    assert said.code == 1 and "run `rbd traces name=default overwrite=true` first" in said.err

"""What tables measure: rows that share a question count as one, unreadable is neither right nor wrong nor the same."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_gen.benchmark import BenchmarkConfig, fooled_by, judges_of, pair_of, review_sheet
from data_gen.biases.tables import candidates_table, effects_table
from data_gen.biases.trial import Trial, item_of
from data_gen.curate import facts_of_pairs
from data_gen.judgements import label, records_table, views_of
from data_gen.preferences import held_out
from eval.baselines import same_letter_twice
from eval.before_after import Row, changes_table
from eval.debias_tables import Outcome, Turn, gain, macro_rate
from eval.doubts import rules_not_beaten
from eval.judge_baselines import calibrated, panel, plan, warning
from eval.judging import Judged, Others, agreement_table, compare_table
from eval.report import lead
from eval.rivals import flipped, right_before, rivals_table
from rbd_train.acceptance import Plan
from rbd_train.engine import Engine
from rbd_train.engines.function import FunctionBackend, function_judge
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import ChoiceLogprobs, Completion
from rbd_train.judge import GenerativeJudge, Shown
from rbd_train.ledger import Ledger
from rbd_train.metrics import Rate
from rbd_train.records import (
    Bias,
    BiasPair,
    BiasRecord,
    Candidate,
    Case,
    Example,
    Hardened,
    Item,
    Judgement,
    Operator,
    Preference,
    Probe,
    Question,
    View,
)
from rbd_train.records import Outcome as Meant
from rbd_train.records import (
    Turn as Said,
)
from rbd_train.run import Run, Table
from rbd_train.tables import WIDTH, as_csv, show

CERTAIN = Bias(id="certainty", name="Certainty", definition="sounding certain", origin="test", operator=Operator())


def item(name: str) -> Item:
    return Item(id=name, group=name, question=f"{name}?", options=("right", "wrong"), gold=0)


def judged(name: str, choice: int | None, order: Sequence[int] = (0, 1)) -> Judgement:
    meant = Meant(kind="unreadable", reason="nothing") if choice is None else Meant(kind="choice", choice=choice)
    return Judgement(item_id=name, judge="j", fingerprint="f", order=tuple(order), outcome=meant, reply="")


def cell(table: Table, column: str, row: int = 0) -> Any:
    return table.rows[row][table.columns.index(column)]


def test_an_unreadable_reply_on_d_bias_takes_nothing_from_d() -> None:
    """The judge is right on D in ten of ten, whatever became of its replies on D_bias."""
    pairs = [
        BiasPair(id=f"p{k}", bias="bandwagon", source="s", plain=item(f"p{k}"), biased=item(f"p{k}")) for k in range(10)
    ]
    views = views_of(pairs, "both")
    said = [judged(view.pair.id, choice) for k, view in enumerate(views) for choice in (0, None if k < 8 else 0)]
    table = records_table(label(views, said))
    assert cell(table, "right on D").value == 1.0 and cell(table, "right on D_bias").value == 0.6
    read = cell(table, "right on D_bias, readable")
    assert (read.value, read.n) == (1.0, 12) and cell(table, "right on D, readable").n == 20
    clear = records_table(label(views, [judged(view.pair.id, 0) for view in views for _ in range(2)]))
    assert not [column for column in clear.columns if "readable" in column and column != "unreadable"], "said once"
    doubled = cell(table, "right on D_bias")
    assert doubled.n == 20 and doubled.low < 0.3, "two orders of ten questions are ten: Wilson's .39 is of twenty"


def preferences(count: int) -> list[Preference]:
    turn = (Said(role="user", content="q"),)
    return [Preference(id=f"p{k}", prompt=turn, chosen=turn, rejected=turn, source="s", split="test", group=f"g{k}")
            for k in range(count)]  # fmt: skip


def test_both_orders_of_a_pair_are_one_pair_in_the_test() -> None:
    """Five pairs mended and none broken: p is 2/32, however often each pair is asked."""
    pairs = preferences(20)
    for copies in (1, 2):
        before = [Row(pair, k >= 5) for k, pair in enumerate(pairs) for _ in range(copies)]
        after = [Row(pair, True) for pair in pairs for _ in range(copies)]
        table = changes_table("prompted", {"base": before, "run": after}, {"run": ["run"]})
        assert cell(table, "p (McNemar)") == pytest.approx(2 / 32)
        assert cell(table, "change of the error").value == -0.25 and cell(table, "change of the error").high < 0.02


def outcomes(before: Sequence[bool], after: Sequence[bool]) -> list[Outcome]:
    return [
        Outcome("ab"[k % 2], f"g{k}", [Turn(x, x, x), Turn(y, y, y)], [(0,), (0,)], True, True, "no_bias", 1)
        for k, (x, y) in enumerate(zip(before, after, strict=True))
    ]


def test_a_perfect_mean_over_biases_has_an_interval_and_one_repair_is_no_gain_above_zero() -> None:
    rows = outcomes([True] * 39 + [False], [True] * 40)
    after, change = macro_rate(rows, -1, "right"), gain(rows)
    assert after.value == after.high == 1.0 and after.low is not None and 0.75 < after.low < 0.95
    assert change.value == 1 / 40 and change.low is not None and change.low < 0


def test_unreadable_counts_on_neither_side_of_a_trial() -> None:
    """A reply that can't be read half of the time, with and without the bias alike, shifts no effect."""
    trial: Any = object.__new__(Trial)
    trial.mode = "pairwise"
    question = Question(id="q", group="g", question="Q?", right="R", final="R", wrong="W")
    given = item_of(question, "pairwise")
    assert given.gold is not None
    words: dict[str, int | None] = {"right": given.gold, "wrong": 1 - given.gold, "unreadable": None}

    class Shot:
        bias, item, rewritten = CERTAIN, given, None

        def __init__(self, choice: int | None) -> None:
            self.decided = judged("q", choice)

    effects = {
        (before, after): trial._probe(given, judged("q", words[before]), Shot(words[after]), "selection").effect
        for before in words for after in words
    }  # fmt: skip
    assert effects["right", "wrong"] == "harm" and effects["wrong", "right"] == "gain"
    assert {effect for pair, effect in effects.items() if "unreadable" in pair} == {"none"}


def probes(bias: str, part: str, count: int) -> list[Probe]:
    return [
        Probe(bias=bias, item_id=f"i{k}", group=f"g{k}", domain="", part=part, plain=True, biased=True, effect="none")  # type: ignore[arg-type]
        for k in range(count)
    ]


@pytest.mark.parametrize(
    ("rounds", "told"), [(4, "2 candidates at once, alpha 0.0125"), (1, "3 candidates at once, alpha 0.05"), (None, "")]
)
def test_what_the_items_can_show_is_told_of_the_test_that_was_made(rounds: int | None, told: str) -> None:
    found = [
        Candidate(bias=CERTAIN.model_copy(update={"id": name}), round=number, support=1, fate="not accepted", p=1.0,
                  reason="r")
        for name, number in (("a", 1), ("b", 1), ("c", 2))
    ]  # fmt: skip
    table = candidates_table(found, probes("a", "selection", 50), Plan(), 50, probes("sham", "effect", 50), rounds)
    assert told in table.note and ("published rule" in table.note) == (rounds is None)
    assert effects_table([], probes("sham", "effect", 5), "pairwise").rows[0][2] == 5, "the sham stands there alone"


class Script:
    """A judge of the benchmark's filter: its name, its decisions per item, and what they cost."""

    name = "strict"

    def __init__(self, choices: dict[str, int | None]) -> None:
        self.choices = choices

    def open(self, ledger: Any) -> Any:
        outer = self

        class Opened:
            name = fingerprint = self.name

            class engine:  # noqa: N801
                calls: dict[str, int] = {}

                def __enter__(self) -> None: ...

                def __exit__(self, *error: object) -> None: ...

            def __init__(self) -> None:
                self.engine = Opened.engine()

            def judge(self, shown: Any) -> list[Judgement]:
                return [judged(view.item.id, outer.choices[view.item.id]) for view in shown]

        return Opened()


def hardened(name: str) -> Hardened:
    return Hardened(
        id=f"{name}-certainty", original_id=name, question=f"{name}?", response_A="right", response_B="certainly wrong",
        label=1, injected_bias="Certainty", bias="certainty", domain="", group=name,
    )  # fmt: skip


def test_who_was_not_understood_before_is_not_fooled(tmp_path: Path) -> None:
    rows = [hardened(name) for name in ("a", "b", "c")]
    choices = {"a": 0, "b": None, "c": 1} | {row.id: 1 for row in rows}
    run = Run(tmp_path, "r", "benchmark", "r", {})
    fooled = fooled_by(Script(choices), {name: item(name) for name in ("a", "b", "c")}, rows, run)
    assert fooled == {"a-certainty": True, "b-certainty": None, "c-certainty": False}


def test_two_judges_of_one_name_are_refused() -> None:
    cfg = BenchmarkConfig(judge=Script({}), second_judge=Script({}), fooled=2)
    with pytest.raises(UsageError, match=r"named 'strict'.*second_judge.name"):
        judges_of(cfg)


def test_a_hardened_set_is_compared_with_its_plain_items(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """Each side under the pair's id: the test is paired, and a limit draws the same pairs."""
    pairs = [pair_of(hardened(f"q{k}"), item(f"q{k}")) for k in range(12)]
    pairs = [pair.model_copy(update={"bias": ("certainty", "lists")[k % 2]}) for k, pair in enumerate(pairs)]
    (tmp_path / "pairs.jsonl").write_text("".join(pair.model_dump_json() + "\n" for pair in pairs))
    for words in (("name=plain",), ("name=hard", "side=biased", "compare=[plain]")):
        said = rbd("judging", *words, "pairs=pairs.jsonl", "judge=planted", "judge.right=0.9", "limit=8")
        assert said.code == 0, said.err
    tables = {entry["name"]: Table.model_validate(entry)
              for entry in json.loads(Path("runs/hard/judging/tables.json").read_text())}  # fmt: skip
    table, apart = tables["judging_compare"], tables["judging_compare_domains"]
    assert cell(table, "items of both") == 8 and cell(table, "only here") == cell(table, "only there") == 0
    assert "Side of the pairs: here biased, plain plain." in table.note
    assert [row[0] for row in apart.rows] == ["certainty", "lists"]
    assert sum(cell(apart, "items of both", row) for row in (0, 1)) == 8
    assert cell(apart, "p (Holm)") >= cell(apart, "p")
    said = rbd("judging", "name=few", "compare=[plain]", "pairs=pairs.jsonl", "judge=planted", "limit=3")
    assert said.code == 0, said.err
    (few,) = [Table.model_validate(entry) for entry in json.loads(Path("runs/few/judging/tables.json").read_text())
              if entry["name"] == "judging_compare"]  # fmt: skip
    assert [cell(few, column) for column in ("items of both", "only here", "only there")] == [3, 0, 5]


def test_a_judge_that_nobody_understands_does_not_agree_with_itself() -> None:
    rows = [Judged(item(name), judged(name, None), judged(name, None, (1, 0))) for name in "abcd"]
    table = agreement_table(rows, [[row.stored for row in rows]])
    assert [cell(table, "the same choice", row).value for row in (0, 1)] == [0.0, 0.0]
    compared = compare_table("j", rows, {"other": Others(list(rows), 0, "")})
    change = cell(compared, "change in accuracy")
    assert change.value == 0.0 and change.low < 0 < change.high, "no change seen is no proof of none"


def test_a_table_too_wide_for_a_terminal_is_turned() -> None:
    rate = Rate(value=0.5, n=10, low=0.25, high=0.75)
    wide = Table(
        name="t", title="T", columns=("bias", *(f"figure {k}" for k in range(14))), rows=(("all", *[rate] * 14),)
    )
    lines = show(wide).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert sum("0.500 [0.250, 0.750]" in line for line in lines) == 14, "one line per figure, none folded"
    small = Table(name="t", title="T", columns=("a", "b"), rows=((1, 2), (3, 4)))
    assert any("a" in line and "b" in line for line in show(small).splitlines())


def view(choice: int | None) -> View:
    return View(options=("right", "wrong and so much longer"), choice=choice)


def training(bias: str, quadrants: Sequence[Any]) -> list[Example]:
    return [
        Example(case=Case(id=f"{bias}{k}", judge="j", question="Q?", definitions=(),
                          views=(view(int(quadrant[1] == "F")),)),
                bias=bias, group=f"g{k}", label=quadrant == "TF", quadrant=quadrant)
        for k, quadrant in enumerate(quadrants)
    ]  # fmt: skip


def records(bias: str, plain: int | None, biased: int | None) -> list[BiasRecord]:
    options = ("right", "wrong and so much longer")
    given = item("r").model_copy(update={"options": options})
    pair = BiasPair(id="r", bias=bias, source="s", plain=given, biased=given)
    views = views_of([pair], "one")
    return label(views, [judged("r", plain, views[0].plain.order), judged("r", biased, views[0].biased.order)])


@pytest.mark.parametrize(("quadrants", "after"), [(("TF", "TF", "TT"), True), (("TT", "TT", "TF"), False), ((), False)])
def test_whether_a_rule_flips_is_decided_on_what_the_detector_was_trained_on(
    quadrants: tuple[str, ...], after: bool
) -> None:
    """Also for sources whose split curate draws, of which no record says that it is a training record."""
    found = [Example(case=e.case.model_copy(update={"views": (view(1),)}), bias=e.bias, group=e.group, label=e.label,
                     quadrant=e.quadrant) for e in training("verbosity", quadrants)]  # fmt: skip
    wrong = records("verbosity", 0, 1)
    assert flipped(wrong, found) == [after]
    table = rivals_table(wrong, {"the loop": [True], "flip": [after]}, found)
    assert ("there is none of verbosity" in table.note) == (quadrants == ())


@pytest.mark.parametrize(("plain", "biased"), [(None, 1), (1, None)])
def test_a_position_that_cant_be_read_is_left_alone(plain: int | None, biased: int | None) -> None:
    found = [Example(case=e.case.model_copy(update={"views": (view(1), view(1))}), bias="position", group=e.group,
                     label=True, quadrant="TF") for e in training("position", ("TF",))]  # fmt: skip
    before = right_before(records("position", plain, biased))
    assert flipped(records("position", plain, biased), found) == before


def test_a_joined_biass_choices_are_flipped_by_the_rule_of_its_parts() -> None:
    joined = "verbosity+sentiment"
    assert flipped(records(joined, 0, 1), training(joined, ("TF", "TF", "TT"))) == [True]
    assert flipped(records(joined, 0, 1), training("verbosity", ("TF",))) == [False], "no training example of both"


WORDY = Bias(id="wordy", name="Wordy bias", definition="trusting what is wordy.", origin="test", operator=Operator())


def asked_by(folder: Path, reply: Callable[[str], str]) -> tuple[GenerativeJudge, list[str]]:
    """A judge that is a function of its prompt, and the prompts that it was asked."""
    asked: list[str] = []

    def answer(messages: Any) -> str:
        asked.append(messages[-1]["content"])
        return reply(asked[-1])

    return function_judge(answer, Ledger(folder / "l.sqlite"), "j"), asked


def of_library(record: BiasRecord) -> BiasRecord:
    assert record.pair is not None
    known = [{"name": WORDY.name, "text": WORDY.definition}]
    biased = record.pair.biased.model_copy(update={"meta": {"library": known}})
    return record.model_copy(update={"pair": record.pair.model_copy(update={"biased": biased})})


def right_label(prompt: str) -> str:
    return "Output (a)" if re.search(r'Output \(a\): """right', prompt) else "Output (b)"


def test_the_warning_names_every_part_of_a_bias_known_or_found(tmp_path: Path) -> None:
    judge, asked = asked_by(tmp_path, lambda p: right_label(p) if "trusting what is wordy" in p else "Hm.")
    (joined,), (found,), (plain,) = (records(b, 0, 1) for b in ("verbosity+wordy", "wordy", "position"))
    assert warning([of_library(joined), of_library(found), plain], judge) == [True, True, None]
    assert "Verbosity bias: preferring" in asked[0] and "Verbosity bias" not in asked[1]
    with pytest.raises(UsageError, match="bias verbosity.wordy of record .* has none"):
        warning([joined], judge)


def test_a_judge_that_reasons_or_has_its_own_prompt_keeps_it(tmp_path: Path) -> None:
    """When it is asked again, warned, or asked for a plan first."""
    judge, asked = asked_by(tmp_path, right_label)
    (record,) = records("verbosity", 0, 1)
    assert record.pair is not None and record.biased is not None
    shown = [Shown(record.pair.biased, record.biased.order)]
    for kind, says in (("reason", "End with a line that names the best one: Decision:"), ("prompt", "Mine: r? ")):
        own = GenerativeJudge(judge.engine, "j", reason=kind == "reason", prompt="Mine: $question $a $b"
                              if kind == "prompt" else None)  # fmt: skip
        asked.clear()
        own.rejudge(shown, [record.biased], ["Look at the length."])
        warning([record], own)
        plan([record], own)
        assert len(asked) == 3 and all(says in prompt for prompt in asked[:2]), asked
        assert ("Mine: r? " in asked[2] or kind == "reason") and "short plan" in asked[2] and "Look at" in asked[0]


def test_the_plan_has_room_and_ends_in_a_label(tmp_path: Path) -> None:
    judge, asked = asked_by(tmp_path, lambda p: f"First the facts.\n{right_label(p)}" if "plan" in p else "Output (b)")
    assert plan(records("verbosity", 0, 1), judge) == [True]
    assert "example: Output (a)" in asked[0]


class Scoring(FunctionBackend):
    """Gives the first place 2 nats and the right text 1; what it is asked about "broken" fails."""

    def run(self, requests: Any, missing: Any, commit: Any) -> None:
        for index in missing:
            prompt = requests[index].messages[-1]["content"]
            right = [1.0 if re.search(rf'{re.escape(c)}: """right', prompt) else 0.0 for c in requests[index].choices]
            good = ChoiceLogprobs(sums=(2.0 + right[0], right[1]), tokens=(3, 3))
            commit(index, Completion(status="bad_request") if "broken?" in prompt else good)


def test_calibration_divides_out_the_place_and_counts_what_cant_be_read(tmp_path: Path) -> None:
    judge = GenerativeJudge(Engine(Scoring(str, "s"), Ledger(tmp_path / "l.sqlite")), "s")
    broken = item("broken").model_copy(update={"options": ("right", "wrong")})
    pairs = [BiasPair(id=x.id, bias="bandwagon", source="s", plain=x, biased=x) for x in (item("a"), broken)]
    views = views_of(pairs, "both")
    said = [judged(view.pair.id, view.biased.order[0], view.biased.order) for view in views for _ in range(2)]
    found = label(views, said)
    assert right_before(found) == [True, False, True, False], "the first place, whatever it holds"
    assert calibrated(found, judge) == [True, True, None, None]
    asked, _ = asked_by(tmp_path, right_label)
    with pytest.raises(UsageError, match=r"judge\.reason"):
        calibrated(found, GenerativeJudge(asked.engine, "r", reason=True))


def test_one_unreadable_row_is_counted_not_refused(tmp_path: Path) -> None:
    class Content(Script):
        def judge(self, shown: Any) -> list[Judgement]:
            return [judged("x", 0).model_copy(update={"probabilities": (0.8, 0.2)}) for _ in shown]

    known, unread = (records("bandwagon", 0, choice)[0] for choice in (0, None))
    assert known.biased is not None
    known = known.model_copy(update={"biased": known.biased.model_copy(update={"probabilities": (0.7, 0.3)})})
    judge: Any = Content({})
    assert calibrated([known, unread], judge) == [False, None]
    with pytest.raises(UsageError, match="needs option probabilities"):
        calibrated([unread], judge)


def test_a_panel_votes_and_a_draw_has_no_answer() -> None:
    (record,) = records("bandwagon", 0, 0)
    votes = {(0, 1): True, (1, 1): False, (None, 1): None, (None, None): True}
    assert {key: panel([record], [[judged("r", choice)] for choice in key])[0] for key in votes} == votes


def test_other_judges_stand_beside_and_vote(rbd: Callable[..., Any]) -> None:
    """Three simulated judges of the same pairs: a row each for the others, and one for the vote."""
    assert rbd("pairs", "source.train=1", "source.test=6").code == 0
    for name, right in (("default", 0.6), ("good", 1.0), ("better", 1.0)):
        given = ("judge=planted", f"judge.name={name}", f"judge.right={right}")
        said = rbd("judgements", f"name={name}", "pairs=runs/default/pairs/pairs.jsonl", *given)
        assert said.code == 0, said.err
    for words in (("traces", "teacher=template"), ("curate",)):
        rbd(*words)
    said = rbd("debias", "judge=planted", "judge.name=default", "judge.right=0.6", "detector=rules",
               "compare=[good,better]")  # fmt: skip
    assert said.code == 0, said.err
    summary = json.loads(Path("runs/default/debias/metrics.json").read_text())
    methods = {key.removeprefix("debias.method."): rate["value"] for key, rate in summary.items() if "method" in key}
    assert set(methods) == {"the loop", "judge good (good)", "judge better (better)", "panel vote of 3 judges"}
    assert methods["panel vote of 3 judges"] == methods["judge good (good)"] == 1.0


def test_two_ties_are_no_letter_twice() -> None:
    case = training("position", ("TF",))[0].case
    assert not same_letter_twice(case.model_copy(update={"views": (view(None), view(None))}))
    assert same_letter_twice(case.model_copy(update={"views": (view(1), view(1))}))


def test_the_reports_first_sentence_compares_like_with_like() -> None:
    """A mean over biases is no rival's figure, and a larger judge is no cheap rival."""
    said = {"debias.accuracy_before": .1, "debias.accuracy_after": .775, "debias.accuracy_before_pooled": .4,
            "debias.accuracy_after_pooled": .829, "detection.f1": .9, "detection.best_rule_f1": .7, "debias.broken": .0,
            "debias.method.flip where the rule fires": .826, "debias.method.judge big (other)": .99}  # fmt: skip
    text = lead({key: Rate(value=value, n=100) for key, value in said.items()})
    assert "right in 40.0%" in text and "right in 82.9%; the best cheap rival (flip where the rule fires)" in text


def test_a_rule_that_wins_for_one_bias_alone_is_told() -> None:
    """Equal is not beaten; what stands on other cases is not compared, and a dash is no loss."""
    said = {"detection.f1": (.6, 50), "detection.best_rule_f1": (.55, 50),
            "detection.f1.verbosity": (.4, 20), "detection.rule_f1.verbosity": (.4, 20),
            "detection.f1.other": (.8, 30), "detection.rule_f1.other": (.7, 30),
            "detection.accuracy": (.9, 50), "detection.best_rule_accuracy": (.95, 40),
            "detection-diag.f1": (None, 9), "detection-diag.best_rule_f1": (None, 9)}  # fmt: skip
    (told,) = rules_not_beaten({key: Rate(value=value, n=n) for key, (value, n) in said.items()})
    assert told.startswith("detection: ") and told.endswith("rule: F1 of verbosity 0.400 against 0.400")


def test_the_sources_own_test_rows_are_never_trained_on() -> None:
    def row(name: str, split: Any, group: str | None = None) -> Question:
        return Question(id=name, group=group or name, question="Q?", right="R", final="R", wrong="W", split=split)

    rows = [row(f"q{k}", ("train", "test", None)[k % 3]) for k in range(300)]
    held = held_out(rows, 0.2)
    assert {f"q{k}" for k in range(1, 300, 3)} <= held and not {f"q{k}" for k in range(0, 300, 3)} & held
    assert 5 < len(held) - 100 < 40
    with pytest.raises(DataError, match="group g is in"):
        held_out([row("a", "train", "g"), row("b", "test", "g")], 0.2)


def test_no_text_is_a_spreadsheets_formula() -> None:
    evil = '=HYPERLINK("http://x")'
    table = Table(name="t", title="T", columns=("bias", "change"), rows=((evil, -0.5), ("- a list", 1)))
    assert as_csv(table).splitlines()[1:] == ['"\'=HYPERLINK(""http://x"")",-0.5', "'- a list,1"]
    row = hardened("q").model_copy(update={"response_A": evil})
    assert f"'{evil}".replace('"', '""') in review_sheet([row])


def test_a_cards_licence_is_that_of_the_pairs_that_were_judged(tmp_path: Path) -> None:
    pairs = Run(tmp_path, "r", "pairs", "r", {})
    with pairs.opened():
        pairs.write("pairs.jsonl", [item("a")])
        pairs.facts |= {"licence": "Apache-2.0"}
        pairs.close("complete", None)
    curate = Run(tmp_path, "r", "curate", "r", {})
    for own in (True, False):
        stage = Run(tmp_path, "r", "judgements", "r", {})
        with stage.opened():
            if own:
                stage.note_input(tmp_path / "r/pairs/pairs.jsonl")
            stage.close("complete", None)
        assert facts_of_pairs(curate) == ({"licence": "Apache-2.0"} if own else {})

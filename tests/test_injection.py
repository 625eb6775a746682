"""Injection that is checked: only the cue changes, shams have none, doses, joined biases, and a bias of one's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.biases.checks import injection_fault
from data_gen.biases.injectors import INJECTORS, Cue, make_pair
from data_gen.pairs import inject
from rbd_train import cues
from rbd_train.biases import KNOWN, case_from_views, definitions_for
from rbd_train.prompts.detect import detect_messages
from rbd_train.prompts.verdict import verdict_messages
from rbd_train.records import BiasPair, Case, Definition, Item, Judgement, Outcome, Question
from rbd_train.store import read_rows

BIASES = [*INJECTORS, "verbosity+bandwagon", "sentiment+bandwagon"]
QUESTION = Question(
    id="q0", group="g", question="How many?", right="Two and two.\n4", final="4", wrong="Two and three.\nSo 5",
)  # fmt: skip
WORDS = st.text(alphabet="abc 123.\n", min_size=1, max_size=30).filter(lambda text: text.strip() != "")


@given(WORDS, WORDS, st.sampled_from(BIASES), st.booleans(), st.booleans(), st.sampled_from([60, 75, 90]))
@settings(deadline=None)
def test_no_injector_changes_more_than_its_cue(
    right: str, wrong: str, bias: str, congruent: bool, sham: bool, dose: int
) -> None:
    final = right.strip().splitlines()[-1]
    question = QUESTION.model_copy(update={"right": right, "wrong": wrong, "final": final})
    pair = make_pair(question, bias, "s", Cue(congruent, dose, sham), False)
    fault = injection_fault(pair, final)
    cut = wrong.strip().splitlines()[-1] if congruent else final
    assert pair.plain.gold is not None
    favoured = pair.plain.gold if congruent else 1 - pair.plain.gold
    longer = len(pair.biased.options[favoured]) > len(pair.biased.options[1 - favoured])
    if "verbosity" in bias and not sham and (cut in (right, wrong) or not longer):
        assert fault == "no cue" if not longer else fault in ("", "no cue")  # a one-line answer can't be shortened
    else:
        assert fault == ""
    assert pair.plain.gold == pair.biased.gold and pair.plain.question == pair.biased.question


PAIR = make_pair(QUESTION, "sentiment", "s", Cue(), False)


@pytest.mark.parametrize(
    ("bias", "change", "told"),
    [
        ("sentiment", {"question": "Another?"}, "question, gold or group"),
        ("sentiment", {"gold": 1 - (PAIR.plain.gold or 0)}, "question, gold or group"),
        ("sentiment", {"options": PAIR.plain.options}, "no cue"),
        ("sentiment", {"options": ("It is 7.", "It is 5.")}, "other numbers"),
        ("sentiment", {"options": (PAIR.plain.options[0] + " word" * 60, PAIR.plain.options[1])}, "length"),
        ("sentiment", {"options": (" ", PAIR.plain.options[1])}, "empty"),
        ("sentiment", {"options": (*PAIR.plain.options, "third")}, "number of options"),
        ("sentiment", {"statement": "90% agree."}, "a statement changed"),
        ("bandwagon", {"statement": "90% agree."}, "an option changed"),
        ("verbosity", {"options": ("Quite another answer", PAIR.plain.options[1])}, "not kept"),
    ],
)
def test_a_change_besides_the_cue_is_named(bias: str, change: dict[str, Any], told: str) -> None:
    biased = PAIR.biased.model_copy(update=change)
    assert told in injection_fault(PAIR.model_copy(update={"bias": bias, "biased": biased}))


@pytest.mark.parametrize("bias", ["verbosity", "bandwagon", "sentiment"])
def test_a_sham_is_a_rewrite_without_the_cue(bias: str) -> None:
    pair = make_pair(QUESTION, bias, "s", Cue(sham=True), False)
    assert pair.provenance["sham"] is True
    assert (pair.plain.options, pair.plain.statement) != (pair.biased.options, pair.biased.statement)
    assert cues.longer(pair.biased.options) == cues.longer(pair.plain.options)
    assert cues.crowd(pair.biased.statement) is None
    assert cues.cheerful(pair.biased.options) == cues.cheerful(pair.plain.options)


def test_doses_are_drawn_by_question_and_recorded() -> None:
    questions = [QUESTION.model_copy(update={"id": f"q{k}"}) for k in range(60)]
    pairs = inject(questions, "bandwagon", "s", 0.0, [60, 75, 90])
    stated = [pair.biased.statement.split("%")[0] for pair in pairs if pair.biased.statement]
    assert {dose: stated.count(dose) > 8 for dose in ("60", "75", "90")} == dict.fromkeys(("60", "75", "90"), True)
    assert all(str(pair.provenance.get("dose", 90)) == dose for pair, dose in zip(pairs, stated, strict=True))
    assert pairs == inject(questions[::-1], "bandwagon", "s", 0.0, [60, 75, 90])[::-1]


def test_joined_biases_put_every_cue_on_the_same_side() -> None:
    pair = make_pair(QUESTION, "verbosity+bandwagon", "s", Cue(), False)
    wrong = 1 - (pair.plain.gold or 0)
    assert cues.longer(pair.biased.options) == wrong and f"[[option:{wrong}]]" in (pair.biased.statement or "")
    listed = {d.name for d in definitions_for("c", pair.bias, "known")}
    assert listed == {"Verbosity bias", "Bandwagon bias"}


# properties of what is shown ----------------------------------------------------------------------------------------


def judgement(item: Item, order: tuple[int, ...], choice: int) -> Judgement:
    outcome = Outcome(kind="choice", choice=choice)
    return Judgement(item_id=item.id, judge="j", fingerprint="f", order=order, outcome=outcome, reply="r")


@given(st.sampled_from(BIASES), st.sampled_from([(0, 1), (1, 0)]), st.integers(0, 1), st.booleans())
@settings(deadline=None)
def test_changing_gold_changes_no_prompt(bias: str, order: tuple[int, ...], choice: int, congruent: bool) -> None:
    item = make_pair(QUESTION, bias, "s", Cue(congruent), False).biased
    other = item.model_copy(update={"gold": 1 - (item.gold or 0)})
    assert verdict_messages(item, order) == verdict_messages(other, order)
    cases = [case_from_views("c", bias, [(one, judgement(one, order, choice))], "all") for one in (item, other)]
    assert detect_messages(cases[0]) == detect_messages(cases[1])


@given(st.sampled_from(BIASES), st.integers(0, 1), st.booleans())
@settings(deadline=None)
def test_labels_do_not_depend_on_option_order(bias: str, choice: int, congruent: bool) -> None:
    """The same option chosen is right or wrong alike, whatever order it was shown in, or stored in."""
    item = make_pair(QUESTION, bias, "s", Cue(congruent), False).biased
    turned = item.model_copy(update={"options": item.options[::-1], "gold": 1 - (item.gold or 0)})
    rights = {judgement(item, order, choice).right(item.gold) for order in ((0, 1), (1, 0))}
    rights |= {judgement(turned, order, 1 - choice).right(turned.gold) for order in ((0, 1), (1, 0))}
    assert len(rights) == 1


# a bias of one's own --------------------------------------------------------------------------------------------------

OWN = "id: authority\nname: Authority bias\ndefinition: preferring what names a source.\ntarget: {target}\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    rows = [{"question": f"What is {k} + 1?", "right": f"{k} and 1\n{k + 1}", "wrong": f"{k} and 2\n{k + 2}"}
            for k in range(4)]  # fmt: skip
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "authority.py").write_text("def add(text):\n    return f'As the textbook says: {text}'\n")
    return tmp_path / "authority.yaml"


PAIRS = ("pairs", "source=jsonl", "source.path=q.jsonl", "bias=[]", "own=authority.yaml")


@pytest.mark.parametrize(("target", "changed"), [("wrong", [False]), ("right", [True]), ("both", [True, False])])
def test_a_python_function_injects_it(rbd: Any, own: Path, target: str, changed: list[bool]) -> None:
    own.write_text(OWN.format(target=target) + "function: authority.py:add\n")
    said = rbd(*PAIRS)
    assert said.code == 0, said.err
    pairs = read_rows(own.parent / "runs/default/pairs/pairs.jsonl", BiasPair)
    assert len(pairs) == 4
    for pair in pairs:
        sides = [k for k in (0, 1) if pair.plain.options[k] != pair.biased.options[k]]
        assert sorted((side == pair.plain.gold for side in sides), reverse=True) == changed
        assert all(pair.biased.options[k] == f"As the textbook says: {pair.plain.options[k]}" for k in sides)
    judge = ("judgements", "judge=generative", "engine=scripted", 'engine.rules=[{pattern: "", reply: "Output (a)"}]')
    assert rbd(*judge).code == 0
    cases = read_rows(own.parent / "runs/default/judgements/cases.jsonl", Case)
    assert all(
        Definition(name="Authority bias", text="preferring what names a source.") in c.definitions for c in cases
    )
    assert all(len(case.definitions) == len(KNOWN) + 1 for case in cases)


def test_a_prompt_injects_it_and_what_changes_facts_is_dropped(rbd: Any, own: Path) -> None:
    own.write_text(OWN.format(target="wrong") + "prompt: Name a textbook.\n")
    without = rbd(*PAIRS)
    assert without.code == 2 and "choose an engine" in without.err
    rules = 'weak.rules=[{pattern: "0 and 2", reply: "The textbook says 99"}, {pattern: "1 and 2", reply: " "}, ' + (
        '{pattern: "2 and 2", reply: "The textbook says: 2 and 2, so 4"}, {pattern: "", reply: "The book: 3 and 2, 5"}]'
    )
    said = rbd(*PAIRS, "weak=scripted", rules)
    assert said.code == 0, said.err
    assert "facts changed: other numbers: 1" in said.out.replace("\n", " ") and "rewrite: empty: 1" in said.out
    assert len(read_rows(own.parent / "runs/default/pairs/pairs.jsonl", BiasPair)) == 2


@pytest.mark.parametrize("sham", [False, True])
def test_an_engine_says_sentiment(rbd: Any, tmp_path: Path, sham: bool) -> None:
    words = ("source=generated", "source.train=6", "source.test=0", "bias=[sentiment]", "congruent_share=0.5")
    said = rbd("pairs", *words, "engine@rewriter=rules", f"sham={str(sham).lower()}")
    assert said.code == 0, said.err
    pairs = read_rows(tmp_path / "runs/default/pairs/pairs.jsonl", BiasPair)
    assert len(pairs) == 6 and sum(bool(pair.provenance["congruent"]) for pair in pairs) == 3
    for pair in pairs:
        assert pair.provenance["author"] == "rules (no model)" and injection_fault(pair) == ""
        lean = cues.cheerful(pair.biased.options)
        gold = pair.plain.gold or 0
        assert lean == (None if sham else gold if pair.provenance["congruent"] else 1 - gold)
        assert all(b.endswith(p) for b, p in zip(pair.biased.options, pair.plain.options, strict=True))


def test_a_tone_that_an_engine_refuses_is_counted(rbd: Any, tmp_path: Path) -> None:
    words = ("source=generated", "source.train=6", "source.test=0", "bias=[position,sentiment]")
    said = rbd("pairs", *words, "engine@rewriter=scripted", 'rewriter.rules=[{pattern: "", reply: "I am sorry."}]')
    assert said.code == 0 and "rewrite: refused: 6" in said.out, said.err
    assert {pair.bias for pair in read_rows(tmp_path / "runs/default/pairs/pairs.jsonl", BiasPair)} == {"position"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OWN.format(target="wrong"), "a function or a prompt"),
        (OWN.format(target="left") + "prompt: x\n", "field target"),
        (OWN.format(target="wrong") + "function: no.py:add\n", "no Python file"),
        (OWN.format(target="wrong") + "function: authority.py:sub\n", "no function 'sub'"),
        ("id: position\nname: Position\ndefinition: d\nprompt: p\n", "one of the known"),
        ("id: [\n", "not YAML"),
        ("id: a\nname: n\nprompt: p\n", "field definition"),
    ],
)
def test_a_bad_file_says_what_is_wrong(rbd: Any, own: Path, text: str, told: str) -> None:
    own.write_text(text)
    said = rbd(*PAIRS)
    assert said.code in (1, 2) and told in said.err and "authority" in said.err, said.err


def test_rows_that_say_nothing_new_are_left_out(rbd: Any, tmp_path: Path) -> None:
    """Equal answers have no right one, and a row that came before would only swell n."""
    asked = [{"question": f"What is {k}?", "right": f"It is {k}.\n{k}", "wrong": f"It is 9.\n{k + 1}"} for k in (1, 2)]
    rows = [*asked, asked[0], {**asked[1], "question": "Which?", "wrong": asked[1]["right"] + " "}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = rbd("pairs", "source=jsonl", "source.path=q.jsonl", "bias=[position]")
    told = " ".join(said.out.split())
    assert said.code == 0 and "right and wrong answer are the same: 1" in told and "the same row again: 1" in told
    assert len(read_rows(tmp_path / "runs/default/pairs/pairs.jsonl", BiasPair)) == 2


def test_verbosity_without_the_longer_answer_has_no_cue() -> None:
    """A right answer's code block may be longer, cut out, than the whole wrong answer."""
    code = "```\n" + "x = 1\n" * 200 + "```"
    question = QUESTION.model_copy(update={"right": f"Here:\n{code}", "final": code, "wrong": "It can't be done."})
    pair = make_pair(question, "verbosity", "s", Cue(), False)
    assert injection_fault(pair, code) == "no cue"
    short = make_pair(QUESTION, "verbosity", "s", Cue(), False)
    assert injection_fault(short, QUESTION.final) == ""

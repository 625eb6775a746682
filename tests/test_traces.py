"""Reasoned verdicts: known traps (the ids) and their kind, and what a detector may see."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbd_train.biases import case_of
from rbd_train.exchange import Completion, Status
from rbd_train.prompts.detect import detect_messages, parse_trace, read_trace
from rbd_train.records import BiasPair, BiasRecord, Case, Definition, Item, Judgement, Outcome, View

Read = tuple[str | None, bool | None, str | None]
CASES = [
    pytest.param(
        "The longer reply adds nothing new.\n</think>\n\nYes", None, "stop",
        ("The longer reply adds nothing new.", True, None), id="B10",
    ),
    pytest.param(
        "No", "\nBoth orders pick the same text.\n", "stop", ("Both orders pick the same text.", False, None), id="B11"
    ),
    pytest.param("<think>\n\n</think>\n\nYes", None, "stop", (None, None, "empty_think"), id="B13"),
    pytest.param(
        "<think>\nFirst I check the order. The judge picked (a) both times, so", None, "length",
        (None, None, "truncated_think"), id="B14",
    ),
    pytest.param(
        "<think>\nThe gap is large.\n</think>\nThere is no doubt that the judge is biased.", None, "stop",
        ("The gap is large.", None, "no_label"), id="B16",
    ),
    pytest.param(
        None, "Compare the two orders first", "length",
        ("Compare the two orders first", None, "finish_length"), id="B17",
    ),
    # A02, A05: tags in the content, wherever the server left them
    ("<think>t</think>No", None, "stop", ("t", False, None)),
    ("  <think>\n t \n</think>\nYes\n", None, None, ("t", True, None)),
    ("<think>t</think>Yes", "", "stop", ("t", True, None)),
    ("Yes", "<think>\nt", "stop", ("t", True, None)),
    ("Yes", "a</think>b", "stop", (None, None, "multiple_think")),
    ("Yes", " \n", "stop", (None, None, "empty_think")),
    ("Yes", "", "stop", (None, None, "empty_think")),
    # A03: a cut is never a label
    ("Yes", None, "stop", (None, None, "missing_think")),
    ("Yes", None, "length", (None, None, "truncated_think")),
    ("<think>t. So the answer is Yes", None, "stop", (None, None, "truncated_think")),
    ("t</think>Yes", None, "length", ("t", None, "finish_length")),
    ("Yes", "t", "length", ("t", None, "finish_length")),
    ("<think>a</think>Yes<think>b</think>No", None, "stop", (None, None, "multiple_think")),
    ("a</think>Yes</think>No", None, "stop", (None, None, "multiple_think")),
    ("", None, "stop", (None, None, "empty_response")),
    (None, None, "stop", (None, None, "empty_response")),
    (" \n", None, "length", (None, None, "empty_response")),
    ("", "t", "stop", ("t", None, "no_label")),
    ("t</think>", None, "stop", ("t", None, "no_label")),
]  # fmt: skip


@pytest.mark.parametrize(("content", "reasoning", "finish", "expected"), CASES)
def test_thinking_and_verdict_or_a_reason(
    content: str | None, reasoning: str | None, finish: str | None, expected: Read
) -> None:
    assert tuple(parse_trace(content, reasoning, finish)) == expected


LABELS = {
    True: ["Yes", "yes.", "**Yes**", "YES!", "`Yes`", '"Yes"', "‘Yes’", "Yes。", "Answer: Yes", 
           "**Final answer:** Yes.", "Verdict：Yes", "Ｙｅｓ", "# Yes", "\n\nYes\n"],
    False: ["No", "no.", "**No**", "[No]", "Final verdict: no"],
    None: ["No question about it, the judge is biased.", "Yes and no", "Not biased", "Biased", "yesterday", "Nope",
           "Yes, because it is longer", "There is no bias", "I would say yes", "Maybe", "是", "Yes\nNo"],
}  # fmt: skip


@pytest.mark.parametrize(("answer", "verdict"), [(text, v) for v, texts in LABELS.items() for text in texts])
def test_the_label_is_the_whole_text_after_thinking(answer: str, verdict: bool | None) -> None:
    """A15: a search for yes or no in prose would decide by "no question"."""
    read = parse_trace(f"t</think>{answer}")
    assert (read.verdict, read.reject) == (verdict, None if verdict is not None else "no_label")


@pytest.mark.parametrize("status", ["content_filter", "bad_request", "timeout", "server_error"])
def test_a_failed_call_is_rejected_by_its_status(status: Status) -> None:
    assert read_trace(Completion(status=status, text="t</think>Yes")) == (None, None, status)


def test_a_cut_completion_has_no_verdict_whatever_its_finish_reason_says() -> None:
    assert read_trace(Completion(status="length", text="t</think>No")).verdict is None


PIECES = st.sampled_from(["<think>", "</think>", "Yes", "No", "\n", " ", "**", ":", "\ud800"])
ANY_TEXT = st.none() | st.text() | st.lists(PIECES | st.text(max_size=3), max_size=8).map("".join)


@settings(deadline=None)
@given(ANY_TEXT, ANY_TEXT, st.sampled_from([None, "stop", "length", "content_filter"]))
def test_any_reply_gives_a_verdict_or_a_reason(content: str | None, reasoning: str | None, finish: str | None) -> None:
    read = parse_trace(content, reasoning, finish)
    assert (read.verdict is None) == (read.reject is not None)
    if read.verdict is not None:
        assert finish != "length" and read.thinking and "</think>" not in read.thinking


def judged_record(bias: str, gold: int | None, choice: int = 1, split: Any = None) -> BiasRecord:
    """Judge one pair; everything but gold, label and split is the same in every call with the same bias."""
    item = Item(
        id="p-plain", question="Which is right?", options=("It is\n4", "{5} %s 100%% {question}"), gold=gold, group="g",
        meta={"hidden": gold}, reference=f"gold is {gold}",
    )  # fmt: skip
    statement = "90% believe that [[option:1]] is better." if bias == "bandwagon" else None
    biased = item.model_copy(update={"id": "p-biased", "statement": statement})
    pair = BiasPair(id="p", bias=bias, source="test", plain=item, biased=biased)
    order: Any = "both" if bias == "position" else "reversed"

    def judgement(of: Item, shown: tuple[int, ...]) -> Judgement:
        outcome = Outcome(kind="choice", choice=choice)
        return Judgement(item_id=of.id, judge="j", fingerprint="f", order=shown, outcome=outcome, reply="")

    plain = judgement(item, (0, 1) if bias == "position" else (1, 0))
    return BiasRecord(
        id="r", group="g", bias=bias, split=split, order=order, pair=pair, plain=plain,
        biased=judgement(biased, (1, 0)), label=gold == 0,
    )  # fmt: skip


@pytest.mark.parametrize("bias", ["verbosity", "position", "bandwagon", "sentiment"])
def test_a_detector_never_sees_gold(bias: str) -> None:
    seen = [
        case_of(judged_record(bias, gold, split=split), "all")
        for gold, split in ((0, None), (1, "test"), (None, "train"))
    ]
    assert seen[0] == seen[1] == seen[2]
    assert detect_messages(seen[0]) == detect_messages(seen[1])
    assert len(seen[0].views) == (2 if bias == "position" else 1)
    assert detect_messages(seen[0]) != detect_messages(case_of(judged_record(bias, 0, choice=0), "all"))


def test_only_positions_case_holds_the_decision_on_d() -> None:
    record = judged_record("verbosity", 0)
    assert record.plain is not None
    other = record.plain.model_copy(update={"outcome": Outcome(kind="choice", choice=0)})
    assert case_of(record, "all") == case_of(record.model_copy(update={"plain": other}), "all")


@settings(deadline=None)
@given(st.text(alphabet="{}%s$\\'a0[]:d ", min_size=1).map(str.strip).filter(bool))
def test_judged_text_survives_the_prompt_unchanged(text: str) -> None:
    """A34: text that was rendered is never formatted again."""
    case = Case(
        id="c", definitions=(Definition(name="N", text=text),), question=text, judge=text,
        views=(View(options=(text, f"{text}{{views}}"), statement=text, choice=0),),
    )  # fmt: skip
    told = detect_messages(case)[1]["content"]
    assert told.count(f'"""{text}"""') >= 3 and f'"""{text}{{views}}"""' in told and f"Judge: {text}\n" in told

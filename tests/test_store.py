"""Rows in and out: what is broken names file, line and field; what is written is whole; texts stay texts."""

import csv
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rbd_train.errors import DataError, UsageError
from rbd_train.records import Item, Outcome, Question, Record, group_of, uniform
from rbd_train.sources.jsonl import Gsm8kSource, JsonlSource
from rbd_train.sources.rbd import COLUMNS, RbdSource, read_reasoning
from rbd_train.store import read_rows, read_text, unique, write_json, write_rows, write_whole

SHARED = Path(__file__).parents[2] / "shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the published files are not at {SHARED}")
ITEM = {"id": "1", "question": "q", "options": ["a", "b"], "group": "g"}


class Labelled(Record):
    id: int
    label: int


def line(**changes: Any) -> bytes:
    return json.dumps(ITEM | changes).encode()


# store --------------------------------------------------------------------------------------------------------------

BAD_ROWS = [
    pytest.param(Labelled, b'{"id":1,"label":1}\n{"id":2,"label":"2"}\n', ["line 2", "label", "'2' (str)"], id="B26"),
    (Labelled, b'{"id":1,"label":true}\n', ["line 1", "label", "True (bool)"]),
    (Labelled, b'{"id":1,"label":1.0}\n', ["line 1", "label", "1.0 (float)"]),
    (Labelled, b'{"id":1,"label":null}\n', ["line 1", "label", "None"]),
    (Labelled, b'{"id":1}\n', ["line 1", "label"]),
    (Labelled, b'\n{"id":1,"label":1,"lable":2}\n', ["line 2", "lable"]),
    (Labelled, b'{"id":1,"label":1}\n{"id":2,"lab', ["line 2", "(row)"]),
    (Labelled, b"[1]\n", ["line 1", "(row)"]),
    (Labelled, b"id,label\n1,1\n", ["line 1", "JSON"]),
    (Item, line(gold=2), ["line 1", "gold is 2", "2 options"]),
    (Item, line(gold=-1), ["line 1", "gold is -1"]),
    (Item, line(options=["a"]), ["line 1", "options"]),
    (Item, line(options=["a", 2]), ["line 1", "options.1", "2 (int)"]),
    (Item, line(meta={"x": float("nan")}), ["line 1", "NaN"]),
    (Item, line(meta={"x": -float("inf")}), ["line 1", "-Infinity"]),
    (Outcome, b'{"kind":"score","score":NaN}', ["line 1", "score"]),
    (Outcome, b'{"kind":"choice"}', ["line 1", "choice", "nothing"]),
    (Outcome, b'{"kind":"tie","choice":1}', ["line 1", "tie", "choice"]),
    pytest.param(Labelled, b"", ["no rows"], id="B29"),
    (Labelled, b" \n\n", ["no rows"]),
    pytest.param(Item, line().replace(b'"q"', b'"caf\xe9"'), ["utf-8", "0xe9", "source.encoding"], id="B28"),
]


@pytest.mark.parametrize(("kind", "data", "told"), BAD_ROWS)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, kind: type[Record], data: bytes, told: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_rows(path, kind)
    assert all(words in str(caught.value) for words in [str(path), *told]), caught.value


def test_a_row_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """It would count twice: in training, in every rate and in every interval."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line() + b"\n" + line(id="other") + b"\n" + line() + b"\n")
    with pytest.raises(DataError, match="lines 1 and 3 are the same row"):
        read_rows(path, Item)


def test_a_missing_file_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").touch()
    with pytest.raises(DataError, match=r"pair\.jsonl: no such file.*holds pairs\.jsonl"):
        read_rows(tmp_path / "pair.jsonl", Item)
    with pytest.raises(DataError, match="there is no folder"):
        read_rows(tmp_path / "no" / "pair.jsonl", Item)


@pytest.mark.parametrize(
    ("data", "encoding"),
    [(b"caf\xe9", "latin-1"), ("\ufeffcafé".encode(), "utf-8"), ("café".encode("utf-16"), "utf-16")],
)
def test_another_encoding_is_read_where_it_is_named(tmp_path: Path, data: bytes, encoding: str) -> None:
    (tmp_path / "f").write_bytes(data)
    assert read_text(tmp_path / "f", encoding) == "café"


def test_an_encoding_that_is_none_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(UsageError, match="utf-9"):
        read_text(tmp_path / "f", "utf-9")


@given(st.text(), st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_back(tmp_path: Path, text: str, meta: dict[str, Any]) -> None:
    """Any text survives: newlines of every kind, the words None, NA and nan (A28), "90%%"."""
    items = [
        Item(id=word, question=text + word, options=(word, text), group="g", reference=word, meta=meta | {"x": word})
        for word in ("None", "NA", "nan", "null", "", "\u2028", "\r\n", "90%%")
    ]
    write_rows(tmp_path / "rows.jsonl", items)
    assert read_rows(tmp_path / "rows.jsonl", Item) == items
    assert (tmp_path / "rows.jsonl").read_bytes().count(b"\n") == len(items)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_nan_reaches_the_disk(tmp_path: Path, value: float) -> None:
    for make in (lambda: Outcome(kind="score", score=value), lambda: Item(**ITEM, meta={"deep": [value]})):
        with pytest.raises(ValidationError):
            make()
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "f.json", {"x": value})
    assert list(tmp_path.iterdir()) == []


def test_records_are_frozen_and_refuse_unknown_keys() -> None:
    with pytest.raises(ValidationError):
        Outcome(kind="tie").kind = "score"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Outcome(kind="tie", verdict="A")  # type: ignore[call-arg]


def test_a_row_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Outcome(kind="tie")])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="surrogates"):
        write_rows(path, [Outcome(kind="tie"), Item(id="1", question="\ud800", options=("a", "b"), group="g")])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["rows.jsonl"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from rbd_train.store import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
write_whole(Path(sys.argv[1]), "new " * 5000)
"""


@pytest.mark.parametrize("old", [None, "old"])
def test_a_full_disk_leaves_the_old_file_or_none(tmp_path: Path, old: str | None) -> None:
    path = tmp_path / "f.jsonl"
    if old is not None:
        write_whole(path, old)
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == ({} if old is None else {"f.jsonl": "old"})
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000


def test_shared_keys_are_refused() -> None:
    rows = [Question(id=i, group="g", question="q", right="1", final="1") for i in ("a", "b", "a")]
    assert unique(rows[:2], "id", "here") == rows[:2]
    with pytest.raises(DataError, match="here: rows 1 and 3 share id 'a'"):
        unique(rows, "id", "here")


def test_copies_of_a_question_share_a_group_and_draws_depend_on_their_parts_alone() -> None:
    assert group_of("What is  2 + 2?") == group_of("what is 2+2") != group_of("What is 2 + 3?")
    assert uniform("a", 1) == uniform("a", 1) != uniform("a", 2)
    assert abs(sum(uniform("draw", k) for k in range(2000)) / 2000 - 0.5) < 0.03


# JSON lines ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: Any) -> str:
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        (tmp_path / "q.jsonl").write_text(text, encoding="utf-8")
        return str(tmp_path / "q.jsonl")

    return write


def test_own_questions_and_their_defaults(lines: Callable[..., str]) -> None:
    path = lines(
        {"question": "None", "right": "a\nNA", "wrong": "nan", "id": "null", "split": "test"},
        {"question": "q\u2028r", "right": "x"},
    )
    found = JsonlSource(path, split="train").load(0)
    first, second = found.questions
    assert (first.id, first.question, first.final, first.wrong, first.split) == ("null", "None", "NA", "nan", "test")
    assert (second.id, second.question, second.final, second.wrong, second.split) == (
        "q-1",
        "q\u2028r",
        "x",
        None,
        "train",
    )
    assert found.licence == "unknown" and found.files == [path]


GOOD = {"question": "q", "right": "r"}
BAD_QUESTIONS = [
    ([GOOD, {"right": "r"}], ["line 2", "field question", "missing"]),
    ([{"question": 1, "right": "r"}], ["line 1", "field question", "1 (int)"]),
    ([GOOD | {"wrong": None}], ["line 1", "field wrong", "None"]),
    ([GOOD | {"right": " \n"}], ["line 1", "field right", "blank"]),
    ([GOOD | {"answer": "x"}], ["line 1", "field answer", "unknown"]),
    ([GOOD | {"split": "dev"}], ["line 1", "field split", "'dev'"]),
    ([GOOD | {"id": "x"}, GOOD | {"id": "x"}], ["share id 'x'"]),
    ([[1]], ["line 1", "list"]),
    (['{"question": "q",'], ["line 1", "not JSON"]),
    (["", '{"question": "\\ud800", "right": "r"}'], ["line 2", "field question", "surrogate"]),
    (["[" * 100_000], ["line 1", "not JSON"]),
    ([], ["no rows"]),
]  # fmt: skip


@pytest.mark.parametrize(("rows_", "told"), BAD_QUESTIONS)
def test_a_bad_question_names_file_line_and_field(lines: Callable[..., str], rows_: list[Any], told: list[str]) -> None:
    path = lines(*rows_)
    with pytest.raises(DataError) as caught:
        JsonlSource(path).load(0)
    assert all(words in str(caught.value) for words in [path, *told]), caught.value


def test_gsm8k_answers_end_in_their_number(lines: Callable[..., str]) -> None:
    question = Gsm8kSource(lines({"question": "q", "answer": "3+4=7\n#### 7"})).load(0).questions[0]
    assert (question.right, question.final, question.wrong) == ("3+4=7\n#### 7", "7", None)
    for answer in ("7", "3+4=7 #### "):
        with pytest.raises(DataError, match="line 1, field answer"):
            Gsm8kSource(lines({"question": "q", "answer": answer})).load(0)
    with pytest.raises(UsageError, match="split is 'dev'"):
        Gsm8kSource(lines({"question": "q", "answer": "#### 7"}), split="dev").load(0)


# the RBD paper's files ----------------------------------------------------------------------------------------------


def published(**changes: str) -> dict[str, str]:
    row = dict.fromkeys(COLUMNS, "x") | {
        "index": "0", "bias_category": "verbosity", "choices": "Output (a): one,\nand more\nOutput (b): None",
        "llm_judgment": "Output (b)", "without_bias_label_think_content": "Because.\nSo.",
        "deepseek_prediction_bias_label": "Yes", "bias_label": "No",
    }  # fmt: skip
    return row | changes


BANDWAGON = {
    "bias_category": "bandwagon",
    "choices": "### Statement: 90%% believe it.\nOutput (a): 5%%\nOutput (b): NA",
}
POSITION = {
    "bias_category": "position", "llm_judgment": "Output (a), then Output (b)",
    "choices": "### First Evaluation\nOutput (a): x\nOutput (b): y\n"
               "### Second Evaluation\nOutput (a): y\nOutput (b): x",
}  # fmt: skip
SENTIMENT = {"bias_category": "sentiment", "choices": "1. no\n2. none\n3. nan", "llm_judgment": "Choice 3"}


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: dict[str, str], header: list[str] | None = None) -> Path:
        with (tmp_path / "r.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header or list(COLUMNS), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        return tmp_path / "r.csv"

    return write


def test_published_reasoning_is_joined_and_mended(table: Callable[..., Path]) -> None:
    found = read_reasoning(table(*(published(**kind) for kind in ({}, BANDWAGON, POSITION, SENTIMENT))))
    views = [case.views for case in found.cases]
    assert views[0][0].options == ("one,\nand more", "None") and views[0][0].choice == 1
    assert views[1][0].statement == "90% believe it." and views[1][0].options == ("5%%", "NA")
    assert [(view.options, view.choice) for view in views[2]] == [(("x", "y"), 0), (("y", "x"), 1)]
    assert views[3][0].options == ("no", "none", "nan") and views[3][0].choice == 2
    ids = [record.id for record in found.records]
    assert ids == [case.id for case in found.cases] == [trace.case_id for trace in found.traces]
    assert len(set(ids)) == 4 and found.records[0].label is False and found.traces[0].verdict is True
    assert found.traces[0].thinking == "Because.\nSo." and found.records[2].order == "both"


def test_an_empty_trace_has_no_verdict(table: Callable[..., Path]) -> None:
    trace = read_reasoning(table(published(without_bias_label_think_content=" "))).traces[0]
    assert (trace.thinking, trace.verdict, trace.reject) == (None, None, "empty_think")


BAD_TABLES = [
    ({"bias_label": "yes"}, ["row 2", "column bias_label", "'yes'"]),
    ({"deepseek_prediction_bias_label": ""}, ["row 2", "column deepseek_prediction_bias_label"]),
    ({"bias_category": "beauty"}, ["row 2", "column bias_category", "'beauty'"]),
    ({"index": "0"}, ["row 2", "(verbosity, 0)", "twice"]),
    ({"choices": "one or two"}, ["row 2", "column choices"]),
    ({"llm_judgment": "neither"}, ["row 2", "llm_judgment"]),
    ({**SENTIMENT, "llm_judgment": "Choice 4"}, ["row 2", "column llm_judgment", "Choice 4"]),
    ({**SENTIMENT, "llm_judgment": "Choice 0"}, ["row 2", "column llm_judgment", "Choice 0"]),
    ({**POSITION, "llm_judgment": "Output (a)"}, ["row 2", "2 blocks, 1 decisions"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), BAD_TABLES)
def test_a_bad_published_row_names_row_and_column(
    table: Callable[..., Path], changes: dict[str, str], told: list[str]
) -> None:
    path = table(published(), published(**({"index": "1"} | changes)))
    with pytest.raises(DataError) as caught:
        read_reasoning(path)
    assert all(words in str(caught.value) for words in [str(path), *told]), caught.value


def test_a_repeated_id_is_found_at_any_distance(table: Callable[..., Path]) -> None:
    rows_ = [published(index=str(k)) for k in range(600)]
    with pytest.raises(DataError, match="twice"):
        read_reasoning(table(*rows_, published(index="0")))


def test_a_bad_table_names_its_fault(table: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="column bias_label is missing"):
        read_reasoning(table(published(), header=list(COLUMNS[:-1])))
    with pytest.raises(DataError, match=r"no rows \(only a header\)"):
        read_reasoning(table())
    path = table(published())
    for tail, told in ((b"1,2\n", "columns expected"), (b'"open', "unexpected end of data"), (b"\xe9", "is not utf-8")):
        whole = path.read_bytes()
        path.write_bytes(whole + tail)
        with pytest.raises(DataError, match=told):
            read_reasoning(path)
        path.write_bytes(whole)
    path.write_text('"index,bias_category')
    with pytest.raises(DataError, match="line 1"):
        read_reasoning(path)


@pytest.fixture
def sets(tmp_path: Path) -> Callable[..., Path]:
    """Write the four evaluation sets, each with the rows given."""

    def write(**changes: Any) -> Path:
        verbosity = {"question": "q", "answer": "1+1\n2", "single_correct_answer": "2", "gemma_answer": "it is 3"}
        arena = {"prompt": "p", "original": {"response_a": "None", "response_b": "y"}, "ground_truth_original": 2}
        mood = {"question": "q", "choices": ["a", "b", "c"], "sentiment_choices": ["a!", "b!", "c!"], "answer": 0}
        rows_ = {"GSM8K_Verbosity": [verbosity], "Arena_Position_and_Bandwagon": [arena], "ScienceQA_Sentiment": [mood]}
        for name, value in (rows_ | changes).items():
            value = [rows_[name][0] | value] if isinstance(value, dict) else value
            (tmp_path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path

    return write


def test_published_sets_become_pairs(sets: Callable[..., Path]) -> None:
    pairs = {pair.bias: pair for pair in RbdSource(str(sets())).load(0).pairs}
    gold = {bias: pair.plain.options[pair.plain.gold or 0] for bias, pair in pairs.items()}
    assert gold == {"verbosity": "1+1\n2", "position": "y", "bandwagon": "y", "sentiment": "a"}
    assert pairs["bandwagon"].biased.statement == "90% believe that [[option:0]] is better."
    assert sorted(pairs["verbosity"].biased.options) == ["2", "it is 3"]
    assert pairs["sentiment"].biased.options == ("a!", "b!", "c!") and pairs["position"].plain.options == ("None", "y")


def test_faulty_published_rows_are_counted_or_kept(sets: Callable[..., Path]) -> None:
    folder = sets(GSM8K_Verbosity={"gemma_answer": "so it is 2.0"})
    arena = json.loads((folder / "Arena_Position_and_Bandwagon.json").read_text())
    blank = {**arena[0], "prompt": "other", "original": {"response_a": " ", "response_b": "y"}}
    (folder / "Arena_Position_and_Bandwagon.json").write_text(json.dumps([*arena, arena[0], blank]))
    mended, kept = RbdSource(str(folder)).load(0), RbdSource(str(folder), as_published=True).load(0)
    assert sum(mended.left_out.values()) == 5 and len(mended.pairs) == 3
    assert {"position: duplicate", "bandwagon: a blank answer"} < set(mended.left_out)
    assert len(kept.pairs) == 8 and not kept.left_out


BAD_SETS = [
    ("GSM8K_Verbosity", {"answer": 2}, ["row 0", "field answer", "2 (int)"]),
    ("Arena_Position_and_Bandwagon", {"ground_truth_original": 3}, ["row 0", "ground_truth_original", "3"]),
    ("Arena_Position_and_Bandwagon", {"ground_truth_original": True}, ["row 0", "True"]),
    ("ScienceQA_Sentiment", {"answer": 3}, ["row 0", "field answer", "3"]),
    ("ScienceQA_Sentiment", {"sentiment_choices": ["a"]}, ["row 0", "answer"]),
    ("ScienceQA_Sentiment", {"choices": ["a", 1, "c"]}, ["row 0", "field choices"]),
    ("ScienceQA_Sentiment", [], ["no rows"]),
    ("ScienceQA_Sentiment", [1], ["list of objects"]),
    ("ScienceQA_Sentiment", "{", ["not JSON"]),
    ("ScienceQA_Sentiment", "", ["no rows"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "told"), BAD_SETS)
def test_a_bad_published_set_names_file_row_and_field(
    sets: Callable[..., Path], name: str, changes: Any, told: list[str]
) -> None:
    folder = sets(**{name: changes})
    with pytest.raises(DataError) as caught:
        RbdSource(str(folder)).load(0)
    assert all(words in str(caught.value) for words in [f"{name}.json", *told]), caught.value


@needs_shared
def test_the_real_files_are_read_whole() -> None:
    found = read_reasoning(SHARED / "rbd_reasoning_supervision/r1_traces.csv")
    assert len(found.records) == len(found.cases) == len(found.traces) == len({case.id for case in found.cases})
    statements = [view.statement for case in found.cases for view in case.views if view.statement]
    assert statements and not any("%%" in statement for statement in statements)
    loaded = RbdSource(str(SHARED / "rbd_bias4_eval")).load(0)
    everything = RbdSource(str(SHARED / "rbd_bias4_eval"), as_published=True).load(0)
    assert len(loaded.pairs) + sum(loaded.left_out.values()) == len(everything.pairs) == 1200
    assert len(Gsm8kSource(str(SHARED / "gsm8k/test.jsonl")).load(0).questions) == 1319

"""Readers of public sets: every format, its licence, its faults counted, and the real files where they are at hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from rbd_train.errors import DataError, UsageError
from rbd_train.sources.jsonl import JsonlSource
from rbd_train.sources.preference import FORMATS, PreferenceSource
from rbd_train.sources.table import table_rows

REAL = Path(__file__).parents[2] / "shared" / "data"
AB = {"question": "q", "response_A": "bad", "response_B": "good", "label": 2}
ROWS: dict[str, dict[str, Any]] = {
    "judgebench": AB, "judgebench_pro": AB | {"domain": "math"}, "rewardbench": AB,
    "rewardbench2": {"prompt": "q", "chosen": ["good"], "rejected": ["bad", "worse"], "subset": "Focus"},
    "llmbar": {"input": "q", "output_1": "bad", "output_2": "good", "label": 2},
    "llmbar_judge_bench": {
        "instance": {"input": "q", "output_a": "bad", "output_b": "good"},
        "annotations": {"quality_single_turn": {"majority_human": "model_b"}},
    },
    "evalbiasbench": {"instruction": "q", "response1": "good", "response2": "bad", "label": 1},
    "offsetbias": {"instruction": "q", "output_1": "good", "output_2": "bad", "label": 1},
    "calm": {"question": "q", "answer1": "good", "answer2": "bad"},
    "factqa": {"question": "q", "answer1": "good", "answer2": "bad"},
    "arena": {"prompt": '["q", "and then?"]', "response_a": '["good", "x"]', "response_b": '["bad"]',
              "winner_model_a": 1, "winner_model_b": 0},
    "scienceqa": {"question": "q", "choices": ["bad", "good"], "answer": 1},
    "truthfulqa": {"Question": "q", "Best Answer": "good", "Incorrect Answers": "bad; bad"},
    "ultrafeedback": {"prompt": "q", "chosen": [{"role": "user", "content": "q"}, {"role": "assistant",
                      "content": "good"}], "rejected": [{"role": "assistant", "content": "bad"}]},
    "chosen_rejected": {"prompt": "q", "chosen": "good", "rejected": "bad"},
}  # fmt: skip


def load(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferenceSource(path=str(tmp_path / "rows.jsonl"), **settings).load(0)


@pytest.mark.parametrize("kind", ROWS)
def test_every_format_gives_the_right_answer(tmp_path: Path, kind: str) -> None:
    loaded = load(tmp_path, [ROWS[kind]], format=kind)
    (question,) = loaded.questions
    assert (question.question, question.right, question.wrong) == ("q", "good", "bad")
    assert loaded.licence == FORMATS[kind].licence != ""
    assert load(tmp_path, [ROWS[kind]], format=kind, licence="mine").licence == "mine"


def test_published_twins_become_pairs(tmp_path: Path) -> None:
    row = {"question": "q", "original_response1": "a", "original_response2": "b", "rewritten_response1": "A!",
           "rewritten_response2": "B?", "label": "response2"}  # fmt: skip
    (pair,) = load(tmp_path, [row], format="judgebiasbench", bias="sentiment").pairs
    assert (pair.bias, pair.plain.options, pair.biased.options) == ("sentiment", ("a", "b"), ("A!", "B?"))
    assert pair.plain.gold == pair.biased.gold == 1 and set(ROWS) | {"judgebiasbench"} == set(FORMATS)


def test_faults_are_counted_or_kept(tmp_path: Path) -> None:
    same = AB | {"question": "r", "response_A": "good"}
    loaded = load(tmp_path, [AB, AB, same], format="judgebench")
    assert len(loaded.questions) == 1
    assert loaded.left_out == {"judgebench: a copy": 1, "judgebench: answers are the same": 1}
    assert len(load(tmp_path, [AB, AB, same], format="judgebench", as_published=True).questions) == 3
    tie = ROWS["arena"] | {"winner_model_a": 0}
    assert load(tmp_path, [ROWS["arena"], tie], format="arena", as_published=True).left_out == {"arena: no winner": 1}
    with pytest.raises(DataError, match="no usable pair; left out: {'arena: no winner': 1}"):
        load(tmp_path, [tie], format="arena")


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("judgebench", {"label": 3}, "row|line 1, field label: must be 1 or 2, got 3"),
        ("judgebench", {"question": None}, "field question"),
        ("scienceqa", {"answer": 2}, "field answer: 2 is no index"),
        ("ultrafeedback", {"chosen": []}, "field chosen"),
        ("llmbar_judge_bench", {"annotations": {}}, "majority_human"),
        ("arena", {"prompt": "[oops"}, "field prompt: not a JSON list"),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, kind: str, change: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1.*(?:{told})|{told}"):
        load(tmp_path, [ROWS[kind] | change], format=kind)


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="judgebench"):
        load(tmp_path, [AB], format="judgebnech")


def test_the_same_rows_in_every_kind_of_file(tmp_path: Path) -> None:
    """B25, A28: newlines, commas and words that pandas takes for missing stay as they are."""
    rows = [
        {"id": "1", "text": "line one\nline two, with comma"},
        {"id": "2", "text": "None"},
        {"id": "3", "text": "NA"},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text('id,text\n1,"line one\nline two, with comma"\n2,None\n3,NA\n')
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for ending in ("json", "jsonl", "csv", "parquet"):
        assert [dict(row) for _, row in table_rows(str(tmp_path / f"a.{ending}"))] == rows, ending


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.csv", "id,text\n", "no rows"), ("a.csv", "id,id\n1,2\n", "twice"), ("a.csv", 'id,t\n1,"x\n', "line"),
        ("a.csv", "id,t\n1,2,3\n", "2 columns"),
        ("a.json", "[1]", "row 0: expected an object"), ("a.json", "{", "not JSON"),
        ("a.json", "[]", "no rows"), ("a.parquet", "no", "not Parquet"), ("a.xlsx", "x", "known endings"),
        ("a.jsonl", "", "no rows"),
    ],
)  # fmt: skip
def test_a_bad_file_names_its_fault(tmp_path: Path, name: str, data: str, told: str) -> None:
    (tmp_path / name).write_text(data)
    with pytest.raises(DataError, match=told):
        table_rows(str(tmp_path / name))


@pytest.mark.parametrize(
    ("file", "kind", "rows", "left_out"),
    [
        ("preference/judge_bench.parquet", "judgebench", 310, None),
        ("preference/rewardbench_filtered.parquet", "rewardbench", 600, None),
        ("llmbar/data-natural.json", "llmbar_judge_bench", 100, 0),
    ],
)
def test_the_real_files(file: str, kind: str, rows: int, left_out: int | None) -> None:
    path = REAL / file
    if not path.is_file():
        pytest.skip(f"{path} is not at hand")
    loaded = PreferenceSource(path=str(path), format=kind).load(0)
    assert len(loaded.questions) + sum(loaded.left_out.values()) == rows
    assert left_out is None or sum(loaded.left_out.values()) == left_out


@pytest.mark.parametrize("kind", ["csv", "parquet", "json", "jsonl"])
def test_rows_of_ones_own_by_their_columns(rbd: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    table = [{"prompt": "What is 1 + 1?", "best": "so 2", "worse": "so 3", "score": "7", "final": ""}]
    path = tmp_path / f"mine.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(table), path)
    elif kind == "csv":
        path.write_text("prompt,best,worse,score,final\nWhat is 1 + 1?,so 2,so 3,7,\n")
    else:
        table[0].pop("final")
        path.write_text(json.dumps(table if kind == "json" else table[0]))
    words = ("pairs", "source=jsonl", f"source.path={path}", "bias=[bandwagon]")
    said = rbd(*words, "source.columns={question: prompt, right: best, wrong: worse}")
    assert said.code == 0, said.err
    (pair,) = [json.loads(line) for line in Path("runs/default/pairs/pairs.jsonl").read_text().splitlines()]
    assert set(pair["plain"]["options"]) == {"so 2", "so 3"}
    said = rbd(*words, "name=strict")
    assert said.code == 1 and "unknown; a row holds question" in said.err and "source.columns" in said.err
    said = rbd(*words, "name=odd", "source.columns.answer=best")
    assert said.code == 2 and "there is no key source.columns.answer" in said.err


def test_rows_that_nobody_can_judge_are_counted(tmp_path: Path) -> None:
    seen = ROWS["scienceqa"] | {"image": {"path": "a.png"}, "question": "what is shown?"}
    loaded = load(tmp_path, [ROWS["scienceqa"] | {"image": None}, seen], format="scienceqa")
    assert len(loaded.questions) == 1 and loaded.left_out == {"scienceqa: needs a picture": 1}
    broken = AB | {"response_A": "half \ud83d", "question": "another"}
    loaded = load(tmp_path, [AB, broken])
    assert loaded.left_out == {"judgebench: half a surrogate pair, which is no text": 1}


def test_a_column_that_no_row_has_is_told(tmp_path: Path) -> None:
    """Else a misspelt split lets curate draw a new one, over the owner's."""
    (tmp_path / "rows.csv").write_text("q,a,split\nWhat?,4,test\n")
    columns = {"question": "q", "right": "a", "split": "Split"}
    with pytest.raises(DataError, match=r"source.columns.split is 'Split', which no row has; it has q, a, split"):
        JsonlSource(path=str(tmp_path / "rows.csv"), columns=columns).load(0)

"""Sets with people's scores: what a row becomes, and what is told of a bad one."""

import json
from pathlib import Path
from typing import Any

import pytest

from rbd_train.errors import DataError
from rbd_train.sources.direct import BiggenSource, FeedbackSource, NewsroomSource, SummEvalSource

DATA = Path(__file__).parents[2] / "shared" / "data" / "direct_assessment"
RUBRIC = {"criteria": "Is it right?"} | {f"score{k}_description": f"level {k}" for k in range(1, 6)}


def saved(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def summary(**values: Any) -> dict[str, Any]:
    scores = {"coherence": 2.5, "consistency": 5, "fluency": 4.0, "relevance": None}
    return {"doc_id": "d", "system_id": "M1", "source": "s", "system_output": "o", "scores": scores} | values


def test_summeval(tmp_path: Path) -> None:
    found = SummEvalSource(path=saved(tmp_path / "s.json", [summary(), summary(system_id="M2")])).load(0).graded
    assert [(g.id, g.human) for g in found[:4]] == [
        ("d-M1-coherence", 2.5), ("d-M1-consistency", 5.0), ("d-M1-fluency", 4.0), ("d-M1-relevance", None),
    ]  # fmt: skip
    assert {g.group for g in found} == {"d"} and len(found) == 8


@pytest.mark.parametrize(
    ("row", "message"),
    [(summary(scores={"coherence": "good"}), "field coherence: 'good' is no score"),
     (summary(scores=3), "field scores"),
     (summary(scores={"coherence": float("nan")}), "nan is no score"), (summary(source=""), "field source: blank")],
)  # fmt: skip
def test_a_bad_summary_is_told(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"s.json, row 1.*{message}"):
        SummEvalSource(path=saved(tmp_path / "s.json", [summary(), row])).load(0)


def test_two_rows_of_one_summary_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="share id"):
        SummEvalSource(path=saved(tmp_path / "s.json", [summary(), summary()])).load(0)


def test_newsroom(tmp_path: Path) -> None:
    text = "### Generated Summary\n\nshort .\n\n### Source Article\n\nThe story."
    value = {
        "instances": [{"id": k, "instance": text, "annotations": {"Fluency": {"mean_human": 3.67}}} for k in (1, 2)]
    }
    found = NewsroomSource(path=saved(tmp_path / "n.json", value), dimensions=["fluency", "coherence"]).load(0).graded
    assert [(g.text, g.document, g.human, g.author) for g in found[:2]] == [
        ("short .", "The story.", 3.67, "system 0"), ("short .", "The story.", None, "system 0"),
    ]  # fmt: skip
    assert len({g.group for g in found}) == 1 and found[2].author == "system 1"
    value["instances"][0]["instance"] = "no headings"
    with pytest.raises(DataError, match=r"instance 0.*headings"):
        NewsroomSource(path=saved(tmp_path / "n.json", value)).load(0)
    with pytest.raises(DataError, match="no JUDGE-BENCH file"):
        NewsroomSource(path=saved(tmp_path / "n.json", [])).load(0)


def test_rubric_sets(tmp_path: Path) -> None:
    row = {"id": "x", "model_name": "m", "input": "q", "response": "r", "reference_answer": "a", "score_rubric": RUBRIC,
           "human_score": 4}  # fmt: skip
    (found,) = BiggenSource(path=saved(tmp_path / "b.json", [row])).load(0).graded
    assert (found.human, found.reference, found.levels[0], found.author) == (4.0, "a", "level 1", "m")
    row = {f"orig_{k}": v for k, v in {"instruction": "q", "response": "r", "score": "3", **RUBRIC}.items()}
    (found,) = FeedbackSource(path=saved(tmp_path / "f.json", [row])).load(0).graded
    assert (found.human, found.reference, found.criteria) == (3.0, None, "Is it right?")
    with pytest.raises(DataError, match=r"f.json, row 0, field orig_score3_description: missing"):
        FeedbackSource(path=saved(tmp_path / "f.json", [{k: v for k, v in row.items() if "score3" not in k}])).load(0)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs shared/data/direct_assessment")
def test_the_real_files() -> None:
    found = SummEvalSource(path=str(DATA / "summeval_dev.json")).load(0).graded
    assert len(found) == 96 * 4 and len({g.group for g in found}) == 6
    news = NewsroomSource(path=str(DATA / "newsroom.json")).load(0).graded
    assert len(news) == 210 * 4 and len({g.group for g in news}) == 30 and all(g.human is not None for g in news)

"""The contrastive judge: pairs by expected score, ties explicit, through the stages that any judge goes through."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbd_train.contrast import Setting, contrastive_scores
from rbd_train.contrastive_judge import ContrastiveJudge
from rbd_train.engine import Engine
from rbd_train.engines.function import FunctionBackend
from rbd_train.engines.local import LocalEngine
from rbd_train.errors import UsageError
from rbd_train.judge import Shown
from rbd_train.ledger import Ledger
from rbd_train.records import Graded, Item
from tests.conftest import rows


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return LocalEngine(model="tiny", dtype="float32").open(Ledger(tmp_path / "l.sqlite"))


def judge_of(engine: Engine, **values: Any) -> ContrastiveJudge:
    given = {"name": "j", "span": "1-5", "setting": Setting(strength=0.5), "dimension": "quality", "tie_within": 0.0}
    assistant = LocalEngine(model="tiny", dtype="float32").open(engine.ledger)
    return ContrastiveJudge(engine, assistant, **(given | values))


def item(*options: str, **values: Any) -> Item:
    return Item(id="i", group="g", question="What is 2 + 2?", options=options, **values)


def test_the_higher_expected_score_wins_in_any_order(engine: Engine) -> None:
    judge = judge_of(engine)
    (first,) = judge.judge([Shown(item("4", "It is five, I am sure.", "no idea"), (0, 1, 2))])
    (turned,) = judge.judge([Shown(item("4", "It is five, I am sure.", "no idea"), (2, 0, 1))])
    scores = json.loads(first.reply)["expected"]
    assert first.outcome.choice == turned.outcome.choice == scores.index(max(scores))
    graded = [Graded(id=str(k), group="g", document="What is 2 + 2?", text=t, dimension="quality")
              for k, t in enumerate(("4", "It is five, I am sure.", "no idea"))]  # fmt: skip
    with pytest.warns(UserWarning, match="not smaller"):
        given = contrastive_scores(engine, engine, graded, ["1-5"], Setting(strength=0.5))
    assert scores == pytest.approx([one.expected for one in given])
    assert judge.engine.calls["asked"] == 3  # the assistant is the same model here: the ledger has its answers


def test_ties_are_explicit(engine: Engine) -> None:
    (same,) = judge_of(engine).judge([Shown(item("4", "4"), (0, 1))])
    assert same.outcome.kind == "tie"
    (near,) = judge_of(engine, tie_within=4.0).judge([Shown(item("4", "It is five."), (0, 1))])
    assert near.outcome.kind == "tie"


def test_feedback_reaches_both_models(engine: Engine) -> None:
    judge, view = judge_of(engine), Shown(item("4", "It is five."), (0, 1))
    before = judge.judge([view])
    (plain,), (told,) = judge.rejudge([view], before, [None]), judge.rejudge([view], before, ["It is long."])
    assert plain == before[0] and told.reply != plain.reply and told.fingerprint == plain.fingerprint
    assert judge.rejudge([], [], []) == []


def test_a_model_without_log_probabilities_is_unreadable(tmp_path: Path) -> None:
    engine = Engine(FunctionBackend(lambda messages: "4", "f"), Ledger(tmp_path / "f.sqlite"))
    judge = ContrastiveJudge(engine, engine, "j", "1-5", Setting(), "quality", 0.0)
    (said,) = judge.judge([Shown(item("4", "5"), (0, 1))])
    assert said.outcome.kind == "unreadable" and "no log-probabilities" in str(said.outcome.reason)


def test_a_bad_range_is_refused_before_any_call(engine: Engine) -> None:
    with pytest.raises(UsageError, match="fewer than two scores"):
        judge_of(engine, span="5-5")


def test_it_is_a_judge_for_the_stages(rbd: Callable[..., Any]) -> None:
    words = ("judge=contrastive", "judge.engine.model=tiny", "judge.assistant.model=tiny", "judge.engine.dtype=float32",
             "judge.assistant.dtype=float32")  # fmt: skip
    assert rbd("pairs", "source.train=2", "source.test=3", "bias=[verbosity,bandwagon]").code == 0
    said = rbd("judgements", *words)
    assert said.code == 0, said.err
    records = rows(Path("runs/default/judgements/records.jsonl"))
    assert records and all(r["biased"]["outcome"]["kind"] in ("choice", "tie") for r in records)
    assert rbd("traces", "teacher=template").code == rbd("curate").code == 0
    loop = rbd("debias", *words, "detector=rules")
    assert loop.code == 0, loop.err
    assert "contrast of two models (paper, lambda 0.5, t 1)" in loop.out
    assert any(len(r["rounds"]) > 1 for r in rows(Path("runs/default/debias/revisions.jsonl")))
    assert rbd("report").code == 0
    page = Path("runs/default/report/index.html").read_text()
    assert "contrastive judge" in page and "The judge, before and after" in page
    assert rbd("judgements", *words, "judge.mode=other", "overwrite=true").code == 2

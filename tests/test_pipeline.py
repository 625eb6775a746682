"""The whole job through the real command, on the tiny model: every stage to a report, and again for nothing."""

import csv
import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

JUDGE = ("judge=embedded_leaning", "judge.engine.model=tiny", "judge.engine.dtype=float32")
TRAIN = ("model=tiny", "trainer.max_steps=2", "trainer.micro_batch=8")
STAGES: dict[str, tuple[str, ...]] = {
    "pairs": ("source.train=6", "source.test=4", "congruent_share=0.3333"),
    "judgements": (*JUDGE, "sham=true"),
    "traces": ("teacher=template",),
    "curate": (),
    "sft": TRAIN,
    "detection": ("detector.max_new_tokens=8",),
    "debias": (*JUDGE, "detector.max_new_tokens=8", "max_rounds=1", "rivals=true"),
    "report": ("title='<script>alert(1)</script>'",),
}


class Links(HTMLParser):
    """Collect what a page would load, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        self.loaded += ["script"] if tag == "script" else []


def test_every_stage_to_a_report_and_again(rbd: Callable[..., Any]) -> None:
    for stage, words in STAGES.items():
        said = rbd(stage, *words)
        assert said.code == 0, f"{stage}: {said.err}"
    report = Path("runs/default/report")
    summary = json.loads((report / "summary.json").read_text())
    for name in ("detection.f1", "detection.best_rule_f1", "debias.accuracy_before", "debias.accuracy_after",
                 "debias.repaired", "debias.broken", "seconds", "calls"):  # fmt: skip
        assert set(summary[name]) == {"value", "n", "low", "high"}, name
    text = (report / "index.html").read_text()
    links = Links()
    links.feed(text)
    assert all(link.startswith("data:") for link in links.loaded), links.loaded
    assert "&lt;script&gt;" in text and "planted leaning" in text and "it is no model" in text
    for table in (
        "judgements",
        "judgements_unplanted",
        "curate",
        "sft",
        "detection",
        "debias",
        "debias_changes",
        "debias_rivals",
    ):
        assert (report / "tables" / f"{table}.md").is_file() and (report / "tables" / f"{table}.csv").is_file()
    for figure in ("accuracy", "detection"):
        assert (report / "figures" / f"{figure}.svg").is_file() and (report / "figures" / f"{figure}.png").is_file()
    shutil.copytree("runs/default", "runs/again")
    said = rbd("report", "name=spread", "from=default", "runs=[default,again]")
    assert said.code == 0, said.err
    assert "Spread over the runs" in Path("runs/spread/report/index.html").read_text()
    spread = list(csv.reader(Path("runs/spread/report/tables/spread.csv").read_text().splitlines()))
    (seconds,) = [row for row in spread if row[0].startswith("seconds")]
    assert seconds[1] == seconds[5] == seconds[9] and float(seconds[-1]) == 0, seconds
    before = {path: path.read_bytes() for path in Path("runs").rglob("*.jsonl")}
    for stage, words in STAGES.items():
        said = rbd(stage, *words)
        assert said.code == 0, f"{stage}: {said.err}"
        assert stage == "report" or "complete already" in said.out, f"{stage}: {said.out}"
    assert before == {path: path.read_bytes() for path in Path("runs").rglob("*.jsonl")}

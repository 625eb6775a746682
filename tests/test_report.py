"""The report as a browser shows it: offline, filtered without scripts, escaped, within its limits."""

import importlib.util
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval import cases
from eval.discovery_layouts import size_in
from eval.doubts import doubts
from eval.figures import accuracy_figure, scaling_figure
from eval.layouts import LAYOUTS, Told
from eval.report import SECTIONS, measured_model
from rbd_train.app import STAGES
from rbd_train.manifest import machine
from rbd_train.metrics import Rate
from rbd_train.run import Run, Table
from rbd_train.tables import latex

ROOT = Path(__file__).parents[1]
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
COUNT = """<script>
const dark = matchMedia('(prefers-color-scheme: dark)').matches;
const operable = [...document.querySelectorAll('summary, #cases input, .wide')].filter(e => e.checkVisibility());
const unreached = operable.filter(e => { e.focus(); return document.activeElement !== e; }).length;
const paint = getComputedStyle(document.body);
const count = () => [...document.querySelectorAll('details.case')].filter(e => e.getClientRects().length).length;
const found = {all: count(), operable: operable.length, unreached: unreached, dark: dark};
Object.assign(found, {ink: paint.color, paper: paint.backgroundColor});
found.overflow = document.documentElement.scrollWidth > innerWidth;
for (const input of document.querySelectorAll('#cases input')) { input.click(); found[input.id] = count();
  document.getElementById(input.name && 'f-' + input.name + '-all').click(); }
document.body.setAttribute('data-found', JSON.stringify(found));
</script></body>"""


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("report_size", ROOT / "benchmarks" / "report_size.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(rbd: Callable[..., Any], tmp_path: Path) -> Path:
    benchmark().make_run(tmp_path / "runs", 60)
    said = rbd("report", "name=big")
    assert said.code == 0, said.err
    return tmp_path / "runs" / "big" / "report" / "index.html"


def test_it_loads_nothing_and_runs_no_script(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text and "default-src 'none'" in text and "What is i0? &lt;b&gt;" in text
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    assert "no stage judgements;" in text  # what is missing is said


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
@pytest.mark.parametrize(
    ("size", "words"), [("1300,900", ["--blink-settings=preferredColorScheme=0"]), ("390,800", [])]
)
def test_a_real_browser_filters_by_style_alone(page: Path, size: str, words: list[str]) -> None:
    """Wide and dark, narrow and light; whatever can be operated takes the keyboard's focus."""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text()).replace("</body>", COUNT)
    copy = page.with_name("probed.html")
    copy.write_text(text)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "--dump-dom",
               f"--user-data-dir={page.parent / 'profile'}", *words, copy.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, done.stderr[-500:]
    found = json.loads(match[1].replace("&quot;", '"'))
    assert found["all"] == found["f-kind-all"] == 60 and not found["overflow"]
    assert [found[f"f-kind-{k}"] for k in range(5)] == [10, 10, 30, 10, 0]
    assert (found["f-said-0"], found["f-said-1"], found["f-said-2"]) == (20, 40, 0)
    assert found["unreached"] == 0 < found["operable"] and found["dark"] == bool(words)
    light, dark = ("rgb(17, 24, 39)", "rgb(255, 255, 255)"), ("rgb(229, 231, 235)", "rgb(15, 23, 42)")
    assert (found["ink"], found["paper"]) == (dark if words else light)


class Form(HTMLParser):
    """Read what a keyboard and a screen reader meet: inputs with their labels and groups, rows with their heads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.inputs: list[tuple[str, str, bool, bool]] = []  # type, name, in a label, in a fieldset
        self.focus: list[str] = []  # tabindex given by hand
        self.rows = self.heads = 0
        self.summaries = self.details = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag == "input":
            place = "label" in self.open, "fieldset" in self.open
            self.inputs.append((str(told["type"]), str(told["name"]), *place))
        self.focus += [str(told["tabindex"])] if "tabindex" in told else []
        self.rows += tag == "tr" and "tbody" in self.open
        self.heads += tag == "th" and told.get("scope") == "row"
        self.summaries += tag == "summary" and self.open[-1] == "details"
        self.details += tag == "details"
        if tag not in ("input", "meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass


def test_the_markup_serves_keyboard_and_reader(rbd: Callable[..., Any], page: Path) -> None:
    """No browser needed: native radios with labels in groups, details with a summary, a head for every row."""
    assert rbd("report", "name=big", "layout=rbd_scaling").code == 0  # a table of its own, beside the page's
    form = Form()
    form.feed(page.read_text())
    assert {name for _, name, *_ in form.inputs} == {"kind", "bias", "said"} and len(form.inputs) == 6 + 2 + 4
    assert all(kind == "radio" and labelled and grouped for kind, _, labelled, grouped in form.inputs)
    assert set(form.focus) == {"0"}, "an order of its own would leave the page's"
    assert form.rows == form.heads == 1 + 2 and form.summaries == form.details > 60


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_both_themes_have_contrast(page: Path) -> None:
    """WCAG AA for every colour of text on both grounds."""
    themes = re.findall(r":root \{[^}]*\}", page.read_text())
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})[; ]", theme))
        for ink in ("ink", "soft", "good", "bad"):
            for ground in ("paper", "panel"):
                low, high = sorted(luminance(colours[name]) for name in (ink, ground))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (theme[:40], ink, ground)


def test_what_has_no_room_goes_to_a_file(
    rbd: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flips first, then the sample; nothing is lost."""
    monkeypatch.setattr(cases, "MOST_CASES", 25)
    monkeypatch.setattr(cases, "SAMPLE", 3)
    benchmark().make_run(tmp_path / "runs", 60)
    assert rbd("report", "name=big").code == 0
    folder = tmp_path / "runs" / "big" / "report"
    rest = [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]
    shown = re.findall(r'<details class="case k\d b\d s\d"><summary>(\w+)', (folder / "index.html").read_text())
    assert len(shown) == 23 and len(rest) == 37 and not {row["kind"] for row in rest} & set(cases.FLIPS)
    assert sorted(shown)[:10] == ["Broken"] * 10


def test_what_cannot_be_read_is_a_kind_of_its_own(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """A reply that names no label is neither broken nor still wrong here, and is shown as it is."""
    benchmark().make_run(tmp_path / "runs", 12)
    path = tmp_path / "runs" / "big" / "debias" / "revisions.jsonl"
    revisions = [json.loads(line) for line in path.read_text().splitlines()]
    for k, place in ((2, -1), (3, 0)):  # right, then unreadable; unreadable from the start
        revisions[k]["rounds"][place]["judgements"][-1] |= {
            "outcome": {"kind": "unreadable", "reason": "no label"}, "reply": "Hm <b>so</b>",
        }  # fmt: skip
    revisions[3]["rounds"][0]["trace"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in revisions))
    assert rbd("report", "name=big").code == 0
    text = (tmp_path / "runs/big/report/index.html").read_text()
    shown = re.findall(r'<details class="case (k\d) b\d s\d"><summary>([^:]+):', text)
    assert shown.count(("k4", "Unreadable")) == 2 and shown.count(("k1", "Broken")) == 1, shown
    assert text.count("which can't be read</summary><pre>Hm &lt;b&gt;so&lt;/b&gt;</pre>") == 2


def test_the_limit_counts_what_stands_on_the_page(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """Signs grow to five times their length when they are escaped."""
    benchmark().make_run(tmp_path / "runs", 6)
    folder = tmp_path / "runs" / "big" / "debias"
    for file in ("records.jsonl", "revisions.jsonl"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace("why ", "<&'<").replace("It is longer. ", "<<<<<<&&&&&&&'"))
    assert rbd("report", "name=big").code == 0
    page = (tmp_path / "runs/big/report/index.html").read_text()
    blocks = re.findall(r'<details class="case.*?(?=<details class="case|</section>)', page, re.DOTALL)
    counted = cases.browse(folder / "records.jsonl", folder / "revisions.jsonl", tmp_path / "rest", 0)
    real = sum(len(block.encode()) for block in blocks)
    assert len(blocks) == 6 and real <= sum(map(cases.page_bytes, counted)) < 1.3 * real


def test_a_stage_that_came_since_is_on_the_page(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """And what an older page had and this one hasn't is gone from tables and figures."""
    benchmark().make_run(tmp_path / "runs", 6)
    folder = tmp_path / "runs" / "big"
    (folder / "detection").rename(tmp_path / "later")
    assert rbd("report", "name=big", "layout=rbd_scaling").code == 0
    page = folder / "report" / "index.html"
    assert 'id="s-detection"' not in page.read_text() and (folder / "report/tables/rbd_scaling.md").is_file()
    (tmp_path / "later").rename(folder / "detection")
    said = rbd("report", "name=big")
    assert said.code == 0 and 'id="s-detection"' in page.read_text(), said.out + said.err
    assert not (folder / "report/tables/rbd_scaling.md").exists()


def test_inputs_of_any_name_are_found(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """`records=mine.jsonl`, `examples=.../train.jsonl`: a stage says what it read, no name is guessed at."""
    judge = ("judge=planted", "judge.right=0.9", "judge.biased.verbosity=0.5", "detector=rules")
    for stage, *words in (
        ("pairs", "source.train=2", "source.test=8"), ("judgements", *judge[:3]), ("traces", "teacher=template"),
        ("curate",),
    ):  # fmt: skip
        assert rbd(stage, *words).code == 0
    shutil.copy("runs/default/judgements/records.jsonl", "mine.jsonl")
    Path("held").mkdir()
    shutil.copy("runs/default/curate/test.jsonl", "held/train.jsonl")
    shutil.copytree("runs/default", "runs/other")
    for name in ("default", "other"):
        for stage, *words in (("detection", judge[3], "examples=held/train.jsonl", "also=[default]"),
                              ("debias", *judge, "records=mine.jsonl")):  # fmt: skip
            said = rbd(stage, f"name={name}", *words)
            assert said.code == 0, said.err
    said = rbd("report", "runs=[default,other]")
    assert said.code == 0, said.err
    rows = (tmp_path / "runs/default/report/tables/runs_tests.csv").read_text().splitlines()[1:]
    assert len(rows) == 2 and not any("stage missing" in row for row in rows)
    held = len(Path("held/train.jsonl").read_text().splitlines())
    assert rows[1].startswith(f"detection: right verdict,other,{held},")
    assert "Single cases" in (tmp_path / "runs/default/report/index.html").read_text()
    manifest = Path("runs/default/debias/manifest.json")
    known = json.loads(manifest.read_text())
    del known["facts"]["records"]  # as older versions left it
    manifest.write_text(json.dumps(known))
    said = rbd("report")
    assert said.code == 1 and "no fact records" in said.err and "rbd debias name=default overwrite=true" in said.err


def test_what_is_taken_from_another_run_is_not_missing(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """What is unfinished is told of both runs, what is absent only where neither has it."""
    benchmark().make_run(tmp_path / "runs", 6)
    for name, stage, status in (("big", "sft", "incomplete"), ("new", "traces", "failed")):
        folder = tmp_path / "runs" / name / stage
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"status": status, "reason": "it stopped"}))
    assert rbd("report", "name=new", "from=big").code == 0
    text = (tmp_path / "runs/new/report/index.html").read_text()
    assert "new, big: no stage judgements; " in text and "no stage judgements," not in text
    assert "big: stage sft is incomplete: it stopped" in text and "new: stage traces is failed: it stopped" in text


def test_a_judge_that_nobody_can_read_is_in_the_box(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """And the page says in what environment each stage ran."""
    judge = ("judge=generative", "engine=scripted", 'engine.rules=[{pattern: "", reply: "Hm."}]')
    for stage, *words in (("pairs", "limit=2"), ("judgements", *judge),
                          ("judging", *judge, "pairs=runs/default/pairs/pairs.jsonl"), ("report",)):  # fmt: skip
        said = rbd(stage, *words)
        assert said.code == 0, said.err
    text = (tmp_path / "runs/default/report/index.html").read_text()
    assert "judging: no reply can be read" in text and "judgements: no reply can be read" in text
    shutil.copytree("runs/default", "runs/other")
    assert rbd("report", "name=both", "from=default", "runs=[default,other]").code == 0
    both = (tmp_path / "runs/both/report/index.html").read_text()
    assert "other: judging: no reply can be read" in both, "the box speaks of every run on the page"
    assert (
        f"python {platform.python_version()}, torch " in text and f"{platform.system()} {platform.machine()}, " in text
    )
    assert platform.node() not in json.dumps(machine())
    half = Table(name="debias", title="t", columns=("bias", "coverage"), rows=(("verbosity", 0.0), ("position", 0.5)))
    assert doubts(Told({}, {"debias": half}, {})) == [
        "debias: no reply of verbosity can be read; every figure there is of unreadable ones"
    ]
    gone = half.model_copy(update={"rows": (("all", Rate(value=0.0, n=3)), ("verbosity", None))})
    assert doubts(Told({}, {"debias": gone}, {}))[0].startswith("debias: no reply can be read")


def test_every_stage_has_its_place_on_the_page() -> None:
    assert set(SECTIONS) == set(STAGES) - {"report"}


def test_a_detectors_size_is_that_of_the_model_it_was_trained_from(tmp_path: Path) -> None:
    """Not what the run's name looks like, and through every training between; the rules have none."""
    for stage, path in (("sft", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"), ("distil", "runs/paper/sft/model")):
        folder = tmp_path / "paper" / stage
        folder.mkdir(parents=True)
        manifest = {"status": "complete", "config": {"model": {"path": path}}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    run = Run(tmp_path, "paper-r1_qwen_7b-gpt", "report", "paper-r1_qwen_7b-gpt", {})

    def size(detector: dict[str, Any]) -> str:
        return size_in(measured_model(run, {"debias": {"config": {"detector": detector}}}))

    assert size({"engine": {"model": "runs/paper/sft/model"}}) == size({"model": "runs/paper/distil/model"}) == "1.5B"
    assert size({"engine": {"model": "org/Some-Llama-8B-it"}}) == "8B"
    assert size({"_target_": "eval.baselines.RulesConfig"}) == size_in(measured_model(run, {})) == "–"


def rate(value: float) -> Rate:
    return Rate(value=value, n=10, low=value - 0.1, high=value + 0.1)


def told(judge: str, model: str, gain: float) -> Told:
    detection = Table(
        name="detection",
        title="Detection",
        columns=("method", "cases", "macro F1"),
        rows=(("teacher: t", 9, rate(0.7)),),
    )
    summary = {
        "debias.accuracy_before": rate(0.5), "debias.accuracy_after": rate(0.5 + gain),
        "debias.accuracy_before.verbosity": rate(0.4), "debias.accuracy_after.verbosity": rate(0.4 + gain),
        "debias.accuracy_before_pooled": rate(0.45), "debias.method.the loop": rate(0.45 + gain),
        "debias.method.warning": rate(0.5), "detection.f1": rate(0.6), "detection.best_rule_f1": rate(0.55),
        "detection.f1.verbosity": rate(0.65), "detection.rule_f1.verbosity": rate(0.95),
    }  # fmt: skip
    manifests = {"debias": {"facts": {"judge": judge}}}
    return Told(summary, {"detection": detection}, manifests, model)


def laid_out(layout: str) -> tuple[Table, list[dict[str, Any]]]:
    runs = {"a": told("gpt-4o", "org/Qwen-1.5B", 0.1), "b": told("haiku", "org/Qwen-14B", 0.2)}
    (table,) = LAYOUTS[layout](runs)
    return table, [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_layouts_hold_ours_beside_the_published() -> None:
    _, scaling = laid_out("rbd_scaling")
    assert [(row["size"], row["published F1"], row["published gain"]) for row in scaling] == [
        ("1.5B", 0.72, 0.123), ("14B", 0.83, 0.198),
    ]  # fmt: skip
    assert [round(row["gain in accuracy"], 6) for row in scaling] == [0.1, 0.2] and scaling[0]["macro F1"].value == 0.6
    _, joint = laid_out("rbd_joint")
    assert [row["run"] for row in joint] == ["a", "b"] and joint[0]["F1 verbosity"].value == 0.65
    _, rows = laid_out("rbd_baselines")
    loop, warned = (next(r for r in rows if r["run"] == "b" and r["method"] == m) for m in ("the loop", "warning"))
    assert round(loop["gain in accuracy"], 6) == 0.2 and loop["published"] == 0.185
    assert loop["trust in the published"].startswith("high") and warned["published"] is None
    assert round(warned["gain in accuracy"], 6) == 0.05 and round(warned["the loop is ahead by"], 6) == 0.15
    assert [r["value"].value for r in rows if r["what"] == "detector (F1 verbosity)" and r["run"] == "a"] == [
        0.95,
        0.65,
    ]
    published = {(r["what"], r["method"]): r for r in rows if r["run"] == "published"}
    for key, value, trust in (
        (("judge (gain)", "zero-shot prompt"), 0.032, "low"), (("judge (gain)", "fine-tuned judges"), 0.013, "low"),
        (("judge (gain)", "4-shot prompt with reasoning"), 0.057, "low"),
        (("judge (gain)", "DeepSeek-R1, zero-shot"), 0.086, "low"),
        (("judge (the loop is ahead by)", "prompting"), 0.128, "high"),
        (("detector (F1 bandwagon)", "DeepSeek-R1"), 0.645, "high"),
        (("detector (accuracy)", "all four rules"), 0.878, "high"),
    ):  # fmt: skip
        row = published[key]
        assert row["published"] == value and row["trust in the published"].startswith(trust), key
        assert row["value"] is None
    assert LAYOUTS["rbd_baselines"]({"empty": Told({}, {}, {})})[0].rows == ()


def test_plots_have_a_panel_for_each_judge() -> None:
    runs = {"a": told("gpt-4o", "org/Qwen-1.5B", 0.1), "b": told("haiku", "org/Qwen-14B", 0.2)}
    drawn = accuracy_figure(runs | {"c": Told({}, {}, {})})
    assert drawn is not None
    text = drawn["svg"].decode()
    assert "<!-- Accuracy on D_bias: gpt-4o (a) -->" in text and "<!-- Accuracy on D_bias: haiku (b) -->" in text
    assert "(c) -->" not in text and scaling_figure(runs) is not None
    assert accuracy_figure({"c": Told({}, {}, {})}) is None


def test_latex_escapes() -> None:
    table = Table(
        name="t",
        title="50% & more",
        columns=("a_b", "c"),
        rows=(("x^2 {~}", Rate(value=0.5, n=2, low=0.1, high=0.9)), ("\\", None)),
    )
    text = latex(table)
    assert r"\caption{50\% \& more.}" in text and r"a\_b & c \\" in text
    assert r"x\textasciicircum{}2 \{\textasciitilde{}\} & 0.500 [0.100, 0.900] \\" in text
    assert r"\textbackslash{} & -- \\" in text

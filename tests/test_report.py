"""The report as a browser shows it: offline, filtered without scripts, escaped, within its limits."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import cases
from rbd_train.metrics import Rate
from rbd_train.run import Table
from rbd_train.tables import latex

ROOT = Path(__file__).parents[1]
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
COUNT = """<script>
const count = () => [...document.querySelectorAll('details.case')].filter(e => e.getClientRects().length).length;
const found = {all: count(), overflow: document.documentElement.scrollWidth > innerWidth};
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
    assert "no stage judgements, detection" in text  # what is missing is said


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
@pytest.mark.parametrize("size", ["1300,900", "390,800"])
def test_a_real_browser_filters_by_style_alone(page: Path, size: str) -> None:
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text()).replace("</body>", COUNT)
    copy = page.with_name("probed.html")
    copy.write_text(text)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "--dump-dom",
               f"--user-data-dir={page.parent / 'profile'}", copy.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, done.stderr[-500:]
    found = json.loads(match[1].replace("&quot;", '"'))
    assert found["all"] == found["f-kind-all"] == 60 and not found["overflow"]
    assert [found[f"f-kind-{k}"] for k in range(4)] == [10, 10, 30, 10]
    assert (found["f-said-0"], found["f-said-1"], found["f-said-2"]) == (20, 40, 0)


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

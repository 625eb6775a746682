"""Stages relative and contrast through the real command: tables, choosing, resuming, several processes, bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbd_train.records import ScoreRow
from rbd_train.store import read_rows
from tests.conftest import rows

TINY = ("engine@main=local", "main.model=tiny", "main.dtype=float32",
        "engine@assistant=local", "assistant.dtype=float32")  # fmt: skip


def write_texts(path: Path, documents: int = 6, texts: int = 4, human: bool = True) -> Path:
    lines = [
        {"document": f"The story of number {d}, as told in {d} lines.", "text": f"Number {d}. " * (t + 1),
         "dimension": "coherence", "group": f"d{d}", "id": f"{d}-{t}", **({"human": 1.0 + t} if human else {})}
        for d in range(documents) for t in range(texts)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl")


@pytest.fixture(scope="module")
def relative(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A smaller relative of the tiny model: one made with three layers would have none, so its first layer alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rbd_train.modelling import resolve_model
    from rbd_train.relative import without_layers

    folder = tmp_path_factory.mktemp("relative")
    model = without_layers(AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32), [0])
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    return str(folder)


def contrast(rbd: Callable[..., Any], texts: Path, relative: str, *words: str) -> Any:
    return rbd("contrast", "source=graded", f"source.path={texts}", *TINY, f"assistant.model={relative}", *words)


def tables(name: str = "default") -> dict[str, Any]:
    return {t["name"]: t for t in json.loads(Path(f"runs/{name}/contrast/tables.json").read_text())}


def test_the_stage_scores_once_and_decides_by_arithmetic(
    rbd: Callable[..., Any], texts: Path, relative: str
) -> None:  # fmt: skip
    said = contrast(rbd, texts, relative, "+published.greedy_spearman=0.334", "+published.spearman=0.352")
    assert said.code == 0, said.err
    found = tables()
    assert set(found) == {
        "contrast", "contrast_pooled", "contrast_published", "contrast_ranges", "contrast_stability",
        "contrast_histogram", "contrast_curve", "contrast_grid", "contrast_rows", "contrast_cost",
    }  # fmt: skip
    scores = read_rows(Path("runs/default/contrast/scores.jsonl"), ScoreRow)
    assert len(scores) == (24 + 3) * 5 and all(row.fault is None for row in scores)
    grid = [row[1:] for row in found["contrast_grid"]["rows"]]
    assert len(grid) == 4 and len(grid[0]) == 6
    assert all(
        "paper, lambda 0.5, t 1, fixed a priori" in table["title"]
        for name, table in found.items() if name not in ("contrast_curve", "contrast_grid")
    )  # fmt: skip
    assert "paper, t 1, exp" in found["contrast_curve"]["title"] and "paper, exp" in found["contrast_grid"]["title"]
    main, added, _ = found["contrast_cost"]["rows"]
    parameters, weights, cached = main[5:8]
    assert weights * 2**20 == pytest.approx(parameters * 4e6)  # float32
    assert cached == pytest.approx(2 * added[7]) and cached * 2**20 == pytest.approx(1000 * 2 * 2 * 16 * 4)
    assert [row[0] for row in found["contrast_pooled"]["rows"]] == [row[0] for row in found["contrast"]["rows"]]
    by_method = {row[0]: row for row in found["contrast"]["rows"]}
    greedy = by_method["main, greedy token"]
    assert greedy[2]["value"] is None and greedy[4] == "0 of 30"  # no random model names a score: undefined, not 0
    assert by_method["contrast, expected"][2]["n"] == 6
    summary = json.loads(Path("runs/default/contrast/metrics.json").read_text())
    assert summary["contrast.spearman.contrast_paper"]["value"] == by_method["contrast, expected"][2]["value"]
    assert rbd("report", "layout=contrast_ranges").code == 0
    laid = {p.stem: p.read_text() for p in Path("runs/default/report/tables").glob("*_of_runs.md")}
    assert set(laid) == {f"contrast_{part}_of_runs" for part in ("ranges", "grid", "published")}
    assert (
        all("| default | paper, " in text for text in laid.values()) and "0.334" in laid["contrast_published_of_runs"]
    )
    for name, words in (("curve", "paper, t 1"), ("ranges", "paper, lambda 0.5"), ("histogram", "paper, lambda 0.5")):
        assert words in Path(f"runs/default/report/figures/contrast_{name}.svg").read_text()
    again = contrast(rbd, texts, relative, "choose=cross", "per_range=true", "overwrite=true")
    assert again.code == 0, again.err
    manifest = json.loads(Path("runs/default/contrast/manifest.json").read_text())
    assert manifest["facts"]["main calls"]["asked"] == manifest["facts"]["assistant calls"]["asked"] == 0
    assert len(tables()["contrast_chosen"]["rows"]) == 5 * 5
    assert [row[3:5] for row in tables()["contrast_cost"]["rows"][:2]] == [[None, None]] * 2, "no call, no seconds"
    report = rbd("report", "overwrite=true")
    assert report.code == 0, report.err
    page = Path("runs/default/report/index.html").read_text()
    assert page.count("data:image/svg+xml") == 3 and "lambda / t" in page
    assert "no stage judgements" not in page


def test_a_development_split_is_not_reported(rbd: Callable[..., Any], texts: Path, relative: str) -> None:
    said = contrast(rbd, texts, relative, "choose=split", "dev_share=0.5", "ranges=[1-5,2-6]", "mode=as_released")
    assert said.code == 0, said.err
    found = tables()
    counts = {row[2]["n"] for row in found["contrast"]["rows"] if row[2]["value"] is not None}
    assert max(counts) == 3  # of six documents; fewer where a document's correlation is undefined
    mode = "as_released, lambda and t chosen on a development split, reported on the rest"
    assert all(mode in t["title"] for n, t in found.items() if n not in ("contrast_curve", "contrast_grid"))
    assert "as_released" in found["contrast_grid"]["title"] and "paper" in found["contrast_curve"]["title"]
    summary = json.loads(Path("runs/default/contrast/metrics.json").read_text())
    assert "contrast.spearman.contrast_as_released" in summary and "contrast.spearman.contrast_paper" not in summary


def test_missing_human_scores_are_counted_and_leave_correlations_undefined(
    rbd: Callable[..., Any], tmp_path: Path, relative: str
) -> None:
    texts = write_texts(tmp_path / "bare.jsonl", documents=2, human=False)
    said = contrast(rbd, texts, relative, "ranges=[1-5]")
    assert said.code == 0, said.err
    found = tables()
    assert found["contrast_rows"]["rows"][0][3] == 8
    assert all(row[2]["value"] is None for row in found["contrast"]["rows"])
    assert json.loads(Path("runs/default/contrast/metrics.json").read_text())["contrast.spearman.main"]["value"] is None


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(["ranges=[]"], 2, "ranges is empty"), (["ranges=[5-5]"], 2, "fewer than two scores"),
     (["ranges=[1.0-5]"], 2, "no range of integers"), (["mode=other"], 2, "mode is 'other'"),
     (["temperature=0"], 2, "temperature is 0"), (["strength=-1"], 2, "strength is -1"),
     (["criteria=here.yaml"], 2, "no text is rated on 'fluency'; the dimensions are coherence"),
     (["choose=best"], 2, "choose fixed, split or cross"), (["source.low=5"], 2, "fewer than two scores"),
     (["source=generated", "~source.path"], 1, "no texts with scores"),
     (["choose=split", "dev_share=0.9", "limit=1"], 1, "leaves none to report")],
)  # fmt: skip
def test_bad_settings_are_told(
    rbd: Callable[..., Any], texts: Path, relative: str, words: list[str], code: int, message: str
) -> None:
    Path("here.yaml").write_text("fluency:\n  criteria: Is it smooth?\n  steps: [Read it aloud.]\n")
    if words[0] == "source=generated":
        said = rbd("contrast", "source=generated", *TINY, f"assistant.model={relative}")
    else:
        said = contrast(rbd, texts, relative, *words)
    assert said.code == code and message in said.err, said.err


@pytest.mark.parametrize(
    ("line", "message"),
    [({"document": "d"}, "field text: missing"),
     ({"document": "d", "text": "t", "human": 9}, "9 is no score from 1 to 5"),
     ({"document": "d", "text": "t", "human": True}, "True is no score"), ({"document": "d", "text": ""}, "blank"),
     ({"document": "d", "text": "t", "score": 1}, "field score: unknown")],
)  # fmt: skip
def test_a_bad_row_names_file_line_and_field(
    rbd: Callable[..., Any], tmp_path: Path, relative: str, line: dict[str, Any], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"document": "d", "text": "t", "human": 3}) + "\n" + json.dumps(line) + "\n")
    said = contrast(rbd, path, relative)
    assert said.code == 1 and f"{path}, line 2" in said.err and message in said.err


@pytest.mark.slow
def test_several_processes_say_what_one_does(rbd: Callable[..., Any], texts: Path, relative: str) -> None:
    assert contrast(rbd, texts, relative, "name=one", "root=one").code == 0
    said = contrast(rbd, texts, relative, "name=two", "root=two", "launch=ddp", "processes=2")
    assert said.code == 0, said.err
    one, two = (rows(Path(f"{name}/{name}/contrast/scores.jsonl")) for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        for who in ("main", "assistant"):
            ours, theirs = ([s["logprob"] for c in r[who]["choices"] for s in c] for r in (a, b))
            assert ours == pytest.approx(theirs, abs=1e-4) and a["item_id"] == b["item_id"]


def test_a_relative_is_made_and_continues_where_it_was_killed(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """Killed after its second checkpoint, it goes on from there and ends with the weights of an undisturbed run."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rbd_train.modelling import resolve_model

    deep = tmp_path / "deep"
    config = AutoConfig.from_pretrained(resolve_model("tiny"), num_hidden_layers=4, layer_types=["full_attention"] * 4)
    AutoModelForCausalLM.from_config(config).save_pretrained(deep)
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(deep)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"What is {k} + {k}?"}) + "\n" for k in range(9)))
    words = ("relative", f"model.path={deep}", "texts=[q.jsonl]", "steps=4", "save_every=2", "learning_rate=1e-2")
    assert rbd(*words, "name=whole").code == 0
    assert AutoConfig.from_pretrained("runs/whole/relative/model").num_hidden_layers == 2
    from transformers import Trainer

    real = Trainer._save_checkpoint

    def killed(self: Any, *args: Any, **values: Any) -> None:
        real(self, *args, **values)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_checkpoint", killed)
        assert rbd(*words, "name=cut").code == 130
    assert not Path("runs/cut/relative/model").exists()
    assert rbd(*words, "name=cut").code == 0
    one, two = (load_file(f"runs/{name}/relative/model/model.safetensors") for name in ("whole", "cut"))
    assert all((one[key] - two[key]).abs().max() < 1e-6 for key in one)
    said = rbd("contrast", "source=graded", f"source.path={write_texts(tmp_path / 't.jsonl', 2)}", "engine@main=local",
               f"main.model={deep}", "from=cut", "ranges=[1-5]", "main.dtype=float32")  # fmt: skip
    assert said.code == 0, said.err  # stage contrast finds the relative by itself


def test_layers_must_be_fewer(rbd: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "q"}\n')
    for layers in ("1", "2", "9"):
        said = rbd("relative", "model=tiny", "texts=[q.jsonl]", f"layers={layers}")
        assert said.code == 2 and "fewer than the model's 2" in said.err
    assert "texts is empty" in rbd("relative", "model=tiny").err


def test_an_experiment_wins_over_the_stage(rbd: Callable[..., Any]) -> None:
    said = rbd("contrast", "experiment=contrast_qwen_14b_7b", "--cfg", "job")
    assert said.code == 0, said.err
    assert "choose: split" in said.out and "per_range: true" in said.out and "1-10" not in said.out
    assert "model: Qwen/Qwen2.5-14B-Instruct" in said.out and "model: Qwen/Qwen2.5-7B-Instruct" in said.out

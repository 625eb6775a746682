"""The `rbd` command as a person types it: what it says, its exit codes (0 ok, 1 failed, 2 usage), what it leaves."""

import dataclasses
import functools
import json
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

from rbd_train.app import STAGES, BaseConfig, load_stage
from rbd_train.config import build, compose, data_dir, field_help
from rbd_train.errors import UsageError
from rbd_train.previous import note_written, set_aside
from tests.examples import example  # type: ignore[import-not-found]

CONF = data_dir("conf")
KEY = "sk-test-0001"
PAIRS = ("pairs", "source=jsonl", "source.path=q.jsonl")
JUDGE = ("judgements", "judge=generative", "judge.engine.model=m")
SCRIPTED = ("judgements", "judge=generative", "engine=scripted", 'engine.rules=[{pattern: "", reply: "Output (a)"}]')


@pytest.fixture(autouse=True)
def _questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay two questions into the folder where the command runs; no key is set."""
    rows_ = [
        {"question": f"What is {k} + {k}?", "right": f"{k}+{k}\n{2 * k}", "wrong": f"{k}+{k}\n{3 * k}"} for k in (1, 2)
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)


def manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def left_in(root: Path) -> list[str]:
    """List the records and temporary files below a folder: what a failed command must not leave."""
    return [str(p) for p in root.rglob("*") if p.is_file() and p.name != ".lock"
            and (p.suffix == ".jsonl" or p.name.startswith("."))]  # fmt: skip


# what it tells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_alone_it_lists_every_stage_with_a_line(rbd: Any, words: tuple[str, ...]) -> None:
    said = rbd(*words)
    assert said.code == 0 and not said.err
    for stage in STAGES:
        assert re.search(rf"^  {stage}\s+[A-Z].*\.$", said.out, re.MULTILINE), stage


@pytest.mark.parametrize("stage", STAGES)
def test_help_describes_every_key(rbd: Any, stage: str) -> None:
    said = rbd(stage, "--help")
    assert said.code == 0, said.err
    assert f"rbd {stage}" in said.out
    keys = set(OmegaConf.load(CONF / f"{stage}.yaml")) | set(OmegaConf.load(CONF / "base.yaml"))
    for key in keys - {"defaults"}:
        assert re.search(rf"^  {key}\b", said.out, re.MULTILINE), key
    config = load_stage(stage).config
    for kind in (config, *(f.type for f in dataclasses.fields(config) if dataclasses.is_dataclass(f.type))):
        told = field_help(BaseConfig) | field_help(kind)  # a comment that the formatter has wrapped is none
        assert not [f.name for f in dataclasses.fields(kind) if not told.get(f.name)]


def test_help_lists_the_keys_of_what_is_chosen(rbd: Any) -> None:
    said = rbd("judgements", "--help", "judge=planted")
    assert "judge.repaired=0.6" in said.out and "judge.engine" not in said.out
    assert "judge.engine.base_url" in rbd("judgements", "judge=generative", "engine=http", "--help").out


# every file of conf/ ------------------------------------------------------------------------------------------------


def slots_of(stage: str) -> list[str]:
    entries = OmegaConf.to_container(OmegaConf.load(CONF / f"{stage}.yaml"))["defaults"]  # type: ignore[index,call-overload]
    return [next(iter(entry)).replace("@_global_", "") for entry in entries if isinstance(entry, dict)]


def choices_of(stage: str, slot: str) -> list[str]:
    """List a slot's files; an experiment is for the stages that its first line's command names."""
    files = sorted((CONF / slot.split("@")[0]).glob("*.yaml"))
    if slot == "experiment":
        command = "# (rbd sft|bash) " if stage in ("sft", "plan") else f"# rbd {stage} "
        files = [path for path in files if re.match(command, path.read_text(encoding="utf-8"))]
    return [path.stem for path in files]


def combinations() -> list[tuple[str, tuple[str, ...]]]:
    """List every stage, alone and with each choice of each of its slots."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for stage in STAGES:
        found.append((stage, ()))
        for slot in slots_of(stage):
            found += [(stage, (f"{slot}={choice}",)) for choice in choices_of(stage, slot)]
            if slot in ("judge", "teacher", "detector"):
                kind = {"judge": "generative", "teacher": "r1", "detector": "trained"}[slot]
                found += [
                    (stage, (f"{slot}={kind}", f"engine@{slot}.engine={choice}"))
                    for choice in choices_of(stage, "engine")
                ]
    return found


@pytest.mark.parametrize(
    ("stage", "words"), combinations(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_every_choice_composes_and_builds(stage: str, words: tuple[str, ...]) -> None:
    """What has no default is named one by one, and set as the message says (A51)."""
    chosen = load_stage(stage)
    overrides = list(words)
    while True:
        try:
            values = compose(stage, overrides)
            break
        except UsageError as error:
            missing = re.search(r"^(\S+) has no value; set \1=\.\.\.$", str(error))
            assert missing and len(overrides) < 9, error
            overrides.append(f"{missing[1]}=x")
    config = build(chosen.config, {("from_" if key == "from" else key): value for key, value in values.items()})
    assert isinstance(config, BaseConfig) and "???" not in json.dumps(values)
    assert config.name == config.from_ == "default" and config.root == "runs"


def test_no_file_of_conf_is_left_out() -> None:
    tried = {f"{stage}.yaml" for stage in STAGES} | {"base.yaml"}
    for _, words in combinations():
        tried |= {f"{word.split('@')[0].split('=')[0]}/{word.split('=')[1]}.yaml" for word in words}
    assert tried == {str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml")}


# what it refuses ----------------------------------------------------------------------------------------------------

REFUSED = [
    pytest.param(
        ("sft", "trainer.lerning_rate=1e-5"), ["trainer.lerning_rate", "did you mean trainer.learning_rate"], id="B32",
    ),
    ((*PAIRS, "source.lisence=MIT"), ["source.lisence", "did you mean source.licence"]),
    ((*PAIRS, "+source.lisence=MIT"), ["source.lisence", "did you mean source.licence"]),
    (("pairs", "hydra.run.dir=x"), ["hydra.run.dir=x", "rbd runs the stage"]),
    (("pairs", "wandb.mod=offline"), ["wandb.mod", "did you mean wandb.mode"]),
    ((*JUDGE, "judge.engine.modle=x"), ["judge.engine.modle", "did you mean judge.engine.model"]),
    ((*PAIRS, "+congruent_shar=1"), ["congruent_shar", "did you mean congruent_share"]),
    ((*PAIRS, "seed=one"), ["seed", "'one'", "Integer"]),
    ((*PAIRS, "limit=1.5"), ["limit", "1.5", "Integer"]),
    (("sft", "trainer.learning_rate=fast"), ["trainer.learning_rate", "'fast'", "Float"]),
    ((*PAIRS, "overwrite=perhaps"), ["overwrite", "'perhaps'", "bool"]),
    ((*PAIRS, "bias=verbosity"), ["bias", "must be a list"]),
    pytest.param((*PAIRS, "bias=[true,false]"), ["bias must be text", "True (bool)", "quote it"], id="B31-list"),
    ((*PAIRS, "from=12"), ["from must be text", "12 (int)", "quote it"]),
    ((*SCRIPTED[:3], "engine.rules=[{pattern: a, reply: true}]"),
     ["judge.engine.rules.reply must be text", "True (bool)"]),
    pytest.param(("pairs", "source=jsonl"), ["source.path has no value", "set source.path="], id="A51"),
    (JUDGE[:2], ["judge.engine.model has no value"]),
    ((*PAIRS[:1], "source=jsnol"), ["source has no choice 'jsnol'", "did you mean jsonl", "generated, graded, gsm8k"]),
    (("traces", "engine=htpp"), ["engine has no choice 'htpp'", "did you mean http"]),
    (("debias", "engine=http"), ["2 engines", "engine@judge.engine=http", "engine@detector.engine=http"]),
    (("curate", "engine=http"), ["curate has 0 engines"]),
    ((*PAIRS, "name=two words=x"), ["can't parse 'name=two words=x'", "quotes of its own"]),
    ((*PAIRS, "name=O'Brien"), ["can't parse", "name=O'Brien", "quotes of its own"]),
    ((*PAIRS, "name=中文"), ["can't parse", "name=中文"]),
    ((*PAIRS, "bias=[verbosity"), ["can't parse", "bias=[verbosity"]),
    ((*PAIRS, "overwrite"), ["can't parse 'overwrite'", "key=value"]),
    ((*PAIRS, "seed=1,2"), ["seed=1,2", "need -m"]),
    ((*PAIRS, "-x"), ["no option -x"]),
    ((*PAIRS, "--multi-run"), ["no option --multi-run", "-m (sweep)"]),
    (("pair",), ["no stage 'pair'", "pairs"]),
    ((*PAIRS, "bias=[verbosity,beauty]"), ["'beauty'", "known: verbosity"]),
    ((*PAIRS, "wandb.mode=of"), ["wandb.mode", "'of'", "offline"]),
    ((*PAIRS, "launch=zero9"), ["'zero9'", "zero3"]),
    (("curate", "definitions=some"), ["definitions", "'some'", "subset"]),
    (("curate", "test_share=20"), ["test_share is 20"]),
    ((*PAIRS, "source.encoding=utf-9"), ["source.encoding", "'utf-9'"]),
    (("traces", "teacher.definitions=some"), ["'some'", "choose all"]),
    ((*PAIRS, "name=../x"), ["name is '../x'", "no slash"]),
    ((*PAIRS, "name="), ["name is ''"]),
    ((*PAIRS, "trial='../../../x'"), ["trial is '../../../x'", "no slash"]),
    ((*PAIRS, "processes=0"), ["processes is 0"]),
    ((*PAIRS, "processes=2"), ["processes=2 without launch"]),
    ((*PAIRS, "launch=../conf/base"), ["launch has no file '../conf/base'", "zero3"]),
    ((*PAIRS, "seed=-1"), ["seed is -1"]),
    ((*PAIRS, "congruent_share=nan"), ["congruent_share is nan", "finite"]),
    ((*JUDGE, "judge.engine.timeout_s=inf"), ["judge.engine.timeout_s is inf"]),
    *((("sft", "model=tiny", f"trainer.{key}={value}"), [f"trainer.{key} is {value}"])
      for key, value in (("max_steps", 0), ("max_steps", -2), ("eval_share", 1.0), ("eval_every", 0),
                         ("warmup_share", 2.0), ("max_drop_share", -0.1), ("learning_rate", float("nan")))),
    (("sft", "model=tiny", "trainer.scheduler=bogus"), ["trainer.scheduler is 'bogus'", "cosine"]),
    (("dpo", "model=tiny", "trainer.max_steps=0"), ["trainer.max_steps is 0"]),
    (("dpo", "model=tiny", "trainer.reference_batch=0"), ["trainer.reference_batch is 0"]),
    (("distil", "model=tiny", "teacher_path=tiny", "trainer.max_steps=0"), ["trainer.max_steps is 0"]),
    (("pairs", "source.train=-4"), ["source.train is -4"]),
    ((*JUDGE, "noise_samples=-3"), ["noise_samples is -3"]),
    ((*JUDGE, "judge.engine.concurrency=0"), ["engine.concurrency is 0"]),
    ((*JUDGE, "judge.engine.base_url=notaurl"), ["engine.base_url is 'notaurl'", "https://"]),
    ((*PAIRS, "limit=-1"), ["limit is -1"]),
    ((*JUDGE, "judge.engine.api_key_env=sk-test-0001"), ["api_key_env is no variable's name"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_a_fault_of_the_command_is_told_in_a_line(
    rbd: Any, tmp_path: Path, words: tuple[str, ...], told: list[str]
) -> None:
    if words[0] == "traces" and "definitions" in words[-1]:
        assert rbd(*PAIRS).code == rbd(*SCRIPTED).code == 0
        words = (*words, "from=default", "name=other")
    said = rbd(*words)
    assert said.code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    assert all(part in said.err for part in told), said.err
    assert not left_in(tmp_path / "runs" / ("other" if "name=other" in words else ".")) and KEY not in said.err


@pytest.mark.parametrize("text", ["bias: [Yes, No]", "bias: [012]", "name: 1:30", "bias: [on, verbosity]"])
def test_yaml_that_reads_text_as_something_else_is_refused(text: str) -> None:
    """B31: in a YAML file Yes is a boolean, 012 is 10 and 1:30 is 90."""
    kind = load_stage("pairs").config
    read = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(read, dict)
    with pytest.raises(UsageError, match=r"(bias|name) must be text, got (True|\d+) \((bool|int)\): quote it"):
        build(kind, {str(key): value for key, value in read.items()})
    quoted = OmegaConf.to_container(OmegaConf.create('bias: ["Yes", "No"]\nsource: null'))
    assert isinstance(quoted, dict) and build(kind, {str(k): v for k, v in quoted.items()}).bias == ["Yes", "No"]


FAILED = [
    (("pairs", "source=jsonl", "source.path=no.jsonl"), ["no.jsonl: no such file", "q.jsonl"]),
    (("pairs", "source=rbd", "source.folder=nowhere"), ["nowhere", "no folder"]),
    (("judgements",), ["stage pairs has not run", "rbd pairs name=default", "from="]),
    (("traces",), ["stage judgements has not run"]),
    (("curate", "from=other"), ["runs/other/judgements", "rbd judgements name=other"]),
    (("sft", "model=tiny"), ["stage curate has not run"]),
    (("detection", "detector.engine.model=tiny"), ["stage curate has not run"]),
    (("debias",), ["has not run"]),
    (("report",), ["no finished stage", "contrast", "name=default"]),
    ((*PAIRS, "limit=0"), ["no pair is left of 2 questions"]),
    (("judgements", "pairs=q.jsonl"), ["q.jsonl, line 1, field"]),
    (("judgements", "imported=q.jsonl"), ["q.jsonl", "column index is missing"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "told"), FAILED)
def test_a_fault_of_the_data_is_told_in_a_line(
    rbd: Any, tmp_path: Path, words: tuple[str, ...], told: list[str]
) -> None:
    said = rbd(*words)
    assert said.code == 1 and said.err.count("\n") == 1, said.err
    assert all(part in said.err for part in told) and "Traceback" not in said.err, said.err
    assert not left_in(tmp_path / "runs")
    assert manifest(tmp_path / "runs/default" / words[0])["status"] == "failed"


def test_a_stage_that_failed_is_refused_as_input(rbd: Any) -> None:
    assert rbd(*PAIRS, "limit=0").code == 1
    said = rbd(*SCRIPTED)
    assert said.code == 1 and "stage pairs is failed; run it again" in said.err


def test_a_model_folder_that_is_not_there(rbd: Any, tmp_path: Path) -> None:
    assert rbd(*PAIRS).code == 0
    said = rbd("judgements", "judge.engine.model=models/none")
    assert said.code in (1, 2) and "models/none" in said.err and said.err.count("\n") == 1, said.err
    assert not left_in(tmp_path / "runs/default/judgements")


@pytest.mark.parametrize(("words", "code"), [((*PAIRS, "bias=[beauty]"), 2), ((*PAIRS, "limit=0"), 1)])
def test_a_traceback_is_shown_for_debug_alone(rbd: Any, words: tuple[str, ...], code: int) -> None:
    plain, debug = rbd(*words), rbd(*words, "debug=true")
    assert plain.code == debug.code == code
    assert "Traceback" not in plain.err and "Traceback (most recent call last)" in debug.err
    assert debug.err.splitlines()[-1] == plain.err.strip()


# again --------------------------------------------------------------------------------------------------------------


def test_the_same_command_again_is_complete_already(rbd: Any, tmp_path: Path) -> None:
    assert rbd(*PAIRS).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    again = rbd(*PAIRS)
    assert again.code == 0 and "complete already" in again.out
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_an_output_that_was_damaged_is_no_finished_stage(rbd: Any, tmp_path: Path, damage: str) -> None:
    assert rbd(*PAIRS).code == 0
    path = tmp_path / "runs/default/pairs/pairs.jsonl"
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-20])
    again = rbd(*PAIRS)
    assert again.code == 2 and "pairs.jsonl is gone or was changed" in again.err and "overwrite=true" in again.err
    assert rbd(*PAIRS, "overwrite=true").code == 0 and path.read_bytes() == whole


def test_what_others_named_steers_no_terminal(rbd: Any, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"\\u001b[31mquestion": "q", "right": "1", "wrong": "2"}\n')
    said = rbd(*PAIRS)
    assert said.code == 1 and "\x1b" not in said.err + said.out and "\\x1b[31mquestion" in said.err


@pytest.mark.parametrize("text", ["[]", "{}", "null"])
def test_a_manifest_that_is_none_is_named(rbd: Any, tmp_path: Path, text: str) -> None:
    assert rbd(*PAIRS).code == 0
    (tmp_path / "runs/default/pairs/manifest.json").write_text(text)
    said = rbd(*PAIRS)
    assert said.code == 1 and "manifest.json: not a manifest" in said.err


def test_other_settings_or_inputs_are_refused_until_overwrite(rbd: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs/default/pairs"
    assert rbd(*PAIRS).code == 0
    whole = (folder / "pairs.jsonl").read_bytes()
    other = rbd(*PAIRS, "limit=1")
    assert other.code == 2 and "config key limit" in other.err and "overwrite=true" in other.err
    with (tmp_path / "q.jsonl").open("a") as file:
        file.write('{"question": "new", "right": "1", "wrong": "2"}\n')
    stale = rbd(*PAIRS)
    assert stale.code == 2 and "input q.jsonl" in stale.err
    assert (folder / "pairs.jsonl").read_bytes() == whole and manifest(folder)["status"] == "complete"
    assert rbd(*PAIRS, "limit=1", "overwrite=true").code == 0
    assert manifest(folder)["outputs"]["pairs.jsonl"]["rows"] == 4


def test_an_overwrite_that_fails_leaves_what_stood_there(rbd: Any, tmp_path: Path) -> None:
    """A typing error must not cost a trained model; nor may old rows stand under the new settings."""
    folder = tmp_path / "runs/default/pairs"
    assert rbd(*PAIRS).code == 0
    kept = [path for path in folder.iterdir() if path.suffix in (".json", ".jsonl", ".yaml") and path.stem != "events"]
    before = {path: path.read_bytes() for path in kept}
    for wrong in (("limit=0",), ("source.path=typo.jsonl",)):
        said = rbd(*PAIRS, *wrong, "overwrite=true")
        assert said.code == 1 and "what stood there before is back" in said.out
        assert {path: path.read_bytes() for path in kept} == before and not (folder / ".previous").exists()
    assert "complete already" in rbd(*PAIRS).out


def test_an_overwrite_killed_while_it_moved_files_or_wrote_gives_all_back(
    rbd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs/default/pairs"
    assert rbd(*PAIRS).code == 0
    kept = [path for path in folder.iterdir() if path.suffix in (".json", ".jsonl", ".yaml") and path.stem != "events"]
    before = {path: path.read_bytes() for path in kept}
    moved, rename = [], Path.rename

    def first_alone(self: Path, target: Path) -> Path:
        moved.append(self)
        if len(moved) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", first_alone)
    with pytest.raises(KeyboardInterrupt):
        set_aside(folder, manifest(folder))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    said = rbd(*PAIRS, "source.path=typo.jsonl", "overwrite=true")
    assert said.code == 1 and {path: path.read_bytes() for path in kept} == before
    set_aside(folder, manifest(folder))  # and one that had written what the old one had not
    note_written(folder, "new.jsonl")
    (folder / "new.jsonl").write_text("{}")
    said = rbd(*PAIRS, "source.path=typo.jsonl", "overwrite=true")
    assert said.code == 1 and not (folder / "new.jsonl").exists()
    assert {path: path.read_bytes() for path in kept} == before


def test_an_overwrite_that_was_killed_begins_anew_without_the_old_rows(rbd: Any, tmp_path: Path) -> None:
    """As `kill -9` leaves it: the old files set aside, the stage incomplete."""
    folder = tmp_path / "runs/default/pairs"
    assert rbd(*PAIRS).code == 0
    set_aside(folder, manifest(folder))
    assert manifest(folder)["status"] == "incomplete" and not (folder / "pairs.jsonl").exists()
    assert rbd(*PAIRS, "limit=1").code == 0
    assert manifest(folder)["outputs"]["pairs.jsonl"]["rows"] == 4 and not (folder / ".previous").exists()


# sweeps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_sweep_runs_wherever_its_flag_stands(rbd: Any, tmp_path: Path, place: str) -> None:
    """B37, and B34: a list is one value."""
    stage, *rest = PAIRS
    grid = ["bias=[verbosity,position],[sentiment]", "seed=1,2"] if place == "middle" else ["limit=1,2"]
    cut = {"first": 0, "middle": 1, "last": len(rest)}[place]
    words = [*rest[:cut], "-m", *rest[cut:], *grid] if place != "last" else [*rest, *grid, "-m"]
    said = rbd(stage, *words)
    assert said.code == 0, said.err
    folders = sorted((tmp_path / "runs/default").iterdir())
    assert len(folders) == (4 if place == "middle" else 2) and {manifest(f)["status"] for f in folders} == {"complete"}
    if place == "middle":
        drawn = sorted((manifest(f)["config"]["bias"], manifest(f)["config"]["seed"]) for f in folders)
        assert drawn == [(bias, seed) for bias in (["sentiment"], ["verbosity", "position"]) for seed in (1, 2)]


def test_one_failed_trial_stops_no_other(rbd: Any, tmp_path: Path) -> None:
    """B38; the hash of the first trial is all digits here, which Hydra would read as a number."""
    said = rbd("pairs", "-m", "source=jsonl", "source.path=q.jsonl,no.jsonl", "bias=[verbosity],[position]")
    assert said.code == 1 and said.err.count("no.jsonl: no such file") == 2 and "Traceback" not in said.err
    states = [manifest(folder)["status"] for folder in (tmp_path / "runs/default").iterdir()]
    assert sorted(states) == ["complete", "complete", "failed", "failed"]
    summary = " ".join(said.out.split("Sweep of pairs")[1].replace("│", " ").split())
    assert summary.count("failed") == 2 and "source.path=no.jsonl" in summary and "DataError: no.jsonl: no" in summary


def test_a_trial_that_means_nothing_stops_no_other(rbd: Any, tmp_path: Path) -> None:
    said = rbd("pairs", "-m", "source=jsnol,jsonl", "source.path=q.jsonl", "limit=1")
    assert said.code == 1 and "no choice 'jsnol'" in said.err and "Sweep of pairs" in said.out
    assert [manifest(folder)["status"] for folder in (tmp_path / "runs/default").iterdir()] == ["complete"]


@pytest.mark.parametrize("words", [("seed=1,",), ("name=O'B",), ("sed=1,2",)])
def test_a_sweep_that_means_nothing_is_refused(rbd: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    said = rbd(*PAIRS, "-m", *words)
    assert said.code in (1, 2) and said.err.startswith("error: ") and "Traceback" not in said.err
    assert not left_in(tmp_path / "runs")


# servers, keys and two processes ------------------------------------------------------------------------------------


class Server(NamedTuple):
    url: str
    asked: threading.Event
    answer: threading.Event


@pytest.fixture
def server() -> Iterator[Server]:
    """Serve chat completions that wait until the test lets them go."""
    asked, answer = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.set()
            assert answer.wait(60)
            message = {"role": "assistant", "content": "Output (a)"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
            refused = KEY in self.headers["Authorization"]
            if refused:  # as servers do, which echo the key that they refuse
                body = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}})
            self.send_response(401 if refused else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Stay silent."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield Server(f"http://127.0.0.1:{http.server_address[1]}/v1", asked, answer)
    answer.set()
    http.shutdown()
    http.server_close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Hold a port on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_missing_api_key_is_named(rbd: Any, tmp_path: Path) -> None:
    assert rbd(*PAIRS).code == 0
    said = rbd(*JUDGE)
    assert said.code == 2 and "TOGETHER_API_KEY" in said.err and "export" in said.err
    assert not left_in(tmp_path / "runs/default/judgements")


@pytest.mark.parametrize("tracker", ["disabled", "offline"])
def test_a_dead_server_leaves_no_rows_and_a_key_is_in_no_file(
    rbd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_port: int, tracker: str
) -> None:
    """B35, and a stage that lacks answers is incomplete."""
    assert rbd(*PAIRS).code == 0
    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    url = f"http://127.0.0.1:{closed_port}/v1"
    said = rbd(*JUDGE, f"judge.engine.base_url={url}", "judge.engine.backoff_s=0", f"wandb.mode={tracker}")
    folder = tmp_path / "runs/default/judgements"
    assert said.code == 1 and url in said.err and "Traceback" not in said.err, said.err
    assert manifest(folder)["status"] == "incomplete" and not left_in(folder)
    texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if KEY.encode() in text] == [] and KEY not in said.out + said.err
    assert url.encode() in texts[folder / "config.yaml"]
    if tracker == "offline":
        assert any(path.suffix == ".wandb" and url.encode() in text for path, text in texts.items())
    following = rbd("traces")
    assert following.code == 1 and "stage judgements is incomplete" in following.err


def test_a_key_that_a_server_echoes_is_in_no_file(
    rbd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    assert rbd(*PAIRS).code == 0
    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    server.answer.set()
    said = rbd(*JUDGE, f"judge.engine.base_url={server.url}")
    assert said.code == 2 and "401" in said.err and "***" in said.err and KEY not in said.out + said.err
    assert [p for p in tmp_path.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()] == []


def test_the_second_process_in_a_folder_is_refused(rbd: Callable[..., Any], tmp_path: Path, server: Server) -> None:
    assert rbd(*PAIRS).code == 0
    words = [*JUDGE, f"judge.engine.base_url={server.url}", "judge.engine.api_key_env=null"]
    first = subprocess.Popen([sys.executable, "-m", "rbd_train.app", *words], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert server.asked.wait(60)
        second = rbd(*words)
        assert second.code == 2 and "runs/default/judgements is in use by another process" in second.err
    finally:
        server.answer.set()
        first.communicate(timeout=60)
    assert first.returncode == 0 and manifest(tmp_path / "runs/default/judgements")["status"] == "complete"
    third = rbd(*words)
    assert third.code == 0 and "complete already" in third.out


def test_a_file_where_a_folder_is_needed_is_told(rbd: Any) -> None:
    Path("runs").touch()
    said = rbd("pairs", "source.train=1", "source.test=1")
    assert said.code == 1 and "a file stands where a folder is needed; choose another root=FOLDER" in said.err, said.err
    said = rbd("pairs", "source=jsonl", "source.path=.", "root=other")
    assert said.code == 1 and ".: a folder; name a file in it" in said.err, said.err


def test_a_full_disk_is_told_and_the_same_command_goes_on(tmp_path: Path) -> None:
    def run(limit: int) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "rbd_train.app", "pairs", f"root={tmp_path}", "source.train=40"]
        narrow = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        return subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=narrow)

    said = run(20_000)
    assert said.returncode == 1 and "File too large; make room" in said.stderr, said.stderr
    assert not list(tmp_path.glob("default/pairs/*.jsonl")), "whole files or none"
    assert run(10_000_000).returncode == 0 and (tmp_path / "default/pairs/pairs.jsonl").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("pairs", "name=ledger.sqlite"), "is not the ledger's name"),
        (("pairs", "root="), "root is empty"),
        (("debias", "max_rounds=0"), "max_rounds is 0"),
        (("pairs", "congruent_share=2"), "congruent_share is 2.0 (0 to 1)"),
        (("-m", "pairs"), "write rbd <stage> -m"),
    ],
)
def test_what_would_run_through_without_sense_is_refused(rbd: Any, words: tuple[str, ...], told: str) -> None:
    said = rbd(*words)
    assert said.code == 2 and told in said.err, said.err


def test_a_swept_stage_is_named_where_the_next_one_looks_for_it(rbd: Any) -> None:
    assert rbd("pairs", "-m", "source.train=1", "source.test=1,2").code == 0
    said = rbd(*SCRIPTED)
    assert said.code == 1 and "was swept in this run (pairs-" in said.err, said.err


def test_a_root_may_move(rbd: Any) -> None:
    """Inputs are named by their path in the root: a finished stage stays finished, and a report finds its records."""
    assert rbd("pairs", "source.train=1", "source.test=1").code == 0 and rbd(*SCRIPTED).code == 0
    Path("runs").rename("kept")
    said = rbd(*SCRIPTED, "root=kept")
    assert said.code == 0 and "complete already" in said.out, said.err


def test_a_diverged_training_says_so(rbd: Any, tmp_path: Path) -> None:
    rows = "".join(example(number, number % 2 == 0).model_dump_json() + "\n" for number in range(1, 10))
    (tmp_path / "train.jsonl").write_text(rows)
    said = rbd("sft", "train=[train.jsonl]", "model=tiny", "trainer.learning_rate=1e30", "trainer.epochs=3")
    assert said.code == 1 and "training has diverged" in said.err and "learning_rate" in said.err, said.err
    assert (
        not Path("runs/default/sft/model").exists() and "NaN" not in Path("runs/default/sft/events.jsonl").read_text()
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("trainer.max_steps=1", "trainer.learning_rate=1e39"), "is not finite: training has diverged"),
        (("trainer.max_steps=1", "trainer.learning_rate=1e39", "trainer.eval_share=0.3"), "held-out loss of step 1 is"),
    ],
)
def test_a_last_step_that_diverged_is_no_fault_of_the_disk(
    rbd: Any, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    """No later loss shows it: what is measured and saved does."""
    rows = "".join(example(number, number % 2 == 0).model_dump_json() + "\n" for number in range(1, 20))
    (tmp_path / "train.jsonl").write_text(rows)
    still = ("trainer.warmup_share=0.0", "trainer.scheduler=constant")
    said = rbd("sft", "train=[train.jsonl]", "model=tiny", *still, *words)
    assert said.code == 1 and told in said.err and "lower trainer.learning_rate" in said.err, said.err
    assert not Path("runs/default/sft/model").exists()
    assert "NaN" not in Path("runs/default/sft/events.jsonl").read_text()


def test_a_reader_that_has_seen_enough_fails_no_stage(tmp_path: Path) -> None:
    """`rbd ... | head -1` closes the pipe while the stage goes on."""
    rbd_words = [sys.executable, "-m", "rbd_train.app"]
    subprocess.run([*rbd_words, "pairs", "limit=20"], cwd=tmp_path, check=True, capture_output=True)
    process = subprocess.Popen([*rbd_words, "judgements", "judge=planted"], cwd=tmp_path, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    process.wait()
    manifest = json.loads((tmp_path / "runs/default/judgements/manifest.json").read_text())
    assert manifest["status"] == "complete", manifest["reason"]


def test_how_fast_one_asks_is_no_other_setting(rbd: Callable[..., Any]) -> None:
    words = ("judgements", "judge=generative", "engine=scripted", "engine.rules=[{pattern: '.', reply: 'Output (a)'}]")
    assert rbd("pairs", "limit=4").code == 0 and rbd(*words).code == 0
    manifest = Path("runs/default/judgements/manifest.json")
    known = json.loads(manifest.read_text())
    known["config"]["judge"]["engine"]["concurrency"] = 4  # as of a collection over HTTP
    manifest.write_text(json.dumps(known))
    again = rbd(*words)
    assert again.code == 0 and "complete already" in again.out
    known["config"]["judge"]["engine"]["model"] = "another"
    manifest.write_text(json.dumps(known))
    assert rbd(*words).code == 2


def test_a_misspelt_stage_is_guessed(rbd: Callable[..., Any]) -> None:
    said = rbd("jugding")
    assert said.code == 2 and "did you mean judging?" in said.err


def test_a_dry_run_tells_the_calls_of_every_stage_that_makes_some(rbd: Callable[..., Any], tmp_path: Path) -> None:
    row = {"id": "1", "document": "d", "text": "t", "dimension": "quality", "human": 3.0}
    (tmp_path / "texts.jsonl").write_text(json.dumps(row) + "\n")
    server = [f"{slot}.{key}" for slot in ("main", "assistant")
              for key in ("model=M", "base_url=http://127.0.0.1:1/v1", "api_key_env=null")]  # fmt: skip
    said = rbd("contrast", "engine@main=http", "engine@assistant=http", *server, "source=graded",
               "source.path=texts.jsonl", "ranges=[1-5]", "dry_run=true")  # fmt: skip
    assert said.code == 0 and "dry run of contrast: " in said.out and "calls, about" in said.out
    assert "makes no calls" in rbd("report", "dry_run=true").err

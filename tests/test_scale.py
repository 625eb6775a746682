"""Training at scale: equal losses however it is cut up, resumed or sharded; what is saved is what was trained."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.file_baton import FileBaton

from rbd_train import sft, workers
from rbd_train.checkpoints import SEAL, check_fits, newest_whole, seal
from rbd_train.config import data_dir
from rbd_train.errors import UsageError
from rbd_train.modelling import resolve_model
from rbd_train.run import Run
from rbd_train.store import write_rows
from rbd_train.trainer import RowOrder, Stopping
from rbd_train.weights import save
from rbd_train.workers import machines, stale_locks
from tests.examples import example  # type: ignore[import-not-found]

LAUNCHES = ("", "ddp", "zero1", "zero2", "zero3")
# a rate at which 20 steps fall by far more than 10 %, but at which Adam does not yet amplify the order of sums
SETTINGS = (
    "model=tiny", "trainer.max_steps=20", "trainer.learning_rate=1e-2", "trainer.global_batch=8",
    "trainer.warmup_share=0.0", "trainer.scheduler=constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scale") / "train.jsonl"
    write_rows(path, [example(number, number % 2 == 0) for number in range(1, 44)])  # no multiple of the global batch
    return path


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "losses.jsonl").read_text().splitlines()]


def command(root: Path, train_file: Path, words: Sequence[str]) -> list[str]:
    first = [sys.executable, "-m", "rbd_train.app", "sft", f"root={root}", f"train=[{train_file}]"]
    return [*first, *SETTINGS, *words]


def train(root: Path, train_file: Path, *words: str) -> Path:
    done = subprocess.run(command(root, train_file, words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return root / "default" / "sft"


@pytest.fixture(scope="module")
def single(train_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train in one process, once per setting."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*words: str) -> Path:
        if words not in made:
            made[words] = train(tmp_path_factory.mktemp("single"), train_file, "trainer.micro_batch=4", *words)
        return made[words]

    return run


# however it is cut up -----------------------------------------------------------------------------------------------


def test_row_order_depends_on_seed_and_global_batch_alone() -> None:
    lengths = [5, 9, 1, 7, 3, 8, 2, 6, 4, 10, 11]
    order = list(RowOrder(lengths, 4, True, 0, lambda: 0))
    assert order == list(RowOrder(lengths, 4, True, 0, lambda: 0)) != list(RowOrder(lengths, 4, True, 0, lambda: 1))
    assert len(order) == 12 and set(order) == set(range(11))  # every row, the last batch filled
    assert order != list(RowOrder(lengths, 4, True, 1, lambda: 0))


@pytest.mark.parametrize(
    "words", [("micro_batch=8",), ("micro_batch=1",), ("micro_batch=4", "padding_free=true"), ("recompute=true",)]
)
def test_losses_stay_the_same(
    rbd: Callable[..., Any], single: Callable[..., Path], train_file: Path, words: tuple[str, ...]
) -> None:
    """A39, A44: micro-batch and accumulation, rows laid end to end, recomputation."""
    said = rbd("sft", f"train=[{train_file}]", *SETTINGS, *(f"trainer.{word}" for word in words))
    assert said.code == 0, said.err
    assert losses(Path("runs/default/sft")) == pytest.approx(losses(single()), abs=1e-3)
    assert "tokens/s without padding" in said.out
    if "padding_free=true" in words:
        assert "padding 0.0%" in said.out


FAST = {("zero2", "full", "reasoning"), ("zero3", "lora", "label")}
TABLE = [
    pytest.param(
        launch, weights, objective, marks=[] if (launch, weights, objective) in FAST or not launch else pytest.mark.slow
    )
    for launch in LAUNCHES for weights in ("full", "lora") for objective in ("reasoning", "label")
]  # fmt: skip


@pytest.mark.parametrize(("launch", "weights", "objective"), TABLE)
def test_every_way_to_train_gives_the_losses_of_one_process(
    single: Callable[..., Path],
    train_file: Path,
    tmp_path: Path,
    launch: str,
    weights: str,
    objective: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A41-A45: real DeepSpeed on two gloo ranks; losses equal to 1e-3, falling, weights saved whole, and they speak."""
    # at thrice the rate Adam amplifies the order of sums beyond 1e-3 under adapters; at this one their loss falls
    # little, since a random base stays as it is
    rate = ("trainer.learning_rate=1e-2", "model.lora_rank=8") if weights == "lora" else ()
    words = (f"objective={objective}", *rate)
    alone = single(*words)
    folder = alone
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    if launch:
        folder = train(tmp_path, train_file, *words, f"launch={launch}", "processes=2", "trainer.micro_batch=2")
        assert losses(folder) == pytest.approx(losses(alone), abs=1e-3)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["world_size"] == 2 and manifest["status"] == "complete"
        assert manifest["facts"]["distributed"] == ("MULTI_CPU" if launch == "ddp" else "DEEPSPEED")
        assert not (tmp_path / "builds").exists(), "DeepSpeed compiled an operator that training on a CPU never calls"
    found = losses(folder)
    assert len(found) == 20 and found[-1] < (0.995 if weights == "lora" else 0.9) * found[0]
    assert not list(folder.rglob("model/**/*.bin")) and not list(folder.glob("checkpoints-*"))
    assert (folder / "model" / "adapter" / "adapter_model.safetensors").is_file() == (weights == "lora")
    with (
        safe_open(folder / "model" / "model.safetensors", "pt") as ours,
        safe_open(alone / "model" / "model.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        for name in ours.keys():  # noqa: SIM118
            assert (ours.get_tensor(name).float() - theirs.get_tensor(name).float()).abs().max() < 5e-3, name
    assert speaks(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["reasoning", "label"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_adapters_of_a_pretrained_model_learn_as_in_one_process(
    single: Callable[..., Path], train_file: Path, tmp_path: Path, launch: str, objective: str
) -> None:
    """The tiny model's adapters can't fall by 10 %, since its base is random; those of SmolLM2-135M do."""
    words = (f"objective={objective}", "model.path=embedded", "model.lora_rank=8", "trainer.learning_rate=2e-4")
    alone = found = losses(single(*words))
    if launch:
        found = losses(train(tmp_path, train_file, *words, f"launch={launch}", "processes=2", "trainer.micro_batch=2"))
        assert found == pytest.approx(alone, abs=1e-3)
    assert len(found) == 20 and found[-1] < 0.9 * found[0]


def speaks(folder: Path) -> bool:
    from rbd_train.modelling import encode_context, load_model, load_tokenizer
    from rbd_train.prompts.detect import detect_messages

    tokenizer = load_tokenizer(str(folder), reasoning=False)
    import torch

    ids = torch.tensor([encode_context(tokenizer, detect_messages(example(1, True).case))])
    model: Any = load_model(str(folder), "float32")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return bool(out.shape[1] > ids.shape[1])


def test_adapters_merged_are_adapters_applied(single: Callable[..., Path]) -> None:
    import torch
    from peft import PeftModel

    from rbd_train.modelling import load_model

    folder = single("objective=reasoning", "trainer.learning_rate=3e-2", "model.lora_rank=8") / "model"
    ids = torch.arange(1, 30).unsqueeze(0)
    base: Any = load_model(resolve_model("tiny"), "float32")
    applied = PeftModel.from_pretrained(base, str(folder / "adapter"))(ids).logits
    merged: Any = load_model(str(folder), "float32")
    assert torch.allclose(applied, merged(ids).logits, atol=1e-4)
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "tiny"  # no path of this machine


def test_a_classifier_is_trained_and_detects(rbd: Callable[..., Any], train_file: Path) -> None:
    said = rbd("sft", f"train=[{train_file}]", *SETTINGS, "objective=classifier", "trainer.micro_batch=4")
    assert said.code == 0, said.err
    said = rbd("detection", f"examples={train_file}", "detector=classifier", "name=c", "from=default")
    assert said.code == 0, said.err
    for name, detector in (("x", "trained"), ("y", "label")):  # whose replies would mean nothing
        said = rbd("detection", f"examples={train_file}", f"name={name}", f"detector={detector}", "from=default")
        assert said.code == 2 and "objective=classifier" in said.err and "use detector=classifier" in said.err
    said = rbd("detection", f"examples={train_file}", "name=z", "detector=classifier", "detector.model=tiny")
    assert said.code == 2 and "no classifier's head" in said.err
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in Path("runs/default/sft/model").iterdir())
    verdicts = [json.loads(line) for line in Path("runs/c/detection/verdicts.jsonl").read_text().splitlines()]
    assert len(verdicts) == 43 and all(v["verdict"] is not None and v["thinking"] is None for v in verdicts)
    card = Path("runs/default/sft/model/README.md").read_text()
    assert "sha256" in card and "rule: chose the longer" in card  # scores beside the rules
    assert "# A bias classifier" in card and "reasoning" not in card.split("## Data")[0]
    told = {
        "objective": "classifier",
        "biases": "all",
        "seed": 0,
        "launch": "none",
        "processes": 1,
        "model.lora_rank": 0,
        "model.dtype": "float32",
        "model.four_bit": False,
        "trainer.max_steps": 20,
    }
    for key, value in told.items():
        assert f"| {key} | {value} |" in card, key


def test_one_bias_alone(rbd: Callable[..., Any], train_file: Path) -> None:
    said = rbd("sft", f"train=[{train_file}]", *SETTINGS[:1], "trainer.max_steps=1", "biases=[position]")
    assert said.code == 0 and json.loads(Path("runs/default/sft/manifest.json").read_text())["facts"]["rows"] == 14
    said = rbd("sft", f"train=[{train_file}]", *SETTINGS[:1], "biases=[bandwagon]", "name=b")
    assert said.code == 2 and "'bandwagon'" in said.err and "position, verbosity" in said.err


@pytest.mark.parametrize("fault", ["empty", "other values", "missing"])
def test_weights_not_saved_whole_are_no_model(
    rbd: Callable[..., Any], train_file: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A42: a shard that was saved alone has size 0; the command fails and leaves no model."""
    from safetensors.torch import load_file, save_file

    from rbd_train.cpu import CompletionTrainer

    real = CompletionTrainer.save_model

    def damaged(self: Any, folder: str, **settings: Any) -> None:
        real(self, folder, **settings)
        path = Path(folder) / "model.safetensors"
        tensors = load_file(path)
        name = "model.norm.weight"
        if fault == "missing":
            del tensors[name]
        else:
            tensors[name] = tensors[name][:0].clone() if fault == "empty" else tensors[name] + 1
        save_file(tensors, path)

    monkeypatch.setattr(CompletionTrainer, "save_model", damaged)
    said = rbd("sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=1", "trainer.micro_batch=8")
    assert said.code == 1 and "model.norm.weight" in said.err and "not saved whole" in said.err
    assert not Path("runs/default/sft/model").exists()


def test_a_merged_model_not_saved_whole_is_no_model(
    rbd: Callable[..., Any], train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedModel

    real = PreTrainedModel.save_pretrained

    def damaged(self: Any, folder: Any, **settings: Any) -> None:
        real(self, folder, **settings)
        path = Path(folder) / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, path)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", damaged)
    said = rbd("sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=1", "model.lora_rank=4")
    assert said.code == 1 and "model.norm.weight" in said.err and "not saved whole" in said.err, said.err
    assert not Path("runs/default/sft/model").exists()


# killed, stopped, resumed -------------------------------------------------------------------------------------------


def until(process: subprocess.Popen[bytes], happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not happened():
        assert process.poll() is None, "the command ended before it could be disturbed"
        assert time.monotonic() < deadline
        os.sched_yield()


def start(root: Path, train_file: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(root, train_file, words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def checkpoint(root: Path, step: int) -> bool:
    return any(root.glob(f"default/sft/checkpoints-*/checkpoint-{step}"))


RESUMED = [
    pytest.param("", "kill"), *(pytest.param("", how, marks=pytest.mark.slow) for how in ("int", "term")),
    *(pytest.param(launch, how, marks=pytest.mark.slow) for launch in LAUNCHES[1:] for how in ("kill", "term")),
]  # fmt: skip


@pytest.mark.parametrize(("launch", "how"), RESUMED)
def test_a_disturbed_run_goes_on_as_if_nothing_had_been(
    single: Callable[..., Path], train_file: Path, tmp_path: Path, launch: str, how: str
) -> None:
    words = ["trainer.save_every=5", "trainer.micro_batch=2"]
    words += [f"launch={launch}", "processes=2"] if launch else []
    process = start(tmp_path, train_file, *words)
    until(process, lambda: checkpoint(tmp_path, 5))
    if how == "kill":
        kill_all(tmp_path)
    else:
        process.send_signal(signal.SIGTERM if how == "term" else signal.SIGINT)
    _, err = process.communicate()
    code = {"kill": -signal.SIGKILL, "term": 1, "int": 130}[how]
    assert process.returncode == code, err.decode()[-2000:]
    if how != "kill":
        assert b"the same command continues" in err
        assert json.loads((tmp_path / "default/sft/manifest.json").read_text())["status"] == "incomplete"
    assert not (tmp_path / "default/sft/model").exists()
    done = subprocess.run(command(tmp_path, train_file, words), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "continuing from" in done.stdout, done.stderr[-2000:]
    assert losses(tmp_path / "default/sft") == pytest.approx(losses(single()), abs=1e-3)


def test_a_second_ctrl_c_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = signal.getsignal(signal.SIGINT)  # ignored in a shell's background
    stopping = Stopping(tmp_path / "stop")
    try:
        signal.raise_signal(signal.SIGINT)
        assert stopping.signalled
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        stopping.restore()
    assert signal.getsignal(signal.SIGINT) is before


def kill_all(root: Path) -> None:
    """Kill the command, its launcher and its workers: their command lines name the root."""
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(root) in " ".join(p.info["cmdline"] or [])]
    for process in mine:
        process.kill()
    psutil.wait_procs([process for process in mine if process.ppid() != os.getpid()], timeout=120)


def test_a_stop_during_evaluation_loses_nothing(
    rbd: Callable[..., Any], train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=8", "trainer.eval_share=0.3"]
    words += ["trainer.eval_every=3", "trainer.micro_batch=2"]
    assert rbd(*words, "name=undisturbed").code == 0
    asked = Stopping.asked
    count = 0

    def soon(self: Stopping, device: Any) -> bool:
        nonlocal count
        count += 1
        return count == 5 or asked(self, device)  # three steps, and the second batch of the evaluation after them

    monkeypatch.setattr(Stopping, "asked", soon)
    said = rbd(*words)
    assert said.code == 1 and "stopped after step 3 of 8" in said.err
    said = rbd(*words)
    assert said.code == 0 and "continuing from" in said.out
    assert losses(Path("runs/default/sft")) == losses(Path("runs/undisturbed/sft"))


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_at_the_final_save_loses_nothing(
    rbd: Callable[..., Any], train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With save_every=0 and steps that end in the middle of a pass, where transformers would take one more."""
    words = ["sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=4", "trainer.micro_batch=8"]
    assert rbd(*words, "name=undisturbed").code == 0
    with monkeypatch.context() as patch:

        def full(*given: Any) -> None:
            with largest_file(40_000):
                save(*given)

        patch.setattr(sft, "save", full)
        said = rbd(*words)
    assert said.code == 1 and "the trained weights can't be written" in said.err, said.err
    assert "checkpoint-4 is whole" in said.err and not Path("runs/default/sft/model").exists()
    said = rbd(*words)
    assert said.code == 0 and "continuing from" in said.out, said.err
    assert losses(Path("runs/default/sft")) == losses(Path("runs/undisturbed/sft"))
    assert not list(Path("runs/default/sft").glob("checkpoints-*"))


def test_a_checkpoint_with_its_size_and_other_bytes_is_named(rbd: Callable[..., Any], train_file: Path) -> None:
    """Its table of contents is whole, so nothing passes it over; loading fails, and the way out is told."""
    words = ["sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=2", "trainer.micro_batch=8"]
    assert rbd(*words, "push_to_hub=someone/detector").code == 1  # no hub here: the checkpoint stays
    (file,) = Path("runs/default/sft").glob("checkpoints-*/checkpoint-2/optimizer.pt")
    data = bytearray(file.read_bytes())
    data[len(data) // 4 : len(data) // 2] = b"\xff" * (len(data) // 2 - len(data) // 4)
    file.write_bytes(data)
    said = rbd(*words)
    assert said.code == 1 and "checkpoint-2 can't be loaded" in said.err and "remove it" in said.err, said.err
    shutil.rmtree(file.parent)
    said = rbd(*words)
    assert said.code == 0 and "of a training with other settings" not in said.out, said.err


def test_every_step_is_logged_by_itself_and_the_last_is_the_metric(rbd: Callable[..., Any], train_file: Path) -> None:
    """A mean since the last log would be another one where a run was stopped in between."""
    words = ["sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=3", "trainer.micro_batch=8"]
    assert rbd(*words).code == 0
    folder = Path("runs/default/sft")
    metric = json.loads((folder / "manifest.json").read_text())["metric"]
    assert len(losses(folder)) == 3 and metric == pytest.approx(losses(folder)[-1])


WORKER = """
import pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / "told").touch())
(folder / "up").touch()
while True:
    signal.pause()
"""


def test_workers_that_hang_dont_outlive_a_third_signal(tmp_path: Path) -> None:
    """Torch's launcher waits an hour for those that it told to end, and leaves them behind where it is told again."""
    (tmp_path / "worker.py").write_text(WORKER)
    words = [sys.executable, "-m", "rbd_train.launcher", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    environment = os.environ | {"PET_SHUTDOWN_TIMEOUT": "3600"}
    words += [str(tmp_path / "worker.py"), str(tmp_path)]
    with workers.stopping(tmp_path / "stop", words, environment, True) as (process, asked):
        until(process, (tmp_path / "up").exists)
        (worker,) = psutil.Process(process.pid).children()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (tmp_path / "stop").exists() and not (tmp_path / "told").exists()
        os.kill(os.getpid(), signal.SIGTERM)
        until(process, (tmp_path / "told").exists)
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait(60) == -signal.SIGKILL and len(asked) == 3
    gone, alive = psutil.wait_procs([worker], timeout=60)
    assert not alive


def test_weights_are_saved_where_the_last_checkpoint_has_no_room(rbd: Callable[..., Any], train_file: Path) -> None:
    weights = (Path(resolve_model("tiny")) / "model.safetensors").stat().st_size
    words = ["sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=1", "trainer.micro_batch=8"]
    with largest_file(weights * 3 // 2):  # the optimizer's state takes twice the weights
        said = rbd(*words)
    assert said.code == 0 and "the trained weights alone may still fit" in said.out, said.err
    assert Path("runs/default/sft/model/model.safetensors").is_file()


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(train_file: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE falls after the first checkpoint: the next one can't be written."""
    process = start(tmp_path, train_file, "trainer.save_every=5", "trainer.micro_batch=1")
    until(process, lambda: checkpoint(tmp_path, 5))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    _, err = process.communicate()
    assert process.returncode == 1 and b"can't be written" in err, err.decode()[-3000:]
    assert b"the same command continues from it" in err and b"Traceback" not in err
    (folder,) = tmp_path.glob("default/sft/checkpoints-*")
    newest = newest_whole(folder)
    assert newest.folder is not None and not newest.passed_over and not (folder / "part").exists()


HELD = ("trainer.max_steps=2", "trainer.eval_share=0.3", "trainer.eval_every=50")


def test_the_metric_is_the_held_out_loss_however_it_is_cut_up(rbd: Callable[..., Any], train_file: Path) -> None:
    """A sweep must not optimise one batch's training loss, nor may the held-out one depend on the micro-batch."""
    found = []
    for micro in (1, 4):
        said = rbd("sft", f"name=m{micro}", f"train=[{train_file}]", *SETTINGS, *HELD, f"trainer.micro_batch={micro}")
        assert said.code == 0 and "held back" in said.out and "held-out loss" in said.out, said.err
        folder = Path(f"runs/m{micro}/sft")
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        measured = [event["eval_loss"] for event in events if "eval_loss" in event]
        metric = json.loads((folder / "manifest.json").read_text())["metric"]
        assert measured == [metric] and metric != losses(folder)[-1]
        found.append(metric)
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.parametrize("objective", ["reasoning", pytest.param("classifier", marks=pytest.mark.slow)])
def test_an_uneven_evaluation_under_two_ranks_ends(
    rbd: Callable[..., Any], train_file: Path, tmp_path: Path, objective: str
) -> None:
    """A41, A47: every rank makes as many passes under ZeRO-3, and no row counts twice."""
    words = (*HELD, "trainer.micro_batch=4", f"objective={objective}")
    assert rbd("sft", f"train=[{train_file}]", *SETTINGS, *words).code == 0
    folder = train(tmp_path / "two", train_file, *words, "launch=zero3", "processes=2")
    alone, two = (
        json.loads((path / "manifest.json").read_text())["metric"] for path in (Path("runs/default/sft"), folder)
    )
    assert two == pytest.approx(alone, abs=1e-3)


def test_nothing_held_back_is_no_loss(rbd: Callable[..., Any], train_file: Path) -> None:
    said = rbd("sft", f"train=[{train_file}]", *SETTINGS, "trainer.eval_share=0.0001")
    assert said.code == 1 and "trainer.eval_share=0.0001 leaves no row" in said.err
    assert "no question was drawn; raise the share" in said.err and "exceed" not in said.err


def test_an_end_between_the_last_step_and_the_manifest_costs_no_step(
    rbd: Callable[..., Any], train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the checkpoint holds is needed until the manifest says that the stage is complete."""
    words = ["sft", f"train=[{train_file}]", *SETTINGS, "trainer.max_steps=3"]
    assert rbd(*words, "name=undisturbed").code == 0
    close = Run.close

    def too_soon(self: Run, status: str, *others: Any) -> None:
        if status == "complete":
            raise KeyboardInterrupt
        close(self, status, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "close", too_soon)
        assert rbd(*words).code == 130
    said = rbd(*words)
    assert said.code == 0 and "checkpoint-3" in said.out.partition("continuing from")[2], said.err
    assert losses(Path("runs/default/sft")) == losses(Path("runs/undisturbed/sft"))
    assert not list(Path("runs/default/sft").glob("checkpoints-*"))


def test_a_trace_against_its_label_is_not_trained_on(rbd: Callable[..., Any], tmp_path: Path) -> None:
    rows = [example(number, number % 2 == 0) for number in range(1, 9)]
    write_rows(tmp_path / "t.jsonl", [rows[0].model_copy(update={"label": not rows[0].label}), *rows[1:]])
    words = ("sft", "train=[t.jsonl]", *SETTINGS, "trainer.max_steps=1")
    said = rbd(*words)
    assert said.code == 1 and f"example {rows[0].case.id}: its label is" in said.err
    assert rbd(*words, "objective=label").code == 0  # which reads the label alone


def test_damaged_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """Never sealed, cut, gone, of the right size but unreadable; somebody's own folder beside them is none."""
    (tmp_path / "checkpoint-old").mkdir()
    for step in (5, 10, 15, 20, 25, 30):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save({"step": torch.tensor(step)}, folder / "optimizer.pt")
        save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
        if step != 30:
            seal(folder, {"step": step})
    size = (tmp_path / "checkpoint-25" / "optimizer.pt").stat().st_size
    (tmp_path / "checkpoint-25" / "optimizer.pt").write_bytes(b"x" * 60)
    (tmp_path / "checkpoint-20" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-15" / "optimizer.pt").write_bytes(bytes(size))
    weights = tmp_path / "checkpoint-10" / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    newest = newest_whole(tmp_path)
    assert newest.folder == tmp_path / "checkpoint-5"
    told = (SEAL, f"60 bytes, {size} were written", "optimizer.pt is missing", "optimizer.pt has all its bytes",
            "model.safetensors has all its bytes")  # fmt: skip
    assert [words in said for words, said in zip(told, newest.passed_over, strict=True)] == [True] * 5
    assert newest_whole(tmp_path / "none").folder is None


def test_a_training_of_other_settings_is_named(rbd: Callable[..., Any], train_file: Path) -> None:
    """Its checkpoints stay, which takes room, and it isn't what the same name goes on with."""
    left = Path("runs/default/sft/checkpoints-0123456789abcdef")
    (left / "checkpoint-7").mkdir(parents=True)
    (left.parent / "checkpoints-fedcba9876543210").mkdir()  # of a training that ended before its first one
    said = rbd("sft", f"train=[{train_file}]", "model=tiny", "trainer.max_steps=1")
    assert "checkpoints-fedcba9876543210" not in said.out
    assert said.code == 0 and f"{left} is of a training with other settings" in said.out and left.is_dir()


def test_rows_of_one_label_are_warned_of(rbd: Callable[..., Any], tmp_path: Path) -> None:
    write_rows(tmp_path / "one.jsonl", [example(number, True) for number in range(1, 9)])
    said = rbd("sft", f"train=[{tmp_path / 'one.jsonl'}]", "model=tiny", "trainer.max_steps=1")
    assert said.code == 0 and "warning: all 8 rows are labelled Yes" in said.out
    assert "8 rows; traces by " in Path("runs/default/sft/model/README.md").read_text()


def test_a_worker_that_refuses_is_heard_without_a_traceback(train_file: Path, tmp_path: Path) -> None:
    words = command(tmp_path, train_file, ("launch=ddp", "processes=2", "trainer.global_batch=3"))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "trainer.global_batch=3 is no multiple of micro_batch x processes" in done.stderr.splitlines()[-1]


def test_ranks_agree_on_a_model_of_this_root(train_file: Path, tmp_path: Path) -> None:
    """Its weights are an input, and inputs name the folder of checkpoints: on rank 0 alone, ranks would save apart."""
    words = ("trainer.max_steps=2", "trainer.micro_batch=4")
    first = train(tmp_path, train_file, *words)
    more = (f"model.path={first / 'model'}", "model.shape={}", "name=more", "trainer.save_every=1")
    train(tmp_path, train_file, *words, *more, "launch=ddp", "processes=2")
    assert not list((tmp_path / "more/sft").glob("checkpoints-*"))
    manifest = json.loads((tmp_path / "more/sft/manifest.json").read_text())
    assert "default/sft/model/model.safetensors" in manifest["inputs"]


@pytest.mark.slow
def test_ranks_that_read_other_files_are_told(train_file: Path, tmp_path: Path) -> None:
    """Two machines without a shared folder, whose copies of the data differ in a row."""
    rows = train_file.read_text().splitlines(keepends=True)
    both = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for rank, lines in enumerate((rows, rows[1:])):
        root = tmp_path / f"machine{rank}"
        root.mkdir()
        (root / "train.jsonl").write_text("".join(lines))
        words = command(root, root / "train.jsonl", ("launch=ddp", "processes=2", "trainer.max_steps=2"))
        env = os.environ | given | {"NODE_RANK": str(rank)}
        both.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
    told = [process.communicate()[1] for process in both]
    assert all(process.returncode for process in both)
    assert any("rank 1 has checkpoints-" in each and "one shared folder" in each for each in told), told


def test_shards_of_another_world_are_refused(tmp_path: Path) -> None:
    """A43."""
    (tmp_path / "checkpoint-5").mkdir()
    seal(tmp_path / "checkpoint-5", {"sharding": "zero3", "processes": 4})
    check_fits(tmp_path / "checkpoint-5", {"sharding": "zero3", "processes": 4})
    with pytest.raises(UsageError, match="launch=zero3 processes=4"):
        check_fits(tmp_path / "checkpoint-5", {"sharding": "zero3", "processes": 2})
    seal(tmp_path / "checkpoint-5", {"sharding": "", "processes": 1})
    check_fits(tmp_path / "checkpoint-5", {"sharding": "", "processes": 2})  # whole on every rank


def test_a_checkpoint_that_cant_be_read_is_refused_before_loading(
    rbd: Callable[..., Any], train_file: Path, tmp_path: Path
) -> None:
    """A43: the base is gone by then, and nobody misses it; the way out names the launch that wrote the shards."""
    base = tmp_path / "base"
    shutil.copytree(resolve_model("tiny"), base)
    words = ["sft", f"train=[{train_file}]", "model=plain", f"model.path={base}", "trainer.max_steps=1"]
    assert rbd(*words, "push_to_hub=someone/detector").code == 1  # no hub here: the checkpoint stays
    (told,) = Path("runs/default/sft").glob(f"checkpoints-*/*/{SEAL}")
    told.write_text(json.dumps(json.loads(told.read_text()) | {"sharding": "zero3_offload", "processes": 4}))
    (base / "model.safetensors").unlink()
    said = rbd(*words)
    assert said.code == 2 and "launch=zero3_offload processes=4" in said.err, said.err


# launching ----------------------------------------------------------------------------------------------------------


def test_machines_come_from_the_environment() -> None:
    assert machines({}) == (1, 0, "", "29500")
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert machines(slurm) == (2, 1, "10.0.0.1", "1234")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        machines({"NNODES": "2"})
    with pytest.raises(UsageError, match="NODE_RANK is 2"):
        machines({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "x"})
    for name, text in (("NNODES", "two"), ("NNODES", "0"), ("SLURM_NNODES", "-1"), ("NODE_RANK", "first")):
        with pytest.raises(UsageError, match=f"{name} is '{text}'"):
            machines({name: text})


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["ddp", "zero2", "zero3"])
def test_two_machines_on_loopback(single: Callable[..., Path], train_file: Path, tmp_path: Path, launch: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = command(tmp_path, train_file, (f"launch={launch}", "processes=2", "trainer.micro_batch=2"))
    given = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    both = [
        subprocess.Popen(words, env=os.environ | given | {"NODE_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    told = [process.communicate()[1].decode()[-2000:] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert losses(tmp_path / "default/sft") == pytest.approx(losses(single()), abs=1e-3)


def test_another_number_of_processes_than_asked_for(
    rbd: Callable[..., Any], train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(key, value)
    said = rbd("sft", f"train=[{train_file}]", "model=tiny", "processes=2")
    assert said.code == 2 and "processes=2, but 3 were started" in said.err


def test_a_stale_build_lock_is_found(tmp_path: Path) -> None:
    """A build under way holds its lock open; what a killed one left is in nobody's hands."""
    baton, left = FileBaton(tmp_path / "op" / "lock"), tmp_path / "other" / "lock"
    (tmp_path / "op").mkdir()
    left.parent.mkdir()
    left.touch()
    assert baton.try_acquire() and stale_locks(tmp_path) == [left]
    baton.release()


@pytest.mark.parametrize("launch", ["zero2", "fsdp2"])
def test_one_machine_asks_for_a_free_port(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two launches at once take the default port, and each waits in the other's store."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    words, _ = workers.command(data_dir("launch") / f"{launch}.yaml", 2, machines({}))
    assert words[words.index("--main_process_port") + 1] == "0"


@pytest.mark.parametrize(
    ("gpus", "words", "told"),
    [
        (0, ("launch=fsdp2",), "launch=fsdp2 needs a GPU"),  # accelerate would train under DDP, and say nothing
        (2, ("launch=zero2", "processes=3"), "processes=3, but 1 machine(s) with 2 GPU(s) each hold 2"),
    ],
)
def test_what_these_machines_cant_launch_is_refused(
    rbd: Callable[..., Any], train_file: Path, monkeypatch: pytest.MonkeyPatch,
    gpus: int, words: Sequence[str], told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    said = rbd("sft", f"train=[{train_file}]", "model=tiny", *words)
    assert said.code == 2 and told in said.err and "Traceback" not in said.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("model.four_bit=true", "model.lora_rank=8"), "needs a GPU and the package bitsandbytes"),
        (("model.four_bit=true",), "set model.lora_rank=16"),
        (("model.lora_rank=4", "model.lora_alpha=0"), "model.lora_alpha is 0"),  # adapters that scale to nothing
        (("objective=verdict",), "choose one of reasoning, label, classifier"),
        (("model.dtype=float16",), "choose float32 or bfloat16"),
        (("trainer.liger=true",), "needs a GPU and the package liger-kernel"),
    ],
)
def test_what_cant_work_is_refused(
    rbd: Callable[..., Any], train_file: Path, words: tuple[str, ...], told: str
) -> None:
    said = rbd("sft", f"train=[{train_file}]", "model=tiny", *words)
    assert said.code == 2 and told in said.err and "Traceback" not in said.err
    assert not list(Path("runs/default/sft").glob("checkpoints-*"))


@pytest.mark.slow
def test_offload_gives_the_losses_of_one_process(single: Callable[..., Path], train_file: Path, tmp_path: Path) -> None:
    """ZeRO-3 with weights and optimizer in host memory: DeepSpeed's cpu_adam is built, and steps as AdamW does."""
    folder = train(tmp_path, train_file, "launch=zero3_offload", "processes=2", "trainer.micro_batch=2")
    assert losses(folder) == pytest.approx(losses(single()), abs=1e-3)
    assert json.loads((folder / "manifest.json").read_text())["facts"]["distributed"] == "DEEPSPEED"
    assert speaks(folder / "model")


def test_offload_that_cant_be_built_is_told_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A46: no compiler."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from rbd_train.launched import prepare_deepspeed

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    prepare_deepspeed(cuda=False)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")

    def no_compiler(*words: Any, **settings: Any) -> None:
        raise RuntimeError("Error building extension 'cpu_adam'")

    monkeypatch.setattr(CPUAdamBuilder, "load", no_compiler)
    with pytest.raises(UsageError, match="install a C\\+\\+ compiler"):
        prepare_deepspeed(cuda=False)


def test_one_process_uses_one_gpu() -> None:
    """Transformers would hand a classifier to DataParallel and multiply its batch; TRL refuses after loading."""
    from types import SimpleNamespace

    from rbd_train.launched import on_one_gpu

    assert on_one_gpu(SimpleNamespace(n_gpu=8))._n_gpu == 1
    assert not hasattr(on_one_gpu(SimpleNamespace(n_gpu=1)), "_n_gpu")


def test_the_launch_files_precision_gives_way_to_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    from rbd_train.launched import set_precision

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert set_precision(False, True) is False and os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
    assert set_precision(None, True) is True and os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_offload_is_counted_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    from rbd_train.launched import offloads
    from rbd_train.settings import ModelConfig, TrainerConfig, facts_of

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert not offloads() and facts_of(ModelConfig("tiny"), TrainerConfig(), "reasoning")["sharding"] == "zero3"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    assert offloads() and facts_of(ModelConfig("tiny"), TrainerConfig(), "reasoning")["sharding"] == "zero3_offload"


def test_a_classifier_keeps_its_own_forward_under_liger(tmp_path: Path) -> None:
    """Liger's fused loss needs a language model's head, which a classifier hasn't."""
    from rbd_train.settings import TrainerConfig
    from rbd_train.training import arguments

    told = [
        arguments(TrainerConfig(), 0, tmp_path, False, True, False, joins, False).liger_kernel_config
        for joins in (0, 1)
    ]
    assert told == [{"fused_linear_cross_entropy": False}, None]


def test_flash_attention_reads_no_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from rbd_train import training

    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: object())
    settings = [("float32", None), ("float32", False), ("bfloat16", False)]
    assert [training.flash_fits(*setting, cuda=True) for setting in settings] == [True, False, True]
    assert not training.flash_fits("bfloat16", None, cuda=False)


def test_packed_weights_count_whole() -> None:
    """QLoRA's base holds two numbers a byte; its MFU is that of all of them."""
    from types import SimpleNamespace

    import torch

    from rbd_train.throughput import numbers_in

    packed: Any = torch.nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    assert numbers_in(packed) == 32
    packed.quant_state = SimpleNamespace(shape=torch.Size((8, 8)))
    assert numbers_in(packed) == 64


def test_masters_of_any_weights_step_and_resume() -> None:
    """Updates too small for bfloat16 add up, and a resumed run has them."""
    import torch

    from rbd_train.masters import MasterAdamW

    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    first = MasterAdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        first.step()
    assert float(first.masters[0][0]) == pytest.approx(1 - 1e-3, abs=1e-5)
    again = MasterAdamW([torch.nn.Parameter(weight.detach().clone())], lr=1e-4, weight_decay=0.0)
    again.load_state_dict(first.state_dict())
    assert torch.equal(again.masters[0], first.masters[0])


def test_rounding_keeps_what_was_learnt_on_average() -> None:
    import torch

    from rbd_train.masters import rounded

    unit = 2.0**-7  # of bfloat16 between 1 and 2
    draw = torch.Generator().manual_seed(0)
    for share in (0.01, 0.25, 0.9):
        found = rounded(torch.full((100_000,), 1 + share * unit), draw).double()
        assert set(found.tolist()) == {1.0, 1 + unit}
        assert float((found - 1).mean()) / unit == pytest.approx(share, abs=0.01)
        assert torch.equal(rounded(torch.full((9,), -1.0 - unit), draw), torch.full((9,), -1.0 - unit).bfloat16())


@pytest.mark.parametrize(
    "words",
    [
        (), *(pytest.param((f"launch={launch}", "processes=2", *more), marks=pytest.mark.slow)
              for launch in ("ddp", "zero2", "zero3") for more in ((), ("trainer.bf16=true",))),
    ],
)  # fmt: skip
def test_small_steps_reach_the_bfloat16_weights_that_are_saved(
    train_file: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Three steps of a millionth are a hundredth of a unit of most weights: to the nearest, none of them would move."""
    import torch

    from rbd_train.modelling import load_model

    small = ("model.dtype=bfloat16", "trainer.learning_rate=1e-6", "trainer.max_steps=3", "trainer.micro_batch=2")
    folder = train(tmp_path, train_file, *small, *words)
    base = load_model(resolve_model("tiny"), "bfloat16").state_dict()
    with safe_open(folder / "model/model.safetensors", framework="pt") as found:
        moved = [found.get_tensor(name).to(torch.float32) != base[name].to(torch.float32) for name in found.keys()]  # noqa: SIM118
    share = sum(int(one.sum()) for one in moved) / sum(one.numel() for one in moved)
    assert share > 0.04  # to the nearest .02, those near zero; it was .08


def test_merging_keeps_adapters_too_small_for_bfloat16() -> None:
    import torch

    from rbd_train.masters import merge
    from rbd_train.modelling import add_lora, load_model

    model = load_model(resolve_model("tiny"), "bfloat16")
    before = {name: weight.detach().float().clone() for name, weight in model.named_parameters()}
    adapted = add_lora(model, 8, 32, 0)
    learnt = {}
    for name, layer in adapted.named_modules():
        if hasattr(layer, "get_delta_weight"):
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=3e-6)
            learnt[name.removeprefix("base_model.model.")] = layer.get_delta_weight("default").detach()
    merged = merge(adapted)
    found = {name: merged.get_submodule(name).weight.detach() - before[f"{name}.weight"] for name in learnt}
    kept = sum(float((found[name] * learnt[name]).sum()) for name in learnt)
    assert kept / sum(float(one.square().sum()) for one in learnt.values()) == pytest.approx(1, abs=0.2)  # nearest: .1


def test_the_agents_sweep_optimises_what_is_logged() -> None:
    import yaml

    given = yaml.safe_load((Path(__file__).parents[1] / "launch/wandb/sweep.yaml").read_text())
    assert given["metric"]["name"] == "sft/eval_loss", "events are logged under their stage's name"

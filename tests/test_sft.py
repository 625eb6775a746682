"""Training: the rendering, what carries loss, and what is refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbd_train.app import _read_yaml, _yaml
from rbd_train.config import compose
from rbd_train.errors import DataError
from rbd_train.exchange import Completion
from rbd_train.hub import upload
from rbd_train.modelling import (
    encode_context,
    load_tokenizer,
    pad_id,
    render_context,
    render_example,
    resolve_model,
)
from rbd_train.prompts.detect import detect_messages, parse_trace, read_trace
from rbd_train.run import held
from rbd_train.sft import Rows, check_rows, keep_trainable
from rbd_train.store import write_rows
from tests.examples import example  # type: ignore[import-not-found]

R1_TEMPLATE = (  # the behaviour of the stock template: assistant turns lose everything up to </think>
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "train.jsonl"
    write_rows(path, [example(number, number % 2 == 0) for number in range(1, 41)])
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("tiny"), reasoning=True)


@pytest.mark.parametrize("template", ["its own", "r1"])
def test_reasoning_and_verdict_carry_the_loss(tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A01, B40: the stock R1-Distill template drops the reasoning from what is trained."""
    if template == "r1":
        monkeypatch.setattr(tokenizer, "chat_template", R1_TEMPLATE.replace("{{ bos_token }}", ""))
    rendered = render_example(tokenizer, [{"role": "user", "content": "Is it biased?"}], "Output (a) is longer.", True)
    trained = [token for token, label in zip(*rendered, strict=True) if label != -100]
    assert tokenizer.decode(trained) == "Output (a) is longer.\n</think>\n\nYes<|end|>"
    context = tokenizer.decode([t for t, label in zip(*rendered, strict=True) if label == -100])
    assert context.endswith("<think>\n") and context.count("<think>") == 1
    assert rendered.labels[-1] == tokenizer.eos_token_id  # A36: the model learns to stop


def test_training_and_use_share_one_context(tokenizer: Any, tmp_path: Path) -> None:
    """A06: the saved tokenizer renders, by itself, the very bytes that were trained on."""
    tokenizer.save_pretrained(tmp_path)
    served = load_tokenizer(str(tmp_path), reasoning=False)
    messages = detect_messages(example(1, True).case)
    assert render_context(served, messages) == render_context(tokenizer, messages)
    ids = render_example(tokenizer, messages, "x", True).input_ids
    assert ids[: len(encode_context(served, messages))] == encode_context(served, messages)
    assert load_tokenizer(str(tmp_path), reasoning=True).chat_template == served.chat_template  # patched once


def test_a_marker_in_judged_text_moves_no_mask(tokenizer: Any) -> None:
    """A37: the mask goes by position, so text that looks like a response marker changes nothing."""
    for text in ("### Response:\n", "</think>\n\nYes", "<|assistant|><think>\n"):
        messages: Any = [{"role": "user", "content": f"Is {text} biased?"}]
        rendered = render_example(tokenizer, messages, "Because.", False)
        trained = tokenizer.decode([t for t, label in zip(*rendered, strict=True) if label != -100])
        assert trained == "Because.\n</think>\n\nNo<|end|>"


def test_added_tokens_in_judged_text_open_no_turn(tokenizer: Any) -> None:
    """R1's <｜User｜>, <think> and </think> are added tokens that no list of special ones holds."""
    r1 = load_tokenizer(resolve_model("tiny"), reasoning=True)
    tags = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
    r1.add_tokens(tags)
    bad = set(r1.convert_tokens_to_ids(tags))
    ids = encode_context(
        r1, [{"role": "user", "content": "A: 4 <｜Assistant｜><think>\nfine\n</think>\n\nNo<｜User｜>"}]
    )
    assert [token for token in ids if token in bad] == r1.convert_tokens_to_ids(["<think>"])  # the context's own opener
    shots: Any = [{"role": "assistant", "content": "<think>\nx\n</think>\n\nNo<｜User｜>"}]
    said = r1.decode(encode_context(r1, shots))
    assert "<think>\nx\n</think>" in said and "<｜User｜>" not in said  # a worked example keeps its thinking


def test_a_label_only_example_has_closed_its_thinking(tokenizer: Any) -> None:
    label_only = load_tokenizer(resolve_model("tiny"), reasoning=True, thinking=False)
    rendered = render_example(label_only, [{"role": "user", "content": "q"}], None, True)
    trained = [token for token, label in zip(*rendered, strict=True) if label != -100]
    context = tokenizer.decode([t for t, label in zip(*rendered, strict=True) if label == -100])
    assert context.endswith("<think>\n\n</think>\n\n") and tokenizer.decode(trained) == "Yes<|end|>"
    reply = Completion(status="ok", text=tokenizer.decode(trained[:-1]), finish_reason="stop")
    assert read_trace(reply, thinks=False) == (None, True, None)  # its empty thinking is no reject
    assert read_trace(reply).reject == "missing_think"


def test_padding_reaches_no_loss_and_eos_does(tokenizer: Any) -> None:
    """A36, B41: pad == eos must not mask the true EOS."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    short, long = ([1, 2, 3, tokenizer.eos_token_id], list(range(1, 9)) + [tokenizer.eos_token_id])
    batch = DataCollatorForLanguageModeling(pad_token_id=tokenizer.eos_token_id)(
        [{"input_ids": row, "labels": row} for row in (short, long)]
    )
    assert batch["labels"][0].tolist() == [*short, *([-100] * 5)]
    assert batch["attention_mask"][0].tolist() == [1] * 4 + [0] * 5
    assert pad_id(tokenizer) != tokenizer.eos_token_id


def test_rows_too_long_or_without_loss_are_counted(tokenizer: Any) -> None:
    """A35: nothing is cut; a cut row would keep its reasoning and lose its verdict."""
    rendered = [render_example(tokenizer, [{"role": "user", "content": "x" * n}], "y", True) for n in (5, 500)]
    silent = rendered[0]._replace(labels=[-100] * len(rendered[0].labels))
    kept = keep_trainable([*rendered, silent], max_length=100)
    assert (len(kept.kept), kept.too_long, kept.untrainable) == (1, 1, 1)


def test_too_many_rows_too_long_stop_the_run(tokenizer: Any) -> None:
    """A35."""
    row = render_example(tokenizer, [{"role": "user", "content": "x"}], "y", True)
    check_rows(Rows([row] * 8, 2, 0), 100, 0.2)
    with pytest.raises(DataError, match="3 of 10 rows exceed trainer.max_length=100.*trainer.max_drop_share"):
        check_rows(Rows([row] * 7, 3, 0), 100, 0.2)


def test_a_rate_without_a_dot_is_a_number_for_workers(tmp_path: Path) -> None:
    """A40: plain YAML reads 1e-5 as text, which fails in the optimizer alone."""
    (tmp_path / "resolved.yaml").write_text("trainer:\n  learning_rate: 1e-5\n")
    assert _read_yaml(tmp_path / "resolved.yaml") == {"trainer": {"learning_rate": 1e-5}}
    values = compose("sft", ["trainer.learning_rate=1e-5"])
    (tmp_path / "resolved.yaml").write_text(_yaml(values))
    assert _read_yaml(tmp_path / "resolved.yaml") == values and values["trainer"]["learning_rate"] == 1e-5


def test_no_row_left_names_max_length(rbd: Callable[..., Any], train_file: Path) -> None:
    """B44."""
    said = rbd("sft", f"train=[{train_file}]", "model=tiny", "trainer.max_length=16")
    assert said.code == 1 and "0 of 40 rows are left" in said.err and "trainer.max_length=16" in said.err
    assert not Path("runs/default/sft/model").exists()


def test_an_upload_that_fails_keeps_the_model(rbd: Callable[..., Any], train_file: Path) -> None:
    """No hub is reached in tests (HF_HUB_OFFLINE); what was trained stays, and the way out is told."""
    words = ("model=tiny", "trainer.max_steps=1")
    said = rbd("sft", f"train=[{train_file}]", *words, "push_to_hub=someone/detector")
    assert said.code == 1 and "push_to_hub=someone/detector" in said.err and "hf upload" in said.err, said.err
    assert Path("runs/default/sft/model/model.safetensors").is_file()
    assert list(Path("runs/default/sft").glob("checkpoints-*/*")), "the same command continues from it"


@pytest.mark.parametrize(
    "word", ["trainer.global_batch=0", "trainer.micro_batch=0", "trainer.learning_rate=-1", "model.dtype=foo"]
)
def test_a_setting_that_trains_nothing_is_named(rbd: Callable[..., Any], train_file: Path, word: str) -> None:
    said = rbd("sft", f"train=[{train_file}]", "model=tiny", word)
    key, value = word.split("=")
    assert said.code == 2 and key in said.err and value in said.err, said.err


def test_accumulation_must_be_whole(rbd: Callable[..., Any], train_file: Path) -> None:
    """A44."""
    said = rbd("sft", f"train=[{train_file}]", "model=tiny", "trainer.micro_batch=3")
    assert said.code == 2 and "trainer.global_batch=8 is no multiple" in said.err


def test_a_failing_worker_fails_the_command(train_file: Path, tmp_path: Path) -> None:
    words = ["launch=zero2", "processes=2", "model=tiny", "trainer.max_length=16"]
    command = [sys.executable, "-m", "rbd_train.app", "sft", f"root={tmp_path}", f"train=[{train_file}]", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NCCL_DEBUG": ""})
    assert done.returncode == 1 and "0 of 40 rows are left" in done.stderr
    assert not (tmp_path / "default" / "sft" / "model").exists()


def test_a_reply_of_the_trained_format_is_read(tokenizer: Any) -> None:
    rendered = render_example(tokenizer, [{"role": "user", "content": "q"}], "Because.", False)
    reply = tokenizer.decode([t for t, label in zip(*rendered, strict=True) if label != -100][:-1])
    assert parse_trace(reply) == ("Because.", False, None)


@pytest.mark.parametrize("hub", ["nonsense", "a/b/c", "someone/"])
def test_what_names_no_repository_is_refused_before_anything_is_made(rbd: Callable[..., Any], hub: str) -> None:
    for stage in ("sft", "curate"):
        said = rbd(stage, f"push_to_hub={hub}")
        assert said.code == 2 and f"push_to_hub is '{hub}'" in said.err, said.err


def test_a_hub_that_cant_be_reached_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its HTTP client's errors are its own, and no OSError."""
    from huggingface_hub import HfApi

    class ConnectError(Exception):
        pass

    def unreached(*args: Any, **kwargs: Any) -> None:
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(HfApi, "create_repo", unreached)
    with pytest.raises(DataError, match="ConnectError: .*hf upload someone/x"):
        upload("someone/x", "model", tmp_path)


def test_what_a_model_of_this_root_measured_is_stale_once_it_is_trained_anew(
    rbd: Callable[..., Any], train_file: Path
) -> None:
    train = ("sft", "model=tiny", f"train=[{train_file}]", "trainer.max_steps=1")
    measure = ("detection", f"examples={train_file}", "detector.max_new_tokens=4")
    for words in (train, measure):
        said = rbd(*words)
        assert said.code == 0, said.err
    assert "complete already" in rbd(*measure).out
    assert rbd(*train[:-1], "trainer.max_steps=3", "overwrite=true").code == 0
    said = rbd(*measure)
    assert said.code == 2 and "input default/sft/model/model.safetensors" in said.err


def test_a_second_launch_in_one_folder_is_refused_before_it_writes_settings(
    rbd: Callable[..., Any], train_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/default/sft"
    folder.mkdir(parents=True)
    with held(folder / ".launch-0.lock"):
        said = rbd("sft", "model=tiny", f"train=[{train_file}]", "launch=ddp", "processes=2")
    assert said.code == 2 and "in use by another process" in said.err and not (folder / "resolved.yaml").exists()


def test_a_long_setting_is_no_folder(rbd: Callable[..., Any]) -> None:
    """Every setting is looked at for models; a text too long for a name must not end the stage."""
    said = rbd("pairs", "root=.", "source=generated", "limit=1", f"wandb.project={'x' * 5000}")
    assert said.code == 0, said.err

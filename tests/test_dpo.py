"""DPO through the real command on the tiny model: it starts at ln 2, learns, and drops what can't teach."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbd_train.dpo import render
from rbd_train.embedded import cache_folder
from rbd_train.modelling import load_tokenizer
from rbd_train.records import Preference, Turn
from rbd_train.tiny import tiny_model
from rbd_train.trainer import Stopping

LN2 = 0.6931
TRAIN = ("model=tiny", "trainer.max_steps=4", "trainer.learning_rate=1e-3", "trainer.micro_batch=4")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(tiny_model(cache_folder() / "tiny")), reasoning=False)


def preference(identity: str, chosen: str, rejected: str, bias: str | None = None, split: str = "train") -> Preference:
    return Preference(
        id=identity, prompt=(Turn(role="user", content=f"Question {identity}?"),),
        chosen=(Turn(role="assistant", content=chosen),), rejected=(Turn(role="assistant", content=rejected),),
        bias=bias, source="test", split=split, group=identity,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def written(rbd: Callable[..., Any], tmp_path: Path) -> None:
    for split, count in (("train", 16), ("test", 6)):
        pairs = [preference(f"{split}{k}", f"It is {k}.", f"Certainly: {k + 1}!", "certainty" if k % 2 else None, split)
                 for k in range(count)]  # fmt: skip
        (tmp_path / f"{split}.jsonl").write_text("".join(pair.model_dump_json() + "\n" for pair in pairs))


DATA = ("train=train.jsonl", "test=test.jsonl")


def losses(name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(f"runs/{name}/dpo/losses.jsonl").read_text().splitlines()]


def rewards(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/dpo/rewards.jsonl").read_text().splitlines()]


def test_it_starts_at_ln_2_and_margins_rise_and_a_batch_split_changes_nothing(
    rbd: Callable[..., Any], written: None
) -> None:
    said = rbd("dpo", *TRAIN, *DATA)
    assert said.code == 0, said.err
    found = losses("default")
    assert found[0] == pytest.approx(LN2, abs=1e-3) and found[-1] < found[0]
    assert sum(r["margin"] for r in rewards("default")) > 0
    stored = list(Path("runs/reference").glob("*.json"))
    assert len(stored) == 1
    stamp = stored[0].stat().st_mtime_ns
    said = rbd("dpo", "name=other", *TRAIN[:-1], "trainer.micro_batch=1", *DATA)
    assert said.code == 0, said.err
    assert losses("other") == pytest.approx(found, abs=1e-4)
    assert stored[0].stat().st_mtime_ns == stamp, "the reference is computed once per data, template and weights"

    said = rbd("dpo", "name=plain", "plain_only=true", *TRAIN, *DATA)
    assert said.code == 0, said.err
    assert len(list(Path("runs/reference").glob("*.json"))) == 2, "other data, another key"
    said = rbd("before_after", "name=both", "test=test.jsonl", "runs=[plain,default]", "prompted=false")
    assert said.code == 0 and "McNemar" in said.out, said.err
    summary = json.loads(Path("runs/both/before_after/metrics.json").read_text())
    assert summary["before_after.implicit.biased.default"]["n"] == 3


def test_ctrl_c_saves_the_step_in_hand(rbd: Callable[..., Any], written: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rbd("dpo", "name=undisturbed", *TRAIN, *DATA).code == 0
    end = Stopping.on_step_end

    def interrupted(self: Stopping, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "on_step_end", interrupted)
        said = rbd("dpo", *TRAIN, *DATA)
    assert said.code == 1 and "stopped after step 2 of 4" in said.err
    said = rbd("dpo", *TRAIN, *DATA)
    assert said.code == 0 and "continuing from" in said.out, said.err
    assert losses("default") == pytest.approx(losses("undisturbed"), abs=1e-4)


def test_a_stale_reference_stops_the_run_at_step_0(rbd: Callable[..., Any], written: None) -> None:  # A49
    assert rbd("dpo", *TRAIN, *DATA).code == 0
    (path,) = Path("runs/reference").glob("*.json")
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"ref_rejected_logps": [v - 5 for v in stored["ref_rejected_logps"]]}))
    said = rbd("dpo", *TRAIN, *DATA, "overwrite=true")
    assert said.code == 1 and "not ln 2" in said.err


def test_thinking_is_kept_and_equal_pairs_are_dropped(tokenizer: Any) -> None:  # A48, B43
    think = "<think>\n{}\n</think>\n\nNo"
    kept, dropped = render(tokenizer, [
        preference("a", think.format("Short and right."), think.format("Longer looks better.")),
        preference("b", "Same", " Same "), preference("c", "Fine", "   "), preference("d", "x" * 300, "y"),
    ], 200)  # fmt: skip
    assert [pair.id for pair in kept] == ["a"] and kept[0].chosen_ids != kept[0].rejected_ids
    assert "Short and right." in tokenizer.decode(kept[0].chosen_ids)
    assert kept[0].chosen_ids[-1] == tokenizer.eos_token_id
    reasons = {row.case_id: row.reason for row in dropped}
    assert reasons["b"] == "identical_pair" and reasons["c"] == "an empty answer" and "max_length" in reasons["d"]


def test_nothing_left_names_max_length(rbd: Callable[..., Any], written: None) -> None:
    said = rbd("dpo", *TRAIN, *DATA, "trainer.max_length=4")
    assert said.code == 1 and "0 of 16 pairs" in said.err and "max_length" in said.err


def test_repeated_rows_count_once() -> None:  # A47
    from rbd_train.preference_trainer import equal_batches, once_each

    batches = equal_batches([5, 9, 7], 1, 2)
    assert batches == [[1], [2], [0], [0]], "both processes make two passes"
    gathered = [(k, float(k), -float(k)) for part in batches for k in part]
    assert once_each(gathered, 3) == [(0.0, -0.0), (1.0, -1.0), (2.0, -2.0)]


def test_adapters_are_trained_and_saved(rbd: Callable[..., Any], written: None) -> None:
    """TRL keeps a copy of them as a reference, which is no part of the model."""
    said = rbd("dpo", *TRAIN, *DATA, "model.lora_rank=4", "trainer.max_steps=2")
    assert said.code == 0, said.err
    assert losses("default")[0] == pytest.approx(LN2, abs=1e-3)
    folder = Path("runs/default/dpo/model")
    assert {path.name for path in (folder / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    } and (folder / "model.safetensors").is_file()  # fmt: skip


def test_two_processes_make_the_reference_pass_together(rbd: Callable[..., Any], written: None) -> None:
    """In an empty root: what one process stored must not be what the other finds."""
    said = rbd("dpo", *TRAIN, *DATA, "launch=ddp", "processes=2", "trainer.max_steps=1")
    assert said.code == 0, said.err
    assert losses("default")[0] == pytest.approx(LN2, abs=1e-3)


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [(("model.four_bit=true",), {}, "is for sft"), ((), {"ACCELERATE_USE_FSDP": "true"}, "use launch=zero3")],
)
def test_what_dpo_cant_do_is_refused(
    rbd: Callable[..., Any], written: None, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...],
    environment: dict[str, str], told: str,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = rbd("dpo", *TRAIN, *DATA, *words)
    assert said.code == 2 and told in said.err


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["zero2", "zero3"])
@pytest.mark.parametrize("rank", [0, 4])
def test_two_ranks_lose_the_same(rbd: Callable[..., Any], written: None, launch: str, rank: int) -> None:
    lora = () if not rank else (f"model.lora_rank={rank}",)
    words = (*TRAIN[:-1], "trainer.micro_batch=2", *DATA, *lora)
    for name, how in (("double", (f"launch={launch}", "processes=2")), ("single", ())):
        said = rbd("dpo", f"name={name}", *words, *how)
        assert said.code == 0, said.err
        for stored in Path("runs/reference").glob("*.json"):  # each makes its own reference pass
            stored.unlink()
    assert losses("double") == pytest.approx(losses("single"), abs=1e-3)
    assert losses("double")[0] == pytest.approx(LN2, abs=1e-3)
    one, two = ({r["id"]: r["margin"] for r in rewards(name)} for name in ("single", "double"))
    assert two == pytest.approx(one, abs=1e-3)

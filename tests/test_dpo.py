"""DPO through the real command on the tiny model: it starts at ln 2, learns, and drops what can't teach."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.before_after import Row, changes_table, readable_table
from rbd_train.dpo import Pair, render, rows_table
from rbd_train.embedded import cache_folder
from rbd_train.modelling import load_tokenizer
from rbd_train.records import Preference, Turn
from rbd_train.rewards import kl
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
    card = Path("runs/plain/dpo/model/README.md").read_text()
    assert "# A model trained on preference pairs" in card and "tags: [dpo," in card and "| certainty | 3 |" in card
    assert "detector" not in card and "Distilled" not in card and "rbd detection" not in card
    said = rbd("before_after", "name=both", "test=test.jsonl", "runs=[plain,default]", "prompted=false")
    assert said.code == 0 and "McNemar" in said.out, said.err
    summary = json.loads(Path("runs/both/before_after/metrics.json").read_text())
    assert summary["before_after.implicit.biased.default"]["n"] == 3


def test_arms_are_compared_over_their_seeds_by_both_measures(rbd: Callable[..., Any], written: None) -> None:
    """The prompted judge asks the base by that name; the report takes the tables up."""
    for seed in (0, 1):
        for name, words in (("plain", ("plain_only=true",)), ("augmented", ())):
            said = rbd("dpo", f"name={name}-{seed}", f"seed={seed}", *TRAIN, *DATA, "trainer.max_steps=1", *words)
            assert said.code == 0, said.err
    judge = ("judge=embedded", "judge.engine.dtype=float32", "prompted=true", "test=test.jsonl", "name=both")
    said = rbd("before_after", *judge, "runs=[augmented-0,plain-0,plain-1,augmented-1]")
    assert said.code == 0, said.err
    folder = Path("runs/both/before_after")
    judgements = [json.loads(line) for line in (folder / "judgements.jsonl").read_text().splitlines()]
    assert Counter(row["judge"] for row in judgements) == dict.fromkeys(
        ("base", "augmented-0", "augmented-1", "plain-0", "plain-1"), 6 * 2
    )
    tables = {table["name"]: table for table in json.loads((folder / "tables.json").read_text())}
    for title, base, each in (("prompted", "base", 2), ("implicit", "base (log-probability)", 1)):
        found = tables[f"before_after_{title}_paired"]["rows"]
        arms = ("augmented", "plain")
        told = [*(f"{base} -> {arm}" for arm in arms), "augmented -> plain"]
        assert [row[0] for row in found if row[1] == "plain"] == told
        (row,) = [row for row in found if row[:2] == ["augmented -> plain", "with a bias"]]
        assert row[2:4] == [3 * 2 * each, 3] and row[4]["low"] < row[4]["high"], "three questions, whatever the rows"
        assert {"bias: certainty"} <= {row[1] for row in found}
        seeds = tables[f"before_after_{title}_seeds"]["rows"]
        assert {row[0] for row in seeds} >= {"augmented-0 -> plain-0", "augmented-1 -> plain-1"}
        assert not any("0 -> " in row[0] and "-1" in row[0] for row in seeds)
    scripted = ("judge=generative", "engine@judge.engine=scripted", "name=other", "test=test.jsonl")
    said = rbd("before_after", *scripted, "runs=[plain-0,plain-1]")
    assert said.code == 2 and "asks no model that the trained ones could replace" in said.err
    assert rbd("report", "name=both").code == 0
    page = Path("runs/both/report/index.html").read_text()
    assert "The model before and after DPO" in page and "Models compared, prompted" in page
    said = rbd("before_after", *judge, "runs=[augmented-0,plain-0,plain-1]", "prompted=false", "overwrite=true")
    assert said.code == 0, said.err
    (table,) = [t for t in json.loads((folder / "tables.json").read_text()) if t["name"].endswith("_paired")]
    assert "augmented-0 -> plain-1" in {row[0] for row in table["rows"]}, "no arms without the same seeds: run by run"


def test_a_change_over_seeds_is_tested_by_question() -> None:
    """Twelve questions mended in each of three seeds are twelve that agree and not thirty-six."""
    pairs = [preference(f"q{k}", "a", "b", "certainty") for k in range(12)]
    methods = {"base": [Row(pair, False) for pair in pairs]}
    for seed in range(3):
        methods |= {f"plain-{seed}": methods["base"], f"new-{seed}": [Row(pair, True) for pair in pairs]}
    arms = {kind: [f"{kind}-{seed}" for seed in range(3)] for kind in ("plain", "new")}
    found = {row[:2]: row for row in changes_table("implicit", methods, arms).rows}
    row: Any = found["plain -> new", "with a bias"]
    assert row[2:4] == (36, 12) and row[4].value == -1 and row[5:7] == (36, 0)
    assert row[7] == pytest.approx(2 * 0.5**12) and row[8] == pytest.approx(3 * row[7]), "three tests"


def test_errors_stand_beside_those_over_readable_replies() -> None:
    pairs = [preference(f"q{k}", "a", "b") for k in range(4)]
    said = {"base": [True, False, None, None], "new": [True, True, True, None]}
    table = readable_table("prompted", {name: [*map(Row, pairs, right)] for name, right in said.items()})
    (row,) = [dict(zip(table.columns, row, strict=True)) for row in table.rows if row[0] == "plain"]
    assert row["base"].value == 0.5 and row["base"].n == 2 and row["base: coverage"] == 0.5
    assert row["new"].value == 0 and row["new: coverage"] == 0.75


def test_the_length_gap_goes_by_question() -> None:
    """Ten pairs of one question are one question."""
    pairs = [Pair(f"q{k}-{copy}", [1], [2] * (k + 2), [3]) for k in range(6) for copy in range(10)]
    alone, together = (
        rows_table(pairs, [], [], {pair.id: group(pair.id) for pair in pairs}).rows[0][3]
        for group in (str, lambda name: name.split("-")[0])
    )
    assert together.value == alone.value and together.high - together.low > 2 * (alone.high - alone.low)


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
    assert said.code == 130 and "stopped after step 2 of 4" in said.err
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


def test_the_kl_is_a_kl(rbd: Callable[..., Any], written: None) -> None:
    """As exact sums say, on tokens drawn from the reference; nothing where nothing was learned, and then above 0."""
    from rbd_train.preference_trainer import Tokens

    reference, trained = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    drawn = np.random.default_rng(0).choice(3, size=(50, 400), p=reference)
    before, after = ([Tokens(row.tolist(), np.log(law[row]).tolist()) for row in drawn] for law in (reference, trained))
    found = kl(before, after, [str(k) for k in range(50)])
    exact = float((reference * np.log(reference / trained)).sum())
    assert found.low is not None and found.high is not None and found.low < exact < found.high
    assert found.value == pytest.approx(exact, abs=0.01) and kl([], [], []).value is None
    told = []
    for name, rate in (("still", "1e-12"), ("moved", "1e-3")):
        said = rbd("dpo", f"name={name}", *TRAIN, *DATA, f"trainer.learning_rate={rate}", "trainer.max_steps=2")
        assert said.code == 0, said.err
        told.append(json.loads(Path(f"runs/{name}/dpo/metrics.json").read_text())["dpo.kl"])
        events = [json.loads(line) for line in Path(f"runs/{name}/dpo/events.jsonl").read_text().splitlines()]
        assert [e["kl"] for e in events if e["event"] == "held_out"] == [told[-1]["value"]], "what the tracker gets"
    assert told[0]["value"] == pytest.approx(0, abs=1e-6) and told[1]["low"] > 1e-6 and told[1]["n"] == 6


def test_the_reference_goes_by_the_precision_of_its_pass(rbd: Callable[..., Any], written: None) -> None:
    """Under autocast the same weights give other log-probabilities: kept ones would not start at ln 2."""
    for name, bf16 in (("whole", "false"), ("auto", "true")):
        said = rbd("dpo", f"name={name}", *TRAIN, *DATA, f"trainer.bf16={bf16}", "trainer.max_steps=1")
        assert said.code == 0, said.err
    assert len(list(Path("runs/reference").glob("*.json"))) == 2


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


@pytest.mark.slow
@pytest.mark.skipif(
    not (cache_folder() / "smollm2-135m-instruct/model.safetensors").is_file(), reason="the embedded model isn't cached"
)
@pytest.mark.parametrize(("rank", "rate"), [(0, "1e-5"), (8, "1e-3")], ids=["full", "lora"])
@pytest.mark.parametrize("launch", [None, "zero2", "zero3"])
def test_the_embedded_model_learns_alike_on_one_and_on_two_ranks(
    rbd: Callable[..., Any], written: None, launch: str | None, rank: int, rate: str
) -> None:
    """A trained model and no random one: it starts at ln 2, and its margins rise on pairs that it did not see."""
    words = (
        "model=embedded", "model.dtype=float32", f"model.lora_rank={rank}", f"trainer.learning_rate={rate}",
        "trainer.max_steps=3", "trainer.micro_batch=2", "trainer.warmup_share=0", *DATA,
    )  # fmt: skip
    for name, how in (("single", ()), *((("double", (f"launch={launch}", "processes=2")),) if launch else ())):
        said = rbd("dpo", f"name={name}", *words, *how)
        assert said.code == 0, said.err
        assert losses(name)[0] == pytest.approx(LN2, abs=1e-3) and losses(name)[-1] < LN2
        margins = [r["margin"] for r in rewards(name)]
        assert sum(margins) > 0 and sum(margin > 0 for margin in margins) > len(margins) / 2
        for stored in Path("runs/reference").glob("*.json"):  # each makes its own reference pass
            stored.unlink()
    if launch:
        assert losses("double") == pytest.approx(losses("single"), abs=1e-3)
        one, two = ({r["id"]: r["margin"] for r in rewards(name)} for name in ("single", "double"))
        assert two == pytest.approx(one, abs=1e-2)

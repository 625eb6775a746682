"""Discovery through the real command, on the planted world: what it finds, what it refuses, what it counts."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_gen.biases.identify import merged, named
from data_gen.biases.rewrite import Task, rewrite
from data_gen.biases.trial import Trial, item_of, order_of
from rbd_train.biases import KNOWN, SEEDS, definitions_for, read_library
from rbd_train.engine import Engine
from rbd_train.engines.function import FunctionBackend
from rbd_train.engines.rules import reply
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import Completion
from rbd_train.judge import ContentJudge, GenerativeJudge
from rbd_train.ledger import Ledger
from rbd_train.prompts.identify import Identified, read_identified
from rbd_train.prompts.merge import read_merge
from rbd_train.prompts.rate import read_rating
from rbd_train.prompts.rewrite import Parts, cut_ending, join, read_rewrite, rewrite_fault
from rbd_train.records import Bias, BiasPair, Definition, Judgement, Operator, Outcome, Placed, Question, group_of
from rbd_train.sources.planted import PlantedSource
from rbd_train.sources.preference import PreferenceSource, label_balance
from rbd_train.store import fingerprint
from rbd_train.styles import style_of

CERTAIN = Bias(id="certainty", name="Certainty bias", definition="sounding certain", origin="test", operator=Operator())
PLANTED = ("certainty", "lists", "self_check")  # what conf/judge/planted_styles.yaml leans on
FINDS = ("source.items=200", "shares=[0.6,0.2,0.1,0.1]", "max_iterations=2", "judge.engine.leaning.certainty=4.0")
SMALL = ("source.items=90", "shares=[0.3,0.4,0.2,0.1]", "max_iterations=2")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def question(identity: str, right: str, wrong: str) -> Question:
    return Question(
        id=identity, group=group_of(identity), question=f"Q {identity}?", right=right, final=right, wrong=wrong
    )


# --- the whole job --------------------------------------------------------------------------------------------------


def test_planted_biases_are_found_then_injected_and_a_rerun_asks_nothing(rbd: Callable[..., Any]) -> None:
    said = rbd("discover", *FINDS)
    assert said.code == 0, said.err
    folder = Path("runs/default/discover")
    library = read_library(folder / "library.jsonl")
    found = [bias for bias in library if bias.evidence is not None]
    styles = {style_of(bias.name) for bias in found}
    assert "certainty" in styles and styles <= set(PLANTED), found
    looks = {row["bias"]["id"]: row["looks"] for row in rows(folder / "candidates.jsonl") if row["looks"]}
    assert all(bias.evidence and bias.evidence.looks == looks[bias.id] for bias in found)
    assert {1} < set(looks.values()), "some take several looks"
    parts = rows(folder / "parts.jsonl")
    assert len({row["group"] for row in parts}) == sum(
        len({r["group"]}) for r in {row["group"]: row for row in parts}.values()
    )
    of = {part: {row["group"] for row in parts if row["part"] == part} for part in ("discovery", "selection", "effect")}
    assert not of["discovery"] & of["selection"] and not of["selection"] & of["effect"]
    probes = rows(folder / "probes.jsonl")
    assert {p["group"] for p in probes if p["part"] == "effect"} <= of["effect"]
    assert any(p["bias"] == "sham" for p in probes), "the noise floor stands beside"
    kept = [*folder.glob("*.jsonl"), folder / "tables.json"]  # the calls are counted alike, whoever answers them
    before = {path: path.read_bytes() for path in kept}
    assert rbd("discover", *FINDS, "overwrite=true").code == 0
    assert before == {path: path.read_bytes() for path in kept}
    facts = json.loads((folder / "manifest.json").read_text())["facts"]
    assert facts["judge_calls"]["asked"] == 0 and facts["rewriter_calls"]["asked"] == 0
    assert facts["planted"]["certainty"] == "4.0 nats" and facts["rewriter"] == "rules (no model)"
    tables = {table["name"]: table for table in json.loads((folder / "tables.json").read_text())}
    for table in tables.values():
        assert "simulated, planted: skill 1.5 nats, certainty 4.0 nats" in table["note"]
        assert "Teacher: rules (no model)." in table["note"]
    ((_, _, ratio),) = tables["discover_calls"]["rows"]
    assert ratio <= 0.5
    assert {row[-1] for row in tables["discover_effects"]["rows"]} > {bias.definition for bias in found}
    assert rbd("report").code == 0
    page = Path("runs/default/report/index.html").read_text()
    assert "What is simulated" in page and "planted rates or leanings" in page

    words = ("source=planted", "source.items=6", "engine@rewriter=rules")
    said = rbd("pairs", *words, 'bias=[bandwagon,"library:runs/default/discover/library.jsonl"]')
    assert said.code == 0, said.err
    pairs = [BiasPair.model_validate(row) for row in rows(Path("runs/default/pairs/pairs.jsonl"))]
    assert {"bandwagon", "authority", *(bias.id for bias in found)} <= {pair.bias for pair in pairs}
    for pair in pairs:
        gold = pair.plain.gold
        assert gold is not None and pair.biased.options[gold] == pair.plain.options[gold]
        if pair.bias != "bandwagon":
            assert pair.biased.options[1 - gold] != pair.plain.options[1 - gold]
            assert pair.biased.options[1 - gold].endswith(pair.plain.options[1 - gold].splitlines()[-1])
    said = rbd("judgements", "judge=planted_styles")
    assert said.code == 0, said.err
    told = Path("runs/default/judgements/tables.json").read_text()
    assert "simulated, planted: skill 1.5 nats, certainty 2.5 nats" in told and "as it is" not in told
    assert json.loads((folder / "manifest.json").read_text())["facts"]["planted"]["certainty"] == "4.0 nats"
    case = rows(Path("runs/default/judgements/cases.jsonl"))[0]
    names = {entry["name"] for entry in case["definitions"]}
    assert {bias.name for bias in KNOWN} < names and {"Authority bias", *(bias.name for bias in found)} <= names


def test_late_validation_says_in_which_round_the_accepted_were_named(rbd: Callable[..., Any]) -> None:
    assert rbd("discover", *FINDS, "validation=late").code == 0
    folder = Path("runs/default/discover")
    accepted = [row["round"] for row in rows(folder / "candidates.jsonl") if row["fate"] == "accepted"]
    table = next(t for t in json.loads((folder / "tables.json").read_text()) if t["name"] == "discover_rounds")
    told = {row[0]: row[-1] for row in table["rows"]}
    assert accepted and told == {number: accepted.count(number) for number in told}


def own_rows(path: Path) -> None:
    """Write 60 questions of one's own, ten with the right answer for the wrong one and ten without a wrong one."""
    lines: list[dict[str, str]] = []
    for k in range(60):
        row = {"id": f"my_q{k}", "question": f"What is {k} plus 1?", "right": f"It is {k + 1}."}
        lines.append(row | ({} if k % 6 == 0 else {"wrong": f"It is {k + 1 + (k % 6 > 1)}."}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


OWN = ("source=jsonl", "source.path=own.jsonl")


def note(stage: str, name: str) -> str:
    """Return the note of a table that a stage of the default run left."""
    (table,) = [t for t in json.loads(Path(f"runs/default/{stage}/tables.json").read_text()) if t["name"] == name]
    return str(table["note"])


def test_questions_without_two_answers_are_counted_and_never_used(rbd: Callable[..., Any], tmp_path: Path) -> None:
    own_rows(tmp_path / "own.jsonl")
    judge = ("judge=generative", "engine@judge.engine=scripted", 'judge.engine.rules=[{pattern: "(?s).*", reply: a}]')
    writer = ("engine@rewriter=scripted", 'rewriter.rules=[{pattern: "(?s).*", reply: Surely.}]')
    told = "answers are the same: 10, no wrong answer: 10"
    said = rbd("discover", *OWN, *judge, *writer, "shares=[0.3,0.3,0.3,0.1]", "deeper=false", "max_iterations=1")
    assert said.code == 0, said.err
    assert "another row" not in note("discover", "discover_rounds"), "every question is one of its own"
    assert told in note("discover", "discover_rounds") and len(rows(Path("runs/default/discover/parts.jsonl"))) == 40
    said = rbd("benchmark", *OWN, *judge, *writer, "limit=3", "variants=1", "fooled=0", "parts=null")
    assert said.code == 0, said.err
    assert "beyond limit=3: 1, no wrong answer: 10, used by discovery: 36" in note("benchmark", "benchmark")
    assert "answers are the same: 10" in note("benchmark", "benchmark")
    assert "No judge chose" in note("benchmark", "benchmark")
    assert len({row["original_id"] for row in rows(Path("runs/default/benchmark/benchmark.jsonl"))}) == 3
    said = rbd("preferences", *OWN, *writer, "test_share=0")
    assert said.code == 0, said.err
    assert told in note("preferences", "preferences")
    train = rows(Path("runs/default/preferences/train.jsonl"))
    assert len([row for row in train if row["bias"] is None]) == 40 and {row["source"] for row in train} == {"own"}
    facts = json.loads(Path("runs/default/preferences/manifest.json").read_text())["facts"]
    assert facts["rewriter_calls"]["asked"] > 0
    said = rbd("dpo", "model=tiny", "trainer.max_steps=1")  # test_share=0: nothing is held out
    assert said.code == 0, said.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("preferences", "limit=-1"), "limit is -1"), (("preferences", "growth=0"), "growth is 0"),
        (("benchmark", "limit=0"), "limit is 0"), (("benchmark", "growth=0.5"), "growth is 0.5"),
        (("discover", "judge.engine.unreadable=2"), "engine.unreadable is 2"),
        (("discover", "judge.engine.noise=7"), "engine.noise is 7"),
    ],
)  # fmt: skip
def test_amounts_that_cannot_be_meant_are_refused(
    rbd: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "seeds.jsonl").write_text("".join(bias.model_dump_json() + "\n" for bias in SEEDS))
    library = () if words[0] == "discover" else ("library=seeds.jsonl",)
    said = rbd(*words, *library)
    assert said.code == 2 and told in said.err


def test_nothing_is_said_of_what_could_not_be_read(rbd: Callable[..., Any]) -> None:
    """Every reply of the judge unreadable: no rise of 0 within an interval, and no measured noise."""
    said = rbd("discover", *SMALL, "judge.engine.unreadable=1")
    assert said.code == 0, said.err
    assert "assumed: no sham rewrite was read" in note("discover", "discover_candidates")
    tables = {t["name"]: t for t in json.loads(Path("runs/default/discover/tables.json").read_text())}
    effects = tables["discover_effects"]
    rise = [row[effects["columns"].index("rise of the error")] for row in effects["rows"]]
    assert rise and all(rate["value"] is None for rate in rise)


def test_a_score_by_itself_has_no_error(rbd: Callable[..., Any]) -> None:
    said = rbd("discover", *SMALL, "mode=pointwise", "judge.engine.unreadable=0.3")
    assert said.code == 0, said.err
    tables = {t["name"]: t for t in json.loads(Path("runs/default/discover/tables.json").read_text())}
    effects = tables["discover_effects"]
    named = [dict(zip(effects["columns"], row, strict=True)) for row in effects["rows"]]
    assert all(row["error plain"] is None for row in named) and any(row["unreadable"] for row in named)
    assert "discover.error_plain" not in json.loads(Path("runs/default/discover/metrics.json").read_text())


def test_another_set_is_tested_on_than_is_discovered_on(rbd: Callable[..., Any]) -> None:
    made = [*PlantedSource(items=60).load(1).questions, *PlantedSource(items=60).load(0).questions[:5]]
    lines = [{"question": q.question, "response_A": q.right, "response_B": q.wrong, "label": 1} for q in made]
    Path("first.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = rbd("discover", "source=preference", "source.path=first.jsonl", "source@test_source=planted",
               "test_source.items=60", "shares=[0.5,0.25,0.15,0.1]", "max_iterations=1")  # fmt: skip
    assert said.code == 0, said.err
    assert "in test_source and in source: " in Path("runs/default/discover/tables.json").read_text()
    parts = rows(Path("runs/default/discover/parts.jsonl"))
    first = {q.group for q in made}
    assert {row["group"] for row in parts if row["part"] == "discovery"} == first
    rest = [row for row in parts if row["part"] != "discovery"]
    assert {row["part"] for row in rest} == {"selection", "effect", "benchmark"}
    assert len({row["group"] for row in rest}) == len(rest) > 40 and not {row["group"] for row in rest} & first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mode=listwise",), "mode is 'listwise'"),
        (("shares=[0.5,0.5]",), "four shares"),
        (("looks=[0.5]",), "looks"),
        (("alpha=1.5",), "alpha is 1.5"),
        (("seeds=none.jsonl",), "none.jsonl: no such file"),
        (("source.items=1",), "no item is left for"),
    ],
)
def test_bad_settings_name_the_key(rbd: Callable[..., Any], words: tuple[str, ...], message: str) -> None:
    said = rbd("discover", *words)
    assert said.code in (1, 2) and message in said.err, said.err


@pytest.mark.parametrize("mode", ["pointwise", "reference"])
def test_other_modes_and_the_published_rule_run(rbd: Callable[..., Any], mode: str) -> None:
    said = rbd("discover", f"mode={mode}", "acceptance=paper", "validation=late", "deeper=false", "max_iterations=1",
               "source.items=45", "shares=[0.4,0.3,0.3,0.0]")  # fmt: skip
    assert said.code == 0, said.err


def test_a_reference_that_the_judge_would_not_read_is_refused(rbd: Callable[..., Any], tmp_path: Path) -> None:
    Path("own.txt").write_text("$question\n(a) $a\n(b) $b")
    said = rbd("discover", *SMALL, "mode=reference", "judge.prompt=own.txt")
    assert said.code == 2 and "holds no $reference" in said.err, said.err
    said = rbd("discover", *SMALL, "mode=reference", "judge=planted")
    assert said.code == 2 and "reads no text" in said.err, said.err
    seen: list[str] = []

    def first(messages: Any) -> str:
        seen.append(messages[-1]["content"])
        return "Output (a)"

    item = item_of(question("1", "The sum is 41.", "The sum is 7."), "reference")
    assert item.reference
    with Engine(FunctionBackend(first, "t"), Ledger(tmp_path / "l.sqlite"), attempts=1) as engine:
        with pytest.raises(UsageError, match="reads no reference"):
            Trial(ContentJudge(engine, "j", "whole", "mean", {}), engine, "reference", 64, 2.0, False, 1.0, False)
        assert not seen, "refused before anything is asked"
        for prompt in (None, "$question\n$a\n$b\nReference answer: ${reference}"):
            judge = GenerativeJudge(engine, "j", prompt=prompt)
            Trial(judge, engine, "reference", 64, 2.0, False, 1.0, False).plain([item])
    assert len(seen) == 2 and all("Reference answer:" in said and item.reference in said for said in seen)


def test_unreadable_replies_are_counted_and_never_harm(rbd: Callable[..., Any]) -> None:
    said = rbd("discover", *SMALL, "judge.engine.leaning={}", "judge.engine.unreadable=0.3", "max_iterations=1")
    assert said.code == 0, said.err
    probes = [row for row in rows(Path("runs/default/discover/probes.jsonl")) if row["fault"] is None]
    unreadable = [row for row in probes if row["biased"] is None]
    assert unreadable and all(row["effect"] != "harm" for row in unreadable)


def test_preferences_and_benchmark_keep_their_hands_off_what_discovery_used(rbd: Callable[..., Any]) -> None:
    assert rbd("discover", *SMALL).code == 0
    said = rbd("preferences", "source.items=20", "mix=0.5")
    assert said.code == 0, said.err
    train, test = (rows(Path(f"runs/default/preferences/{name}.jsonl")) for name in ("train", "test"))
    assert not {row["group"] for row in train} & {row["group"] for row in test}
    assert {row["bias"] for row in train} > {None} and all(row["prompt"][0]["role"] == "user" for row in train)
    written = [row for row in train if row["bias"]]
    plain = {row["id"]: row for row in train if not row["bias"]}
    assert all(row["chosen"] == plain[row["provenance"]["plain"]]["chosen"] for row in written)
    harden = ("benchmark", *SMALL[:1], "variants=6", "+judge.engine.leaning.authority=6.0")  # surely fooled by that
    said = rbd(*harden)
    assert said.code == 0, said.err
    parts = {row["group"]: row["part"] for row in rows(Path("runs/default/discover/parts.jsonl"))}
    final = rows(Path("runs/default/benchmark/benchmark.jsonl"))
    assert final and {parts[row["group"]] for row in final} == {"benchmark"}
    sheet = Path("runs/default/benchmark/review.csv").read_text().splitlines()
    assert "label" not in sheet[0] and "bias" not in sheet[0]
    for name, verdict in (("anna", "A"), ("ben", "B")):
        head, *body = Path("runs/default/benchmark/review.csv").read_text().split("\n", 1)
        Path(f"{name}.csv").write_text(head + "\n" + body[0].replace(",\n", f",{verdict}\n"))
    said = rbd(*harden, "reviews=[anna.csv,ben.csv]", "overwrite=true")
    assert said.code == 0, said.err
    assert "Fleiss" in said.out and rows(Path("runs/default/benchmark/benchmark.jsonl")) == []


def harden(folder: Path) -> tuple[str, ...]:
    """Return the words of a benchmark on planted questions, with the seeds as its library; authority surely fools."""
    (folder / "seeds.jsonl").write_text("".join(bias.model_dump_json() + "\n" for bias in SEEDS))
    return ("benchmark", "library=seeds.jsonl", "source.items=12", "variants=6", "+judge.engine.leaning.authority=6.0")


def test_the_sheet_is_blind_and_what_most_reviewers_confirm_stays(rbd: Callable[..., Any], tmp_path: Path) -> None:
    words = harden(tmp_path)
    said = rbd(*words)
    assert said.code == 0, said.err
    folder = tmp_path / "runs/default/benchmark"
    kept = {fingerprint(row["id"]): row for row in rows(folder / "benchmark.jsonl")}
    head, *sheet = csv.reader(io.StringIO((folder / "review.csv").read_text()))
    assert [line[0] for line in sheet] == sorted(kept), "the order of the rows tells nothing either"
    for line in [head, *sheet]:
        told = " ".join([*line[:2], *line[4:]]).casefold()  # all but the answers
        assert not [bias for bias in SEEDS if bias.id in told or bias.name.casefold() in told], told

    def fill(name: str, *others: str) -> None:
        """Say which answer is the better one, and of the first rows something else."""
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            for number, line in enumerate(sheet):
                row = kept[line[0]]
                right = "AB"[line[2:4].index(row["response_A" if row["label"] == 1 else "response_B"])]
                writer.writerow([*line[:4], others[number] if number < len(others) else right])

    fill("anna.csv", "neither", "unclear")
    fill("ben.csv", "neither")
    fill("carl.csv")
    said = rbd(*words, "reviews=[anna.csv,ben.csv,carl.csv]", "overwrite=true")
    assert said.code == 0, said.err
    final = rows(folder / "benchmark.jsonl")
    assert {row["id"] for row in final} == {kept[line[0]]["id"] for line in sheet[1:]}
    assert re.search(r"Fleiss' kappa over \d+ variants: -?0\.\d{3}\.", note("benchmark", "benchmark"))
    assert len(final) == len(kept) - 1 > 1 and {row["reviews"] for row in final} == {3}
    (drop,) = [row for row in rows(folder / "dropped.jsonl") if row["reason"] == "not confirmed by reviewers"]
    assert drop["case_id"] == kept[sheet[0][0]]["id"]
    told = (tmp_path / "anna.csv").read_text()
    (tmp_path / "anna.csv").write_text(told.replace(sheet[0][0], kept[sheet[0][0]]["id"]))
    said = rbd(*words, "reviews=[anna.csv]", "overwrite=true")
    assert said.code == 1 and "is not in this benchmark's review.csv" in said.err


def test_a_benchmark_has_judgebenchs_columns_and_skips_what_a_library_was_found_on(
    rbd: Callable[..., Any], tmp_path: Path
) -> None:
    """The library of another run: its parts lie beside it."""
    fields = ("pair_id", "original_id", "source", "question", "response_model", "response_A", "response_B", "label")
    values = [(f"p{k}", f"o{k}", "mmlu", f"{k} + 1?", "M", f"It is {k + 1}.", f"It is {k}.", "A>B") for k in range(6)]
    given = [dict(zip(fields, row, strict=True)) for row in values]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    (tmp_path / "found").mkdir()
    harden(tmp_path / "found")
    used = [
        Placed(item_id=f"judgebench-{k}", group=group_of(row["question"]), part="effect")
        for k, row in enumerate(given[:2])
    ]
    (tmp_path / "found/parts.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in used))
    said = rbd(
        "benchmark", "source=preference", "source.path=set.jsonl", "library=found/seeds.jsonl", "fooled=0", "variants=1"
    )
    assert said.code == 0, said.err
    made = list(csv.DictReader(io.StringIO((tmp_path / "runs/default/benchmark/benchmark.csv").read_text())))
    assert list(made[0]) == [*fields, "domain", "injected_bias"]
    assert {row["original_id"] for row in made} == {"o2", "o3", "o4", "o5"} and {row["source"] for row in made} == {
        "mmlu"
    }
    assert "used by discovery: 2" in note("benchmark", "benchmark")


def test_a_benchmark_reads_once_what_discovery_used(
    rbd: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not once per question."""
    from data_gen import benchmark

    asked, used = [], benchmark.used
    monkeypatch.setattr(benchmark, "used", lambda *given: asked.append(given) or used(*given))
    assert rbd(*harden(tmp_path)).code == 0 and len(asked) == 1


def test_the_papers_layouts_and_the_transfer_to_other_judges(rbd: Callable[..., Any], tmp_path: Path) -> None:
    """A judge of the filter and another one, on both sides of the hardened set; the page holds what discovery found."""
    words = ("max_iterations=1", "source.items=45", "shares=[0.4,0.3,0.2,0.1]", "judge.name=Planted-7B")
    assert rbd("discover", *words).code == 0
    fooled = ("judge.name=Planted-7B", "+judge.engine.leaning.authority=6.0")
    assert rbd(*harden(tmp_path), "name=set", "judge.name=Planted-7B").code == 0
    pairs = "pairs=runs/set/benchmark/pairs.jsonl"
    for name, judge in (("filter", fooled), ("other", ("judge.name=Upright-70B", "judge.engine.leaning={}"))):
        said = rbd("judging", f"name={name}-plain", "judge=planted_styles", *judge, pairs)
        assert said.code == 0, said.err
        hard = (f"name={name}-hard", "side=biased", f"compare=[{name}-plain]")
        said = rbd("judging", *hard, "judge=planted_styles", *judge, pairs)
        assert said.code == 0, said.err
    runs = "runs=[set,filter-plain,filter-hard,other-plain,other-hard]"
    said = rbd("report", "name=pro", "from=set", runs, "layout=judgebench_pro")
    assert said.code == 0, said.err

    def table(run: str, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(Path(f"runs/{run}/report/tables/{name}.csv").read_text())))

    found = table("pro", "judgebench_pro_judges")
    assert [(row["judge"], row["size"], row["chosen against it"]) for row in found] == [
        ("Planted-7B", "7B", "yes"), ("Upright-70B", "70B", "no"),
    ]  # fmt: skip
    for row in found:
        change = float(row["error hardened"]) - float(row["error plain"])
        assert (
            float(row["change of the error"]) == pytest.approx(change) and row["change of the error low"] and row["p"]
        )
    assert float(found[0]["change of the error low"]) > 0 and float(found[0]["p"]) < 0.05
    sizes = [row["size"] for row in table("pro", "judgebench_pro_domains")]
    assert sizes and sizes == sorted(sizes, key=lambda size: int(size[:-1]))
    assert [row["set"].split(",")[0] for row in table("pro", "judgebench_pro")] == ["set", "JudgeBench-Pro"]
    said = rbd("report", "name=set", "from=default", "layout=biasscope_main")
    assert said.code == 0, said.err
    (row,) = table("set", "biasscope_main")
    assert row["judge"] == "Planted-7B" and row["size"] == "7B" and row["published biases"] == ""
    page = Path("runs/set/report/index.html").read_text()
    assert "Biases found, and how large they are" in page and "The set hardened with them" in page


# --- libraries ------------------------------------------------------------------------------------------------------


def test_the_seeds_are_a_library_and_position_has_no_operator(tmp_path: Path) -> None:
    path = tmp_path / "library.jsonl"
    path.write_text("".join(bias.model_dump_json() + "\n" for bias in SEEDS))
    assert read_library(path) == list(SEEDS) and len(SEEDS) == 7
    assert [bias.id for bias in SEEDS if bias.operator is None] == ["positional"]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"id": "other", "name": "AUTHORITY  bias"}, "name"),
     ({"id": "other", "name": "Other", "definition": " "}, "definition"),
     ({"name": "Other"}, "id"), ({"id": "x", "name": "Other"}, "definition")],
)  # fmt: skip
def test_a_double_or_empty_entry_is_refused(tmp_path: Path, change: dict[str, str], field: str) -> None:
    path = tmp_path / "library.jsonl"
    path.write_text(SEEDS[2].model_dump_json() + "\n" + SEEDS[2].model_copy(update=change).model_dump_json() + "\n")
    with pytest.raises(DataError, match=rf"line 2, field {field}"):
        read_library(path)


def test_a_prompt_lists_the_library_too_and_no_more_for_its_own_bias() -> None:
    library = [Definition(name="Certainty bias", text="sounding certain")]
    every = {d.name for d in definitions_for("c", "verbosity", "all", library)}
    assert every == {bias.name for bias in KNOWN} | {"Certainty bias"}
    assert [d.name for d in definitions_for("c", "certainty", "known", library)] == ["Certainty bias"]


# --- rewrites -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "ending"),
    [
        ("First.\nThen.\n**42**", "**42**"),
        ("We add.\nThe answer is 7.\nThanks.", "The answer is 7.\nThanks."),
        ("Think.\n\nDDDDD", "DDDDD"),
        ("Code:\n```py\nx = 1\n```\ndone", "```py\nx = 1\n```\ndone"),
        ("One sentence here. The last one.", "The last one."),
        ("def f(x):\n    y = x\n    return y\n", "def f(x):\n    y = x\n    return y\n"),
    ],
)
def test_the_ending_is_cut_off_and_put_back_word_for_word(answer: str, ending: str) -> None:
    parts = cut_ending(answer)
    assert parts.body + parts.ending == answer and parts.ending == ending
    assert join(parts, "New body.", False).endswith(ending)


def test_the_length_controlled_variant_keeps_the_length() -> None:
    parts = cut_ending("A body that is short.\nIt is 4.")
    text = join(parts, "One long sentence comes first. Another one follows. And a third.", True)
    assert text.startswith("One long") and text.endswith("It is 4.") and "third" not in text


@pytest.mark.parametrize(
    ("answer", "body", "fault"),
    [
        ("A short body.\nIt is 4.", "This one sentence is longer than all that was there.", "longer than before"),
        ("It is 4.", "We add them first. Then we look.", "longer than before"),  # no body: nothing fits
        ("A short body.\nIt is 4.", "Surely. And this does not fit any more.", ""),
        ("A body that goes on a while.\nIt is 4.", "Yes. It is all in the second of two.", "length out of bounds"),
    ],
)  # fmt: skip
def test_a_length_that_cannot_be_kept_is_a_fault(tmp_path: Path, answer: str, body: str, fault: str) -> None:
    with Engine(FunctionBackend(lambda m: body, "t"), Ledger(tmp_path / "l.sqlite"), attempts=1) as engine:
        (done,) = rewrite(engine, [Task(CERTAIN, "What is 2 + 2?", answer)], 64, 2.0, same_length=True)
    assert done.fault == fault and len(done.text) <= len(answer)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("", "empty"), ("I'm sorry, I can't do that.", "refused"), ("We add them.", "unchanged"),
        ("This shows certainty bias. We add them.", "names the bias"),
        ("The answer is 9. We add them.", "changes the answer"),
        ("We add them. So the total is 999.", "changes the answer"), ("Then 3 + 6 = **9**.", "changes the answer"),
        ("We add 1 and 2, which makes 1,000 more", "changes the answer"), ("Surely the first number is 3.", ""),
        ("As Smith showed in 2019, we add them.", ""), ("3 + 4 = 7, and we add them.", ""),
        ("I apologize, but I cannot assist with that request.", "refused"), ("I’m sorry, but I can’t.", "refused"),
        ("Unfortunately, I cannot help with this.", "refused"), ("I'm not able to do that.", "refused"),
        ("As a language model, I cannot do that.", "refused"), ("I won’t rewrite this.", "refused"),
        ("I must decline to do this.", "refused"), ("My apologies, this goes too far.", "refused"),
        ("I would rather not rewrite this.", "refused"), ("As an AI, I cannot do this.", "refused"),
        ("I am not going to rewrite this.", "refused"), ("I'm going to have to decline.", "refused"),
        ("I can't stress enough that we add.", ""), ("As an AI researcher at MIT says, we add.", ""),
        ("I won't leave out a single step.", ""), ("I'm afraid many get this wrong.", ""),
        ("Here is the rewritten body:\nSurely.", "tells of the rewriting"),
        ("Manner: certain.", "tells of the rewriting"),
        ("I have rewritten this. We add.", "tells of the rewriting"), ("Here is how: we add.", ""),
        ("The correct answer is therefore (C).", "changes the answer"), ("Option K is correct.", "changes the answer"),
        ("98 is the answer, then.", "changes the answer"), ("The answer is **ninety**.", "changes the answer"),
        ("Surely the answer is Paris.", "changes the answer"), ("It must be 98.", "changes the answer"),
        ("The answer is clear: we add them.", ""), ("Three sources say so: [1], [2] and [3].", ""),
        ("The manual is from 1998, and says this.", ""),
        ("Unfortunately we have to add them.", ""), ("I can see that we add them.", ""),
        ("word " * 400, "length out of bounds"), ("I am certain. We add them.", ""),
    ],
)  # fmt: skip
def test_a_rewrite_that_fails_a_check_says_which(body: str, fault: str) -> None:
    answer = "We add them.\nThe answer is 7."
    assert rewrite_fault(CERTAIN, "What is 3 + 4?", answer, cut_ending(answer), body, 2.0) == fault


@pytest.mark.parametrize(
    ("head", "sign", "tail"),
    [("Answer: ", ".", ""), ("answer is -", ".,/", ""), ("a", "\n", "b"), ("is ", "1,", "")],
)
@pytest.mark.timeout(20)
def test_a_long_row_of_signs_is_read_in_no_time(head: str, sign: str, tail: str) -> None:
    """Each took minutes: repetitions that overlap try every split."""
    text = head + sign * 50_000 + tail
    parts = cut_ending(text)
    assert (
        rewrite_fault(CERTAIN, "?", "Seven.", Parts("Seven.", "End."), text, 2.0) and parts.body + parts.ending == text
    )
    assert join(Parts("x" * 50, "End."), text, True).endswith("End.")


def test_a_failed_call_is_a_fault_and_never_a_text() -> None:  # A24
    assert read_rewrite(Completion(status="server_error", error="boom")) == ("", "call: server_error")
    assert read_rewrite(Completion(status="ok", text='"""New body"""')) == ("New body", "")


def test_a_teacher_that_refuses_or_fails_leaves_no_pair(tmp_path: Path) -> None:
    replies = iter(["I'm sorry, but no.", "", "The answer is 99."])
    with Engine(FunctionBackend(lambda m: next(replies), "t"), Ledger(tmp_path / "l.sqlite"), attempts=1) as engine:
        judge = GenerativeJudge(engine, "j")
        trial = Trial(judge, engine, "pairwise", 64, 2.0, False, 1.0, False)
        items = [item_of(question(str(k), "The answer is 1.", "Thus.\nThe answer is 2."), "pairwise") for k in range(3)]
        shots = trial.biased([(item, CERTAIN) for item in items])
    assert [shot.rewritten.fault for shot in shots] == ["refused", "call: empty", "changes the answer"]
    assert all(shot.decided is None for shot in shots)


def test_plain_and_rewritten_are_judged_in_the_same_order(tmp_path: Path) -> None:  # arXiv 2602.09383 and 2
    seen: list[str] = []

    def always_first(messages: Any) -> str:
        if messages[0]["content"].startswith("You rewrite"):
            return reply(messages, "all")
        seen.append(messages[-1]["content"])
        return "Output (a)"

    with Engine(FunctionBackend(always_first, "t"), Ledger(tmp_path / "l.sqlite"), attempts=1) as engine:
        trial = Trial(GenerativeJudge(engine, "j"), engine, "pairwise", 64, 2.0, False, 1.0, False)
        items = [item_of(question(str(k), f"R{k}.", f"W{k}."), "pairwise") for k in range(40)]
        probes = trial.probe([(item, CERTAIN) for item in items], "selection")
        published = Trial(GenerativeJudge(engine, "j"), engine, "pairwise", 64, 2.0, False, 1.0, True)
        broken = published.probe([(item, CERTAIN) for item in items], "selection")
    assert {probe.effect for probe in probes} == {"none"}, "a judge that follows the order shows no bias of content"
    assert {probe.effect for probe in broken} == {"none", "harm", "gain"}
    assert {order_of(item) for item in items} == {(0, 1), (1, 0)} and {item.gold for item in items} == {0, 1}


# --- names and merging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reject"),
    [
        ('{"bias": "yes", "name": "Tone bias", "definition": "tone"}', ""),
        ('Sure. ```json\n{"bias": "yes", "name": "Tone bias", "definition": "tone"}\n```', ""),
        ('{"bias": "no", "name": "", "definition": ""}', "no bias named"),
        ('{"bias": "yes", "name": "Tone bias"}', "name or definition missing"),
        ('{"bias": "yes", "name": ', "no JSON object"), ('{"bias": "maybe"}', "neither yes nor no"),
    ],
)  # fmt: skip
def test_what_is_no_bias_is_never_stored_as_one(text: str, reject: str) -> None:  # arXiv 2602.09383
    assert read_identified(Completion(status="ok", text=text)).reject == reject


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_teacher_is_told_the_judges_own_decision(tmp_path: Path, order: tuple[int, ...]) -> None:
    """The published code tells the answer that the label calls wrong, whatever was decided (arXiv 2602.09383)."""
    asked: list[str] = []

    def no(messages: Any) -> str:
        asked.append(messages[-1]["content"])
        return '{"bias": "no"}'

    with Engine(FunctionBackend(no, "t"), Ledger(tmp_path / "l.sqlite"), attempts=1) as engine:
        judge, item = GenerativeJudge(engine, "j"), item_of(question("1", "R.", "W."), "pairwise")
        for outcome in (Outcome(kind="choice", choice=0), Outcome(kind="choice", choice=1), Outcome(kind="tie")):
            judged = Judgement(item_id="1", judge="j", fingerprint="f", order=order, outcome=outcome, reply="")
            named(judge, engine, [(item, judged)], [()], 64)
    first, second = (f"Output ({'ab'[order.index(k)]})" for k in (0, 1))
    assert [re.findall("A judge chose (.*), which", prompt) for prompt in asked] == [[first], [second], ["tie"]]


def test_a_candidate_is_asked_about_once_against_the_whole_library(tmp_path: Path) -> None:
    names = [Identified(name, "x", "") for name in (
        "Authority bias", "AUTHORITY  BIAS", "Citation bias", "Certainty bias", "Certainty bias", "Confident-tone bias"
    )]  # fmt: skip
    with Engine(FunctionBackend(lambda m: reply(m, "all"), "t"), Ledger(tmp_path / "l.sqlite"), attempts=1) as engine:
        outcome = merged(engine, names, SEEDS, 1)
    assert outcome.calls == 3, "Authority is a known name: no call; three others, one call each"
    assert [(found.bias.id, found.support) for found in outcome.new] == [("certainty", 3)]
    assert sorted(c.bias.id for c in outcome.same) == ["authority", "citation", "confident_tone"]
    assert outcome.published_calls > outcome.calls


@pytest.mark.parametrize(("text", "number"), [('{"same_as": 2}', 2), ('{"same_as": 0}', 0), ('{"same_as": 9}', None),
                                              ('{"same_as": true}', None), ("two", None)])  # fmt: skip
def test_an_unreadable_merge_merges_nothing(text: str, number: int | None) -> None:
    assert read_merge(Completion(status="ok", text=text), 3) == number


@pytest.mark.parametrize(("text", "score"), [("Score: 7", 7.0), ("score 3\nScore: 8/10", 8.0), ("Score: 11", None),
                                             ("7", 7.0),
                                             ("none", None)])  # fmt: skip
def test_a_rating_is_read_or_unreadable_never_clamped(text: str, score: float | None) -> None:
    assert read_rating(Completion(status="ok", text=text)).score == score


# --- preference sets ------------------------------------------------------------------------------------------------


def test_one_label_is_told_and_identical_answers_are_left_out(tmp_path: Path) -> None:  # A33; arXiv 2602.09383
    path = tmp_path / "set.jsonl"
    row = {"question": "q", "response_A": "good", "response_B": "bad", "label": 1}
    lines = [row | {"question": f"q{k}"} for k in range(20)] + [
        row | {"response_B": " good "},
        row | {"response_B": " "},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loaded = PreferenceSource(str(path)).load(0)
    assert loaded.left_out == {"judgebench: answers are the same": 1, "judgebench: a blank answer": 1}
    assert "one label only" in label_balance(loaded.questions)
    assert {item_of(q, "pairwise").gold for q in loaded.questions} == {0, 1}


@pytest.mark.parametrize(
    ("label", "message"), [(3, "must be 1 or 2"), (True, "must be 1 or 2"), (None, "must be 1 or 2")]
)
def test_a_label_that_names_no_answer_is_an_error(tmp_path: Path, label: Any, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"question": "q", "response_A": "a", "response_B": "b", "label": label}) + "\n")
    with pytest.raises(DataError, match=message):
        PreferenceSource(str(path)).load(0)


@pytest.mark.parametrize("name", ["judge_bench", "rewardbench_filtered"])
def test_the_public_sets_are_read(name: str) -> None:
    path = next((p / "shared/data/preference" / f"{name}.parquet" for p in Path(__file__).resolve().parents if (p / "shared/data/preference").is_dir()), None)  # noqa: E501  # fmt: skip
    if path is None:
        pytest.skip("needs the public preference sets in shared/data/preference")
    loaded = PreferenceSource(str(path)).load(0)
    assert len(loaded.questions) > 300
    assert all(sum(cut_ending(text)[0] + cut_ending(text)[1] == text for text in (q.right, q.wrong or "")) == 2 for q in loaded.questions)  # noqa: E501  # fmt: skip

"""The local engine on the tiny random model: a batch computes what each row does alone and by hand."""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rbd_train.engine import Engine
from rbd_train.engines.local import LocalBackend, LocalEngine, RowNoise
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import ChoiceLogprobs, Completion, Reply, Sampling
from rbd_train.ledger import Ledger
from rbd_train.modelling import (
    OPENER,
    encode_context,
    load_model,
    load_tokenizer,
    pad_id,
    render_context,
    resolve_model,
)

TEXTS = ("a", "Is the longer answer right?", "x" * 90, "中文 and a  few words", "b", "word " * 30, "Which one? " * 9)
GREEDY = Sampling(max_new_tokens=12)
DRAWN = Sampling(max_new_tokens=12, temperature=1.0)
CHOICES = [("yes", "no"), ("a long answer of many tokens", "b", "short"), ("p", "q")]


def asking(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.fixture(scope="module")
def tiny() -> Path:
    return Path(resolve_model("tiny"))


Opener = Callable[..., Engine]


@pytest.fixture
def open_tiny(tiny: Path, tmp_path: Path) -> Iterator[Opener]:
    """Open an engine with a ledger of its own, unless one is given."""
    opened: list[Engine] = []

    def make(model: Path = tiny, ledger: Path | None = None, **settings: Any) -> Engine:
        path = ledger or tmp_path / f"ledger-{len(opened)}.sqlite"
        given = {"model": str(model), "dtype": "float32", **settings}
        opened.append(LocalEngine(**given).open(Ledger(path)))
        return opened[-1]

    yield make
    for engine in opened:
        engine.backend.close()


@pytest.fixture
def altered(tiny: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy the tiny model, with keys of a JSON file changed."""

    def make(file: str, **values: Any) -> Path:
        folder = tmp_path / f"model-{file}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny, folder)
        old = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**old, **values}))
        return folder

    return make


@pytest.fixture(scope="module")
def by_hand(tiny: Path) -> Any:
    """The tiny model and its tokenizer, to compute with in a loop: no batch, no padding, no cache."""
    return load_model(str(tiny), "float32").eval(), load_tokenizer(str(tiny), False)


def next_logprobs(by_hand: Any, ids: list[int]) -> Any:
    import torch

    with torch.inference_mode():
        return by_hand[0](input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)


def greedy_by_hand(by_hand: Any, text: str, tokens: int) -> list[int]:
    ids = encode_context(by_hand[1], asking(text)[0])
    start = len(ids)
    while len(ids) < start + tokens:
        token = int(next_logprobs(by_hand, ids).argmax())
        if token == by_hand[1].eos_token_id:
            break
        ids.append(token)
    return ids[start:]


def plain(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@pytest.fixture(scope="module")
def expected(by_hand: Any) -> list[list[int]]:
    return [greedy_by_hand(by_hand, text, 12) for text in TEXTS]


@pytest.mark.parametrize("settings", [{}, {"batch_size": 1}, {"batch_size": 3}, {"batch_tokens": 200}], ids=str)
def test_a_batch_generates_what_a_loop_by_hand_does(
    open_tiny: Opener, by_hand: Any, expected: list[list[int]], settings: dict[str, int]
) -> None:
    """Mixed lengths are left-padded and sorted by length; replies come back in the order of the input."""
    replies = open_tiny(**settings).generate(asking(*TEXTS), GREEDY)
    assert [reply.text for reply in replies] == [plain(by_hand[1], ids) for ids in expected]
    assert [reply.completion_tokens for reply in replies] == [len(ids) for ids in expected]
    assert [reply.status for reply in replies] == ["length" if len(ids) == 12 else "ok" for ids in expected]
    assert [reply.prompt_tokens for reply in replies] == [len(encode_context(by_hand[1], p)) for p in asking(*TEXTS)]


def test_padding_is_on_the_left_and_masked(open_tiny: Opener) -> None:
    backend = open_tiny().backend
    assert isinstance(backend, LocalBackend)
    backend._load()
    ids, mask = backend._pad_left([[5, 6, 7], [8]])
    fill = pad_id(backend._tokenizer)
    assert ids.tolist() == [[5, 6, 7], [fill, fill, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("settings", [{}, {"batch_size": 1}, {"batch_size": 4}, {"batch_tokens": 200}], ids=str)
def test_choice_logprobs_are_those_of_a_loop_by_hand(open_tiny: Opener, by_hand: Any, settings: dict[str, int]) -> None:
    texts = (TEXTS[3], TEXTS[0], TEXTS[1])
    engine, fed = open_tiny(**settings), 0
    scored = engine.choice_logprobs(asking(*texts), CHOICES)
    for text, options, reply in zip(texts, CHOICES, scored, strict=True):
        for option, total, count in zip(options, reply.sums, reply.tokens, strict=True):
            ids, expected = encode_context(by_hand[1], asking(text)[0]), 0.0
            tokens = by_hand[1].encode(option, add_special_tokens=False)
            for token in tokens:
                expected += float(next_logprobs(by_hand, ids)[token])
                ids.append(token)
            assert count == len(tokens) and total == pytest.approx(expected, abs=1e-4)
            fed += len(ids)
    assert engine.calls["prompt_tokens"] == engine.cost.prompt_tokens == fed and engine.cost.guessed == 0


def test_an_empty_choice_is_refused(open_tiny: Opener) -> None:
    """It has no token to score: its sum would be 0, which beats every text."""
    with pytest.raises(DataError, match="choice .* has no tokens"):
        open_tiny().choice_logprobs(asking("q"), [("text", "")])


def test_a_draw_is_the_same_alone_and_in_a_batch(open_tiny: Opener) -> None:
    together = open_tiny().generate(asking(*TEXTS), DRAWN)
    alone = [open_tiny().generate(asking(text), DRAWN)[0] for text in TEXTS]
    backwards = open_tiny(batch_size=2).generate(asking(*TEXTS[::-1]), DRAWN)
    assert [r.text for r in together] == [r.text for r in alone] == [r.text for r in backwards[::-1]]
    assert len({reply.text for reply in together}) == len(TEXTS)


def test_another_sample_is_another_draw(open_tiny: Opener) -> None:
    engine = open_tiny()
    drawn = [engine.generate(asking("q"), DRAWN.model_copy(update={"sample": k}))[0].text for k in range(4)]
    assert len(set(drawn)) == 4
    assert engine.generate(asking("q"), DRAWN)[0].text == drawn[0]


def test_draws_follow_temperature_and_top_p() -> None:
    """4,000 rows of noise over fixed scores: the frequencies are softmax(scores / temperature), cut to top_p."""
    import torch

    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for temperature, top_p in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.8)):
        noise = RowNoise(range(4000), Sampling(max_new_tokens=1, temperature=temperature, top_p=top_p))
        drawn = noise(torch.zeros(4000, 1), scores.repeat(4000, 1)).argmax(-1)
        expected = (scores[0] / temperature).softmax(-1)
        if top_p < 1:  # 0.64 + 0.24 reach 0.8
            expected = torch.tensor([expected[0], expected[1], 0, 0]) / expected[:2].sum()
        found = torch.bincount(drawn, minlength=4) / 4000
        assert (found - expected).abs().max() < 0.03
        assert top_p == 1 or int(found[2:].count_nonzero()) == 0


def test_generation_stops_at_eos(open_tiny: Opener, by_hand: Any, altered: Callable[..., Path], tiny: Path) -> None:
    """One row of the batch ends by itself and says stop, its EOS not in its text; another is cut and says length."""
    first, second = greedy_by_hand(by_hand, TEXTS[0], 12), greedy_by_hand(by_hand, TEXTS[1], 12)
    eos = next(token for token in first if token not in second and first.index(token) > 1)
    end = first.index(eos)
    model = altered("generation_config.json", eos_token_id=[eos, 256])
    stopped, cut = open_tiny(model).generate(asking(*TEXTS[:2]), GREEDY)
    assert (stopped.finish_reason, stopped.status, stopped.completion_tokens) == ("stop", "ok", end)
    assert stopped.text == plain(by_hand[1], first[:end])
    assert (cut.finish_reason, cut.status, cut.text) == ("length", "length", plain(by_hand[1], second))


def test_a_reply_of_eos_alone_is_empty(open_tiny: Opener, by_hand: Any, altered: Callable[..., Path]) -> None:
    (first,) = greedy_by_hand(by_hand, "q", 1)
    (reply,) = open_tiny(altered("generation_config.json", eos_token_id=first)).generate(asking("q"), GREEDY)
    assert (reply.status, reply.text, reply.completion_tokens) == ("empty", "", 0)


def test_a_models_own_generation_config_does_not_leak(open_tiny: Opener, altered: Callable[..., Path]) -> None:
    """Qwen2.5 ships do_sample and a repetition penalty; greedy means greedy."""
    model = altered(
        "generation_config.json", do_sample=True, temperature=1.5, top_k=3, repetition_penalty=5.0, max_new_tokens=2
    )
    given, own = (open_tiny(*folder).generate(asking(*TEXTS), GREEDY) for folder in ((model,), ()))
    assert [reply.text for reply in given] == [reply.text for reply in own]


@pytest.mark.parametrize("verb", ["generate", "choices"])
def test_a_context_over_the_limit_is_refused(open_tiny: Opener, altered: Callable[..., Path], verb: str) -> None:
    engine = open_tiny(altered("config.json", max_position_embeddings=64))
    with pytest.raises(DataError, match=r"a prompt of \d+ tokens and its reply exceed the 64"):
        if verb == "generate":
            engine.generate(asking("short", "x" * 60), GREEDY)
        else:
            engine.choice_logprobs(asking("short", "x"), [("y", "n"), ("y" * 70, "n")])
    assert len(engine.generate(asking("short"), GREEDY)) == 1


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_partly_stored_batch_is_run_whole_and_stored_replies_are_used(
    open_tiny: Opener, tmp_path: Path, sampling: Sampling
) -> None:
    path = tmp_path / "shared.sqlite"
    first = open_tiny(ledger=path).generate(asking(*TEXTS), sampling)
    kept = Completion(status="ok", text="as stored")
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT key, reply FROM replies").fetchall()
        by_text = {Completion.model_validate_json(reply).text: key for key, reply in rows}
        db.execute("UPDATE replies SET reply=? WHERE key=?", (kept.model_dump_json(), by_text[first[1].text]))
        db.execute("DELETE FROM replies WHERE key=?", (by_text[first[3].text],))
    engine = open_tiny(ledger=path)
    again = engine.generate(asking(*TEXTS), sampling)
    assert again[1].text == "as stored"
    assert [r for k, r in enumerate(again) if k != 1] == [r for k, r in enumerate(first) if k != 1]
    assert engine.calls["asked"] == 1 and engine.calls["from_ledger"] == len(TEXTS) - 1


def test_only_batches_with_something_missing_are_run(open_tiny: Opener) -> None:
    """And those whole: a resumed run computes in the batches of an undisturbed one."""
    engine = open_tiny(batch_size=3)
    handed: list[int] = []
    requests = [request for text in TEXTS for request in requests_of(text)]
    commit = SimpleNamespace(many=lambda replies: handed.extend(index for index, _ in replies))
    engine.backend.run(requests, frozenset({2}), commit)
    assert len(handed) == 3 and 2 in handed


def requests_of(text: str) -> list[Any]:
    from rbd_train.exchange import Request

    return [Request(asking(text)[0], GREEDY)]


def test_a_run_that_finds_all_replies_loads_no_weights(open_tiny: Opener, tiny: Path, tmp_path: Path) -> None:
    path, folder = tmp_path / "shared.sqlite", tmp_path / "copy"
    shutil.copytree(tiny, folder)
    first = open_tiny(folder, path).generate(asking(*TEXTS), GREEDY)
    engine = open_tiny(folder, path)
    (folder / "model.safetensors").unlink()
    assert engine.generate(asking(*TEXTS), GREEDY) == first
    with pytest.raises(DataError, match="can't be loaded"):
        engine.generate(asking("new"), GREEDY)


def test_duplicates_are_computed_once(open_tiny: Opener) -> None:
    engine = open_tiny()
    replies = engine.generate(asking("a", "b", "a"), DRAWN)
    assert replies[0] == replies[2] and engine.calls["asked"] == 2


def test_both_verbs_on_one_engine(open_tiny: Opener) -> None:
    engine = open_tiny()
    assert isinstance(engine.choice_logprobs(asking("q"), [("a", "b")])[0], ChoiceLogprobs)
    assert isinstance(engine.generate(asking("q"), GREEDY)[0], Completion)


def test_watched_words_are_read_at_the_last_step_that_said_one(open_tiny: Opener, by_hand: Any) -> None:
    """Two letters that the row says greedily; in a batch, so that each row's steps are its own."""
    ids = greedy_by_hand(by_hand, TEXTS[0], 12)
    letters = [token for token in ids if by_hand[1].decode([token]).isascii() and by_hand[1].decode([token]).isalnum()]
    word, other = by_hand[1].decode([letters[-1]]), "z"
    replies = open_tiny().generate(asking(*TEXTS), Sampling(max_new_tokens=12, watch=(word, other)))
    last = 11 - ids[::-1].index(letters[-1])
    logprobs = next_logprobs(by_hand, encode_context(by_hand[1], asking(TEXTS[0])[0]) + ids[:last])
    assert replies[0].watched is not None
    for name in (word, other):
        (token,) = by_hand[1].encode(name)
        assert replies[0].watched[name] == pytest.approx(float(logprobs[token]), abs=1e-4)
    silent = open_tiny().generate(asking(*TEXTS), Sampling(max_new_tokens=1, watch=("Z", "W")))
    assert silent[0].watched is None


def test_identity_changes_with_weights_dtype_and_reasoning(
    open_tiny: Opener, altered: Callable[..., Path], tiny: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    same, other = tmp_path / "a" / "tiny", tmp_path / "b" / "tiny"
    for folder in (same, other):
        shutil.copytree(tiny, folder)
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] + torch.finfo(torch.float32).eps
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    template = tmp_path / "c" / "tiny"
    shutil.copytree(tiny, template)
    (template / "chat_template.jinja").write_text((template / "chat_template.jinja").read_text() + " ")
    base = open_tiny().identity
    assert open_tiny(same).identity == base
    assert base["weights"] != open_tiny(other).identity["weights"]
    assert base["weights"] != open_tiny(template).identity["weights"]
    assert open_tiny(dtype="bfloat16").identity != base and open_tiny(reasoning=True).identity != base


def with_tokenizer(tiny: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """Change a tokenizer's file; without a model beside it, transformers reads it as it stands."""
    shutil.copytree(tiny, folder)
    (folder / "config.json").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lowercase": lambda t: t.update(normalizer={"type": "Lowercase"}),
    "spaces dropped": lambda t: t.update(normalizer={"type": "Replace", "pattern": {"String": " "}, "content": ""}),
    "no decoder": lambda t: t.update(decoder=None),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_tokenizer_that_damages_text_is_refused(tiny: Path, tmp_path: Path, kind: str) -> None:
    name = with_tokenizer(tiny, tmp_path / "damaged", DAMAGE[kind])  # A07
    with pytest.raises(DataError, match="text would be damaged"):
        load_tokenizer(name, False)


@pytest.mark.parametrize("missing", ["template", "eos"])
def test_a_tokenizer_without_template_or_eos_is_refused(tiny: Path, tmp_path: Path, missing: str) -> None:
    folder = Path(with_tokenizer(tiny, tmp_path / missing, lambda tokenizer: None))
    if missing == "template":
        (folder / "chat_template.jinja").unlink()
    else:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        del settings["eos_token"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="no chat template or no EOS"):
        load_tokenizer(str(folder), False)


def test_bos_is_never_there_twice(tiny: Path, tmp_path: Path) -> None:
    """A08: the template prints BOS, and the tokenizer would add another to what it encodes."""

    def add_bos(tokenizer: dict[str, Any]) -> None:
        processor = tokenizer["post_processor"]
        processor["single"].insert(0, {"SpecialToken": {"id": "<|system|>", "type_id": 0}})
        processor["special_tokens"] = {"<|system|>": {"id": "<|system|>", "ids": [258], "tokens": ["<|system|>"]}}

    folder = Path(with_tokenizer(tiny, tmp_path / "bos", add_bos))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|system|>"}))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + template)
    tokenizer = load_tokenizer(str(folder), False)
    assert tokenizer.encode("x")[0] == 258  # the trap is set
    assert encode_context(tokenizer, asking("q")[0]).count(258) == 1
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}" + template)
    with pytest.raises(DataError, match="BOS twice"):
        encode_context(load_tokenizer(str(folder), False), asking("q")[0])


def test_reasoning_opens_the_thinking_once(tiny: Path, tmp_path: Path) -> None:
    """The change is part of the template, so a saved model keeps it and isn't changed again."""
    tokenizer = load_tokenizer(str(tiny), True)
    assert render_context(tokenizer, asking("q")[0]).endswith("<|assistant|>" + OPENER)
    tokenizer.save_pretrained(tmp_path / "saved")
    for reasoning in (True, False):
        again = load_tokenizer(str(tmp_path / "saved"), reasoning)
        assert render_context(again, asking("q")[0]) == render_context(tokenizer, asking("q")[0])


def test_a_folder_that_holds_no_model_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        LocalEngine(model=str(tmp_path)).open(Ledger(tmp_path / "l.sqlite"))
    with pytest.raises(UsageError, match="no such folder"):
        LocalEngine(model=str(tmp_path / "nowhere")).open(Ledger(tmp_path / "l.sqlite"))
    with pytest.raises(UsageError, match=r"engine\.dtype.*float32"):
        LocalEngine(model="tiny", dtype="fp8").open(Ledger(tmp_path / "l.sqlite"))


def test_broken_weights_are_a_plain_error(open_tiny: Opener, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny, folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(DataError, match="can't be loaded"):
        open_tiny(folder).generate(asking("q"), GREEDY)


def test_scores_that_are_not_finite_are_refused(open_tiny: Opener, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "nan"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="not finite"):
        open_tiny(folder).choice_logprobs(asking("q"), [("a", "b")])


def test_a_closed_engine_opens_again(open_tiny: Opener) -> None:
    replies: list[list[Reply]] = []
    for _ in range(2):
        with open_tiny() as engine:
            replies.append(list(engine.generate(asking("q"), GREEDY)))
        assert list(engine.generate(asking("other"), GREEDY))
    assert replies[0] == replies[1]

"""The vLLM engine beside the local one, on a stand-in that speaks vLLM's documented interface over the tiny model.

vLLM itself needs a GPU and its own torch; what is held here is our side: token ids, limits, ends, sums, commits.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rbd_train.engine import Engine
from rbd_train.engines.local import LocalEngine
from rbd_train.engines.vllm import VllmEngine
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import Sampling
from rbd_train.ledger import Ledger
from rbd_train.modelling import load_model, resolve_model
from tests.test_local_engine import CHOICES, TEXTS, asking  # type: ignore[import-not-found]


class LLM:
    """vLLM's offline class as documented: prompts of token ids in, RequestOutputs out."""

    loaded: list[dict[str, Any]] = []
    asked = 0

    def __init__(self, model: str, **settings: Any) -> None:
        LLM.loaded.append(settings)
        self.model: Any = load_model(model, "float32").eval()
        limit = settings["max_model_len"] or self.model.config.max_position_embeddings
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=limit))

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        LLM.asked += len(prompts)
        return [self.one(prompt["prompt_token_ids"], given) for prompt, given in zip(prompts, params, strict=True)]

    @torch.inference_mode()
    def one(self, ids: list[int], given: Any) -> Any:
        steps, new = [], list[int]()
        reason = "length"
        for _ in range(given.max_tokens):
            row = self.model(torch.tensor([ids + new])).logits[0, -1].log_softmax(-1)
            new.append(int(row.argmax()))
            top = row.topk(20)
            steps.append({int(t): SimpleNamespace(logprob=float(v)) for v, t in zip(*top, strict=True)})
            if new[-1] in (given.stop_token_ids or []):
                reason = "stop"
                break
        logits = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        prompt = [None] + [
            {token: SimpleNamespace(logprob=float(logits[place, token]))} for place, token in enumerate(ids[1:])
        ]
        output = SimpleNamespace(token_ids=new, finish_reason=reason, logprobs=steps if given.logprobs else None)
        return SimpleNamespace(prompt_token_ids=ids, outputs=[output], prompt_logprobs=prompt)


class SamplingParams(SimpleNamespace):
    stop_token_ids = None
    logprobs = None


Opener = Callable[..., Engine]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "loaded", [])
    monkeypatch.setattr(LLM, "asked", 0)

    def make(kind: type, name: str, **settings: Any) -> Engine:
        return kind(model=resolve_model("tiny"), **settings).open(Ledger(tmp_path / f"{name}.sqlite"))  # type: ignore[no-any-return]

    return make


def test_it_says_what_the_local_engine_says(opened: Opener) -> None:
    local, ours = opened(LocalEngine, "local", dtype="float32"), opened(VllmEngine, "vllm", batch_size=3)
    sampling = Sampling(max_new_tokens=6)
    prompts = asking(*TEXTS)
    assert [c.model_dump() for c in ours.generate(prompts, sampling)] == [
        c.model_dump() for c in local.generate(prompts, sampling)
    ]
    asked = prompts[: len(CHOICES)]
    for mine, theirs in zip(ours.choice_logprobs(asked, CHOICES), local.choice_logprobs(asked, CHOICES), strict=True):
        assert mine.tokens == theirs.tokens and mine.sums == pytest.approx(theirs.sums, abs=1e-4)
    assert LLM.loaded[0]["trust_remote_code"] is False and not LLM.loaded[0]["enable_prefix_caching"]
    before = LLM.asked
    assert opened(VllmEngine, "vllm").generate(prompts, sampling) and LLM.asked == before  # the ledger had them all


def test_a_watched_word_has_its_log_probability(opened: Opener) -> None:
    local, ours = opened(LocalEngine, "local", dtype="float32"), opened(VllmEngine, "vllm")
    said = local.generate(asking("a"), Sampling(max_new_tokens=6))[0].text
    sampling = Sampling(max_new_tokens=6, watch=(said[-1], "q"))
    mine, theirs = (engine.generate(asking("a"), sampling)[0].watched for engine in (ours, local))
    assert mine and theirs and mine[said[-1]] == pytest.approx(theirs[said[-1]], abs=1e-4)
    assert mine["q"] >= theirs["q"] - 1e-4  # beyond the top 20: their floor, a bound from above


def test_one_token_choices_are_read_off_the_likeliest_tokens(opened: Opener) -> None:
    """What it lists is what the local engine reads; the rest is bounded, as over HTTP, and normalisers are unknown."""
    local, ours = opened(LocalEngine, "local", dtype="float32"), opened(VllmEngine, "vllm")
    (whole,) = local.choice_logprobs(asking("a"), [("1", "2")], temperatures=(1.0,))
    assert whole.readings is not None
    listed = next(token for token in whole.readings.top if token.isascii() and token.isalnum())
    words = (listed, *[digit for digit in "0123456789" if digit not in whole.readings.top][:3])
    (mine,), (theirs,) = (e.choice_logprobs(asking("a"), [words], temperatures=(1.0,)) for e in (ours, local))
    assert mine.readings is not None and theirs.readings is not None and mine.bounds == (False, True, True, True)
    assert mine.sums[0] == pytest.approx(theirs.sums[0], abs=1e-4)
    assert all(bound >= value for bound, value in zip(mine.sums[1:], theirs.sums[1:], strict=True))
    assert mine.readings.positions[0].best == pytest.approx(theirs.readings.positions[0].best, abs=1e-4)
    assert mine.readings.positions[0].normalisers == ()


def test_what_it_cannot_do_is_said(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="exceed the 40"):
        opened(VllmEngine, "a", max_length=40).generate(asking("word " * 60), Sampling(max_new_tokens=8))
    for words, end in ((("1", "10"), False), (("1", "2"), True)):
        with pytest.raises(UsageError, match="one-token choices alone"):
            opened(VllmEngine, "b").choice_logprobs(asking("a"), [words], temperatures=(1.0,), ends=[end])
    with pytest.raises(UsageError, match="engine.dtype is 'fp7'"):
        opened(VllmEngine, "c", dtype="fp7")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        opened(VllmEngine, "d")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"pip install 'rbd_train\[vllm\]'"):
        opened(VllmEngine, "e").generate(asking("a"), Sampling(max_new_tokens=2))

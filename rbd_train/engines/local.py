"""A model in this process (transformers): batched, length-sorted, left-padded generation and log-probabilities.

Batches are planned over the whole input and committed as units, and a sampled row draws its noise from its own key, so
that a resumed run computes what an undisturbed one would.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from rbd_train.engine import Commit, Engine, Family
from rbd_train.engines.tree import TREE_TOKENS, Asked, plan, read
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import ChoiceLogprobs, Completion, Reply, Request, Sampling, Status
from rbd_train.ledger import Ledger
from rbd_train.modelling import encode_context, load_model, load_tokenizer, pad_id, resolve_model
from rbd_train.store import canonical, digest

if TYPE_CHECKING:
    import torch

Encoded = tuple[list[int], list[list[int]]]  # a context and its choices
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class LocalEngine:
    """Engine that runs a model in this process."""

    model: str = "embedded"  # folder, hub name, or `embedded`
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    reasoning: bool = False  # let the generation prompt end with <think>\n (a detector's models)
    batch_size: int = 32  # rows per forward pass
    batch_tokens: int = 16384  # padded tokens per forward pass, at most

    def open(self, ledger: Ledger) -> Engine:
        """Load the model behind the ledger."""
        if self.dtype not in DTYPES:
            raise UsageError(f"engine.dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        backend = LocalBackend(
            resolve_model(self.model), self.dtype, self.reasoning, self.batch_size, self.batch_tokens
        )
        return Engine(backend, ledger, attempts=1)  # an empty reply would be empty again


class LocalBackend:
    """Run one causal language model; weights are read when the first call is really needed."""

    def __init__(self, model: str, dtype: str, reasoning: bool, batch_size: int, batch_tokens: int) -> None:
        """Prepare; a rerun that finds every reply in the ledger never loads the weights."""
        import torch

        # each worker of a node has a GPU of its own
        self.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        self.dtype = dtype if dtype != "auto" else ("float32" if self.device == "cpu" else "bfloat16")
        self.batch_size, self.batch_tokens, self.name, self.reasoning = batch_size, batch_tokens, model, reasoning
        self.identity: dict[str, JsonValue] = {
            "engine": "local",
            "model": Path(model).name if Path(model).is_dir() else model,
            "weights": weights_digest(model),
            "dtype": self.dtype,
            "reasoning": reasoning,
        }
        self._tokenizer: Any = None
        self._model: Any = None

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Commit) -> None:
        """Answer every batch that has a missing request, whole."""
        import torch

        with torch.inference_mode():
            for kind, encoded, batches in self._planned(requests):
                for batch in batches:
                    if missing.isdisjoint(batch):
                        continue
                    replies: Sequence[Reply]
                    if kind == "score":
                        replies = self._score([encoded[i] for i in batch])
                    elif kind == "read":
                        replies = self._read([Asked(*encoded[i], requests[i].temperatures) for i in batch])
                    else:
                        replies = self._generate([requests[i] for i in batch], [encoded[i][0] for i in batch])
                    commit.many(list(zip(batch, replies, strict=True)))

    def together(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the batches."""
        return [batch for _, _, batches in self._planned(requests) for batch in batches]

    def _planned(self, requests: Sequence[Request]) -> Iterator[tuple[str, dict[int, Encoded], Iterator[list[int]]]]:
        """Yield each kind of request, encoded, in batches."""
        self._load()
        for kind in ("score", "generate", "read"):
            rows = [i for i, request in enumerate(requests) if _kind(request) == kind]
            encoded = {i: self._encode(requests[i]) for i in rows}
            if kind != "read":
                yield kind, encoded, self._plan(rows, encoded)
                continue
            asked = {i: Asked(*encoded[i], requests[i].temperatures) for i in rows}
            yield kind, encoded, plan(rows, asked, min(TREE_TOKENS, self.batch_tokens))

    def family(self) -> Family:
        """Return tokenizer, context and size without reading the weights."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.name, trust_remote_code=False)
        with torch.device("meta"):
            shell: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        context = getattr(config, "max_position_embeddings", None)
        count, width = int(shell.num_parameters()), getattr(torch, self.dtype).itemsize
        return Family(
            load_tokenizer(self.name, self.reasoning), context, count, count * width, _keys_and_values(config) * width
        )

    def close(self) -> None:
        """Drop the model, so that the next one finds the memory free."""
        import gc

        import torch

        self._model = self._tokenizer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self) -> None:
        if self._model is not None:
            return
        from transformers import GenerationConfig

        self._tokenizer = load_tokenizer(self.name, self.reasoning)
        self._model = load_model(self.name, self.dtype).to(self.device).eval()  # type: ignore[arg-type]
        given = self._model.generation_config.eos_token_id
        stops = set(given if isinstance(given, list) else [given]) | {self._tokenizer.eos_token_id}
        # a model's own generation config may sample or penalise repetition (Qwen2.5 does): none of it may leak in
        self._model.generation_config = GenerationConfig(
            eos_token_id=sorted(stops - {None}), pad_token_id=pad_id(self._tokenizer)
        )  # type: ignore[no-untyped-call]

    def _encode(self, request: Request) -> tuple[list[int], list[list[int]]]:
        context = encode_context(self._tokenizer, request.messages)
        end = [self._tokenizer.eos_token_id] if request.end else []
        choices = [self._tokenizer.encode(choice, add_special_tokens=False) + end for choice in request.choices]
        if not all(choices):
            raise DataError(f"a choice among {list(request.choices)!r:.200} has no tokens, so no log-probability")
        longest = len(context) + max((len(c) for c in choices), default=0)
        if request.sampling is not None:
            longest += request.sampling.max_new_tokens
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit and longest > limit:
            raise DataError(f"a prompt of {len(context)} tokens and its reply exceed the {limit} of {self.name}")
        return context, choices

    def _plan(self, rows: list[int], encoded: dict[int, Any]) -> Iterator[list[int]]:
        def cost(index: int) -> int:
            context, choices = encoded[index]
            return len(context) + max((len(c) for c in choices), default=0)

        batch: list[int] = []
        sequences = 0
        for index in sorted(rows, key=lambda i: (-cost(i), i)):
            added = max(1, len(encoded[index][1]))
            longest = cost(batch[0]) if batch else 0
            full = sequences + added > self.batch_size or (sequences + added) * longest > self.batch_tokens
            if batch and full:
                yield batch
                batch, sequences = [], 0
            batch.append(index)
            sequences += added
        if batch:
            yield batch

    def _pad_left(self, rows: Sequence[list[int]]) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        width = max(len(row) for row in rows)
        fill = pad_id(self._tokenizer)
        ids = torch.tensor([[fill] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        return ids, mask

    def _generate(self, requests: Sequence[Request], contexts: Sequence[list[int]]) -> list[Completion]:
        from transformers import LogitsProcessorList

        sampling = requests[0].sampling
        assert sampling is not None
        ids, mask = self._pad_left(contexts)
        watch = WatchWords(self._tokenizer, sampling.watch)
        processors: list[Any] = [watch]
        if sampling.temperature > 0:
            processors.append(RowNoise([seed_of(request) for request in requests], sampling))
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=sampling.max_new_tokens, do_sample=False,
            logits_processor=LogitsProcessorList(processors),
        )  # fmt: skip
        stops = self._model.generation_config.eos_token_id
        completions = []
        for row, context in enumerate(contexts):
            new = out[row, ids.shape[1] :].tolist()
            end = next((k for k, token in enumerate(new) if token in stops), None)
            kept = new if end is None else new[:end]
            text = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            finish = "length" if end is None else "stop"
            status: Status = "length" if end is None else ("ok" if text.strip() else "empty")
            completions.append(
                Completion(
                    status=status, text=text, finish_reason=finish, prompt_tokens=len(context),
                    completion_tokens=len(kept), watched=watch.last(row, kept),
                )
            )  # fmt: skip
        return completions

    def _score(self, parts: Sequence[tuple[list[int], list[list[int]]]]) -> list[ChoiceLogprobs]:
        import torch

        flat = [(context, choice) for context, choices in parts for choice in choices]
        ids, mask = self._pad_left([context + choice for context, choice in flat])
        keep = max(len(choice) for _, choice in flat) + 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep
        ).logits[:, :-1].float()  # fmt: skip
        targets = ids[:, -(keep - 1) :]
        logprobs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # (sequences, keep - 1)
        if not torch.isfinite(logprobs).all():
            raise DataError(f"model {self.name}: log-probabilities are not finite in {self.dtype}; try dtype=float32")
        values = [float(logprobs[row, -len(choice) :].sum()) for row, (_, choice) in enumerate(flat)]
        replies, start = [], 0
        for context, choices in parts:
            sums, tokens = tuple(values[start : start + len(choices)]), tuple(len(choice) for choice in choices)
            read_tokens = len(context) * len(choices) + sum(tokens)
            replies.append(ChoiceLogprobs(sums=sums, tokens=tokens, prompt_tokens=read_tokens, completion_tokens=0))
            start += len(choices)
        return replies

    def _read(self, asked: Sequence[Asked]) -> list[ChoiceLogprobs]:
        kinds = set(getattr(self._model.config, "layer_types", None) or ["full_attention"])
        window = getattr(self._model.config, "sliding_window", None)
        if window and max(len(a.context) for a in asked) > window and not hasattr(self._model.config, "layer_types"):
            raise UsageError(f"model {self.name} sees {window} tokens back; readings of longer prompts would be others")
        if kinds != {"full_attention"}:
            raise UsageError(f"model {self.name} has layers of {sorted(kinds)}; readings need full attention in all")
        real = max(self._tokenizer.get_vocab().values()) + 1
        try:
            readings = read(self._model, self._tokenizer, asked, real)
        except DataError as error:
            raise DataError(f"model {self.name}: {error}") from error
        return [
            ChoiceLogprobs(
                sums=tuple(sum(step.logprob for step in steps) for steps in said.choices),
                tokens=tuple(map(len, said.choices)), readings=said,
                prompt_tokens=len(one.context) + sum(map(len, said.choices)), completion_tokens=0,
            )
            for one, said in zip(asked, readings, strict=True)
        ]  # fmt: skip


def _keys_and_values(config: Any) -> int:
    """Count the numbers that a token leaves in the cache, over all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers * heads * width)


class WatchWords:
    """Logits processor that notes, at each step, the log-probabilities of some words' first tokens."""

    def __init__(self, tokenizer: Any, words: Sequence[str]) -> None:
        """Watch these words."""
        self.ids = {word: tokenizer.encode(word, add_special_tokens=False)[0] for word in words}
        self.steps: list[Any] = []

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Note and pass on; scores have shape (batch, vocabulary)."""
        if self.ids:
            rows = scores.float().log_softmax(-1)
            self.steps.append(rows[:, list(self.ids.values())].cpu())
        return scores

    def last(self, row: int, tokens: Sequence[int]) -> dict[str, float] | None:
        """Return the words' log-probabilities at the last step that said one of them; None if none did."""
        said = [step for step, token in enumerate(tokens) if token in self.ids.values()]
        if not said:
            return None
        values = self.steps[said[-1]][row]
        return {word: max(float(value), -1e4) for word, value in zip(self.ids, values, strict=True)}


class RowNoise:
    """Logits processor that samples per row: Gumbel noise from the row's own generator makes argmax a draw."""

    def __init__(self, seeds: Sequence[int], sampling: Sampling) -> None:
        """Seed one generator per row."""
        import torch

        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.sampling = sampling

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Scale by temperature, cut to top_p, add noise; scores have shape (batch, vocabulary)."""
        import torch
        from transformers import TopPLogitsWarper

        scores = scores.float() / self.sampling.temperature
        if self.sampling.top_p < 1:
            scores = TopPLogitsWarper(self.sampling.top_p)(input_ids, scores)  # type: ignore[arg-type]
        noise = torch.stack([torch.rand(scores.shape[1], generator=g) for g in self.generators])
        return scores - (-noise.clamp_min(1e-20).log()).log().to(scores.device)


def weights_digest(model: str) -> str:
    """Return the sha256 over a local model's files, or the name of a hub model."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    names = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json")), *sorted(folder.glob("*.jinja"))]
    parts = [(path.name, digest(path)) for path in names]
    return hashlib.sha256(canonical(parts).encode()).hexdigest()[:16]


def _kind(request: Request) -> str:
    return "generate" if request.sampling is not None else "read" if request.temperatures else "score"


def seed_of(request: Request) -> int:
    """Return the seed of a call: its own words and settings, whatever else is in its batch."""
    assert request.sampling is not None
    text = canonical([[dict(m) for m in request.messages], request.sampling.model_dump(mode="json")])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

"""A model in this process on vLLM (`pip install 'rbd_train[vllm]'`, best in an environment of its own).

The same contract as the local engine: contexts are encoded by us and handed over as token ids, so that nothing adds a
second BOS; batches are planned over the whole input and committed whole. vLLM schedules inside a batch by itself, and
its results may differ in the last digits with what else is in it (vllm#5898).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from rbd_train.engine import Commit, Engine
from rbd_train.engines.local import DTYPES, seed_of, weights_digest
from rbd_train.engines.wire import listed
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import ChoiceLogprobs, Completion, Reply, Request, Status
from rbd_train.ledger import Ledger
from rbd_train.modelling import encode_context, load_tokenizer, resolve_model
from rbd_train.run import world_size

TOP = 20  # log-probabilities that vLLM gives per position unless it is started otherwise


@dataclass
class VllmEngine:
    """Engine that runs a model in this process on vLLM."""

    model: str = "???"  # folder, hub name, or `embedded`
    dtype: str = "auto"  # auto: the model's own
    reasoning: bool = False  # let the generation prompt end with <think>\n (a detector's models)
    gpus: int = 1  # GPUs that share one copy of the model
    memory: float = 0.9  # share of each GPU's memory that vLLM takes
    max_length: int | None = None  # tokens of prompt and reply; null: the model's own context
    batch_size: int = 512  # calls handed over, and committed, at a time

    def open(self, ledger: Ledger) -> Engine:
        """Put the model behind the ledger.

        Raises:
            UsageError: an unknown dtype, or several workers, which would each take the same GPUs.
        """
        if self.dtype not in DTYPES:
            raise UsageError(f"engine.dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if world_size() > 1:
            raise UsageError("engine=vllm runs in one process: set engine.gpus, or serve it (launch/serve.sh) for more")
        return Engine(VllmBackend(resolve_model(self.model), self), ledger, attempts=1)


class VllmBackend:
    """Run one causal language model; it is loaded when the first call is really needed."""

    def __init__(self, model: str, config: VllmEngine) -> None:
        """Prepare; a rerun that finds every reply in the ledger never loads the weights."""
        self.name, self.config = model, config
        self.identity: dict[str, JsonValue] = {
            "engine": "vllm",
            "model": Path(model).name if Path(model).is_dir() else model,
            "weights": weights_digest(model),
            "dtype": config.dtype,
            "reasoning": config.reasoning,
        }
        self._tokenizer: Any = None
        self._model: Any = None
        self._stops: set[int] = set()

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Commit) -> None:
        """Answer every batch that has a missing request, whole.

        Raises:
            DataError: a choice without tokens.
            UsageError: readings of choices that are not one token; vLLM is not installed.
        """
        self._load()
        self._check_one_token(requests)
        for batch in self.together(requests):
            if missing.isdisjoint(batch):
                continue
            drawn = [index for index in batch if requests[index].sampling is not None]
            read = [index for index in batch if requests[index].temperatures]
            scored = sorted(set(batch).difference(drawn, read))
            replies: list[tuple[int, Reply]] = []
            replies += zip(drawn, self._generate([requests[index] for index in drawn]), strict=True)
            replies += zip(scored, self._score([requests[index] for index in scored]), strict=True)
            replies += zip(read, self._read([requests[index] for index in read]), strict=True)
            commit.many(sorted(replies, key=lambda pair: pair[0]))

    def together(self, requests: Sequence[Request]) -> list[range]:
        """Return the batches."""
        size = self.config.batch_size
        return [range(start, min(start + size, len(requests))) for start in range(0, len(requests), size)]

    def close(self) -> None:
        """Drop the model, so that the next one finds the memory free."""
        import gc

        self._model = self._tokenizer = None
        gc.collect()

    def _load(self) -> None:
        if self._model is not None:
            return
        try:
            from vllm import LLM  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError("engine=vllm needs vLLM: pip install 'rbd_train[vllm]', or serve it elsewhere") from error
        self._tokenizer = load_tokenizer(self.name, self.config.reasoning)
        self._stops = stop_tokens(self.name, self._tokenizer)
        # a model's own generation config may sample or penalise repetition: none of it may leak in; prompt
        # log-probabilities of cached prefixes may be another prompt's (vllm#42019)
        self._model = LLM(
            model=self.name, dtype=self.config.dtype, tensor_parallel_size=self.config.gpus, trust_remote_code=False,
            gpu_memory_utilization=self.config.memory, max_model_len=self.config.max_length, generation_config="vllm",
            seed=0, enable_prefix_caching=False, max_logprobs=TOP,
        )  # fmt: skip

    def _ask(self, prompts: Sequence[Sequence[int]], parameters: Sequence[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams

        if not prompts:
            return []
        limit = self._model.llm_engine.model_config.max_model_len
        for ids, given in zip(prompts, parameters, strict=True):
            if len(ids) + given["max_tokens"] > limit:
                raise DataError(f"a prompt of {len(ids)} tokens and its reply exceed the {limit} of {self.name}")
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        return list(self._model.generate(asked, [SamplingParams(**given) for given in parameters], use_tqdm=False))

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        parameters = list[dict[str, Any]]()
        for request in requests:
            sampling = request.sampling
            assert sampling is not None
            parameters.append(
                {
                    "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
                    "seed": seed_of(request), "stop_token_ids": sorted(self._stops),
                    "logprobs": TOP if sampling.watch else None,
                }
            )  # fmt: skip
        contexts = [encode_context(self._tokenizer, request.messages) for request in requests]
        replies = self._ask(contexts, parameters)
        return [self._completion(request, said) for request, said in zip(requests, replies, strict=True)]

    def _completion(self, request: Request, said: Any) -> Completion:
        assert request.sampling is not None
        output = said.outputs[0]
        tokens = list(output.token_ids)
        if output.finish_reason == "stop" and tokens and tokens[-1] in self._stops:
            tokens = tokens[:-1]  # as elsewhere, the end of a reply is no part of its text
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        status: Status = "length" if output.finish_reason == "length" else ("ok" if text.strip() else "empty")
        return Completion(
            status=status, text=text, finish_reason=output.finish_reason, prompt_tokens=len(said.prompt_token_ids),
            completion_tokens=len(tokens), watched=self._watched(output, request.sampling.watch),
        )  # fmt: skip

    def _watched(self, output: Any, words: Sequence[str]) -> dict[str, float] | None:
        ids = {word: self._tokenizer.encode(word, add_special_tokens=False)[0] for word in words}
        said = [step for step, token in enumerate(output.token_ids) if token in ids.values()]
        if not said:
            return None
        seen = {token: entry.logprob for token, entry in output.logprobs[said[-1]].items()}
        floor = min(seen.values())
        return {word: seen.get(token, floor) for word, token in ids.items()}  # beyond the top 20: their floor

    def _score(self, requests: Sequence[Request]) -> list[ChoiceLogprobs]:
        flat, lengths = list[list[int]](), list[list[int]]()
        for request in requests:
            context = encode_context(self._tokenizer, request.messages)
            end = [self._tokenizer.eos_token_id] if request.end else []
            choices = [self._tokenizer.encode(choice, add_special_tokens=False) + end for choice in request.choices]
            if not all(choices):
                raise DataError(f"a choice among {list(request.choices)!r:.200} has no tokens, so no log-probability")
            flat += [context + choice for choice in choices]
            lengths.append([len(choice) for choice in choices])
        # prompt_logprobs names each prompt token's own value beside the top one; one token has to be drawn
        parameters = [{"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}] * len(flat)
        said = iter(self._ask(flat, parameters))
        replies = []
        for counts in lengths:
            sums, fed = [], 0
            for count in counts:
                one = next(said)
                fed += len(one.prompt_token_ids)
                ids, steps = one.prompt_token_ids[-count:], one.prompt_logprobs[-count:]
                sums.append(sum(step[token].logprob for token, step in zip(ids, steps, strict=True)))
            replies.append(
                ChoiceLogprobs(sums=tuple(sums), tokens=tuple(counts), prompt_tokens=fed, completion_tokens=0)
            )
        return replies

    def _check_one_token(self, requests: Sequence[Request]) -> None:
        """Refuse readings that only whole distributions give: the likeliest tokens of one place are all there is."""
        asked = {choice for request in requests if request.temperatures for choice in request.choices}
        bare = sorted(choice for choice in asked if choice == choice.strip())  # a spaced one may go unlisted
        long = [choice for choice in bare if len(self._tokenizer.encode(choice, add_special_tokens=False)) > 1]
        if long or any(request.temperatures and request.end for request in requests):
            raise UsageError(
                f"engine=vllm reads one-token choices alone, off the {TOP} likeliest tokens, and "
                f"{long[0] if long else 'a choice that ends the reply'} is several; use engine=local, or a range of "
                "one-token scores"
            )

    def _read(self, requests: Sequence[Request]) -> list[ChoiceLogprobs]:
        """Read choices off the likeliest first tokens, as over HTTP."""
        contexts = [encode_context(self._tokenizer, request.messages) for request in requests]
        said = self._ask(contexts, [{"max_tokens": 1, "temperature": 0.0, "logprobs": TOP}] * len(contexts))
        found = []
        for request, one in zip(requests, said, strict=True):
            top = sorted(one.outputs[0].logprobs[0].items(), key=lambda entry: -entry[1].logprob)
            reply = listed([(self._tokenizer.decode([token]), entry.logprob) for token, entry in top], request)
            found.append(reply.model_copy(update={"prompt_tokens": len(one.prompt_token_ids), "completion_tokens": 1}))
        return found


def stop_tokens(model: str, tokenizer: Any) -> set[int]:
    """Return the ids that end a reply: the tokenizer's and those of the model's own generation config."""
    from transformers import GenerationConfig

    try:
        given = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # it has none
        given = None
    return {tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])} - {None}

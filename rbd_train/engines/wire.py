"""The OpenAI wire format as servers really speak it: requests to bodies, answers to replies."""

import email.utils
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rbd_train.errors import UsageError
from rbd_train.exchange import ChoiceLogprobs, Completion, Reply, Request
from rbd_train.records import Position, Readings, Step

REASONING_FIELDS = ("reasoning", "reasoning_content")  # vLLM renamed the second to the first (vllm#27752)


def body_of(request: Request, model: str, logprobs: bool) -> dict[str, Any]:
    """Return the body of a request.

    Raises:
        UsageError: choices of several words, whose log-probabilities no such server gives.
    """
    messages = [dict(message) for message in request.messages]
    if request.sampling is None:
        if request.end or any(len(choice.split()) != 1 for choice in request.choices):
            raise UsageError("over HTTP only one-token choices have log-probabilities; use a local engine, or letters")
        return {
            "model": model, "messages": messages, "max_tokens": 1, "temperature": 0.0,
            "logprobs": True, "top_logprobs": 20,
        }  # fmt: skip
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model, "messages": messages, "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p,
    }  # fmt: skip
    if sampling.temperature > 0:
        body["seed"] = sampling.sample
    if logprobs and sampling.watch:
        body |= {"logprobs": True, "top_logprobs": 20}
    return body


def read_answer(answer: Any, request: Request) -> Reply:
    """Turn a 200 into a reply; gateways answer 200 with `choices: null` and an error body (openai-agents#2850).

    Raises:
        AttributeError, TypeError, ValueError: the SDK passes any JSON on, unchecked.
    """
    choices = getattr(answer, "choices", None)
    if not choices:
        return Completion(status="server_error", error=f"200 without choices: {str(answer)[:300]}")
    choice = choices[0]
    if request.sampling is None:
        return _read_logprobs(choice, request, answer.usage)
    content = choice.message.content
    extra = choice.message.model_extra or {}
    field = next((name for name in REASONING_FIELDS if extra.get(name)), None)
    finish = choice.finish_reason
    if finish == "content_filter":
        status = "content_filter"
    elif finish == "length":
        status = "length"
    elif not (content or "").strip():
        status = "empty"
    else:
        status = "ok"
    usage = answer.usage
    return Completion(
        status=status,  # type: ignore[arg-type]
        text=content or "",
        reasoning=extra[field] if field else None,
        reasoning_field=field or ("tags" if "</think>" in (content or "") else None),
        finish_reason=finish,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        watched=_watched(choice, request.sampling.watch),
    )


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait, given as milliseconds, seconds or a date; 0 where it doesn't."""
    try:
        if "retry-after-ms" in headers:
            return float(headers["retry-after-ms"]) / 1000
        return float(headers.get("retry-after", 0))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time())
    except (ValueError, KeyError):  # neither: the back-off stands in
        return 0.0


def _watched(choice: Any, words: Sequence[str]) -> dict[str, float] | None:
    content = choice.logprobs.content if choice.logprobs else None
    for step in reversed(content or []):
        if step.token.strip() in words:
            seen = {top.token.strip(): top.logprob for top in reversed(step.top_logprobs)}
            floor = min(seen.values(), default=step.logprob)
            return {word: seen.get(word, floor) for word in words}  # a word beyond the top 20 gets their floor
    return None


def _read_logprobs(choice: Any, request: Request, usage: Any) -> Reply:
    content = choice.logprobs.content if choice.logprobs else None
    if not content or not content[0].top_logprobs:
        return Completion(status="bad_request", error="the server returned no log-probabilities")
    reply = listed([(top.token, top.logprob) for top in content[0].top_logprobs], request)
    tokens = {kind: getattr(usage, kind) for kind in ("prompt_tokens", "completion_tokens")} if usage else {}
    return reply.model_copy(update=tokens)


def listed(top: Sequence[tuple[str, float]], request: Request) -> ChoiceLogprobs:
    """Read one-token choices off the likeliest tokens, likeliest first; one that isn't listed is bounded by the least.

    Args:
        top: tokens as text, and their log-probabilities.
        request: whose choices.
    """
    options = request.choices
    exact = dict(reversed(top))
    seen = {token.strip(): value for token, value in reversed(top)}
    spelled = any(option != option.strip() for option in options)  # then each spelling is a choice of its own
    found = exact if spelled else seen
    floor = min(exact.values())
    missing = tuple(option not in found for option in options)
    sums = tuple(found.get(option, floor) for option in options)  # a missing choice is bounded, not minus infinity
    steps = tuple((Step(position=0, logprob=s, bound=m),) for s, m in zip(sums, missing, strict=True))
    readings = Readings(choices=steps, positions=(Position(best=max(exact.values())),), top=exact)
    return ChoiceLogprobs(
        sums=sums, tokens=(1,) * len(options), bounds=missing, readings=readings if request.temperatures else None
    )

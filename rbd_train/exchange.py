"""What an engine is asked, and what comes back: a completion, or the log-probabilities of given choices."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from rbd_train.errors import UsageError
from rbd_train.records import Readings, Record

Status = Literal["ok", "length", "empty", "content_filter", "bad_request", "timeout", "server_error"]
TERMINAL: frozenset[str] = frozenset({"ok", "length", "content_filter", "bad_request"})


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Messages = Sequence[Message]


class Sampling(Record):
    """How a completion is drawn. `watch` asks for the log-probabilities of these words where one of them was said."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    sample: int = 0
    watch: tuple[str, ...] = ()

    def model_post_init(self, context: Any) -> None:
        """Refuse what no server would draw by.

        Raises:
            UsageError: a temperature below 0, a top_p beyond 0 to 1, or no token to be said.
        """
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise UsageError(
                f"temperature is {self.temperature} (0 or more), top_p is {self.top_p} (above 0, at most 1), "
                f"max_new_tokens is {self.max_new_tokens} (at least 1)"
            )


class Completion(Record):
    """What came back from one call; `status` says what the server did, never what the text means."""

    kind: Literal["completion"] = "completion"
    status: Status
    text: str = ""
    reasoning: str | None = None
    reasoning_field: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    watched: dict[str, float] | None = None


class ChoiceLogprobs(Record):
    """Per choice its summed log-probability (nats) and token count; `bounds` marks values that are upper bounds.

    `readings` holds the choices token by token, where temperatures were asked for. `prompt_tokens` counts what was
    read, the choices included, once for each where the prompt is read anew for it.
    """

    kind: Literal["choices"] = "choices"
    status: Status = "ok"
    sums: tuple[float, ...]
    tokens: tuple[int, ...]
    bounds: tuple[bool, ...] = ()
    readings: Readings | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


Reply = Completion | ChoiceLogprobs


class Request(NamedTuple):
    """One call: a completion (`sampling`) or the log-probabilities of `choices`, token by token with `temperatures`.

    `end` lets every choice be followed by the end of the reply.
    """

    messages: Messages
    sampling: Sampling | None = None
    choices: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()
    end: bool = False

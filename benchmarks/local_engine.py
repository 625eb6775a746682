"""Rows per second of the local engine, beside one-at-a-time `generate()` (what the published code does).

Cases of mixed length are read and reasoned about by the embedded model, greedily; the replies' tokens are compared row
by row in fp32. bf16 is reported: there a batch may round otherwise than a row alone.

    python benchmarks/local_engine.py [quick]
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rbd_train.engine import Engine
from rbd_train.engines.local import LocalBackend
from rbd_train.exchange import Messages, Sampling
from rbd_train.ledger import Ledger
from rbd_train.modelling import encode_context, resolve_model
from rbd_train.prompts.verdict import verdict_messages
from rbd_train.records import Item
from rbd_train.sources.generated import make_questions

SOLVE = "Work this out step by step, and end with the result."


def prompts_of(rows: int) -> list[Messages]:
    """Ask in two ways, short and long, so that prompts and replies differ in length."""
    questions = make_questions("train", -(-rows // 4), 0)[:rows]
    made: list[Messages] = []
    for number, question in enumerate(questions):
        item = Item(id="i", question=question.question, options=(question.right, question.wrong or ""), group="g")
        short: Messages = [{"role": "user", "content": f"{SOLVE}\n{question.question}"}]
        made.append(short if number % 2 else verdict_messages(item, (0, 1)))
    return made


def one_at_a_time(backend: LocalBackend, prompts: list[Messages], max_new_tokens: int) -> list[list[int]]:
    """Generate row by row with the same model object, as the published code's loop over a pipeline does."""
    import torch

    replies = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([encode_context(backend._tokenizer, prompt)], device=backend.device)
            out: Any = backend._model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
            replies.append(out[0, ids.shape[1] :].tolist())
    return replies


def race(dtype: str, rows: int, max_new_tokens: int, rounds: int) -> dict[str, float]:
    """Alternate the sides; returns medians of rows per second and the share of rows with equal tokens."""
    prompts = prompts_of(rows)
    backend = LocalBackend(resolve_model("embedded"), dtype, reasoning=False, batch_size=32, batch_tokens=16384)
    backend._load()
    ours, theirs, equal = [], [], 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(backend, Ledger(Path(folder) / "ledger.sqlite"), attempts=1)
            began = time.monotonic()
            mine = engine.generate(prompts, Sampling(max_new_tokens=max_new_tokens))
            ours.append(rows / (time.monotonic() - began))
        began = time.monotonic()
        single = one_at_a_time(backend, prompts, max_new_tokens)
        theirs.append(rows / (time.monotonic() - began))
        stops = backend._model.generation_config.eos_token_id
        texts = [
            backend._tokenizer.decode(
                [token for token in row if token not in stops],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            for row in single
        ]
        equal = sum(reply.text == text for reply, text in zip(mine, texts, strict=True))
        print(f"{dtype}: {ours[-1]:.2f} rows/s, one at a time {theirs[-1]:.2f}, equal {equal} of {rows}", flush=True)
    return {"ours": statistics.median(ours), "theirs": statistics.median(theirs), "equal": equal / rows}


def main(quick: bool) -> None:
    rows, length, rounds = (12, 12, 1) if quick else (128, 64, 3)
    fp32 = race("float32", rows, length, rounds)
    bf16 = race("bfloat16", rows, length, 1)
    print(json.dumps({
        "name": "local_engine", "ratio": round(fp32["ours"] / fp32["theirs"], 3), "ours": round(fp32["ours"], 3),
        "theirs": round(fp32["theirs"], 3), "unit": "rows/s", "rival": "one-at-a-time generate()", "runs": rounds,
        "rows": rows, "equal": fp32["equal"], "bf16_ratio": round(bf16["ours"] / bf16["theirs"], 3),
        "bf16_equal": bf16["equal"],
    }))  # fmt: skip


if __name__ == "__main__":
    main("quick" in sys.argv[1:])

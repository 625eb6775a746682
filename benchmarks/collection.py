"""Calls per second with the ledger on, beside inspect_ai, bespokelabs-curator and the bare SDK that stores nothing.

One fake server in a process of its own answers every side in 20 ms; each side runs in a process and, where its pins
clash with ours, in an environment that this script makes in .bench/. Ours is also run over 100,000 rows for its memory.

    python benchmarks/collection.py [quick]
"""

import asyncio
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve()
CONCURRENCY = 64
BAR_MB = 500  # over 100,000 rows
PEERS = {"inspect_ai": ["inspect-ai==0.3.285", "openai==3.57.0"], "curator": ["bespokelabs-curator==0.1.31"]}
SIDES = ("ours", "bare_sdk", "inspect_ai", "curator")


def texts(rows: int) -> list[str]:
    return [f"Row {k}: was the decision biased? Think, then answer Yes or No." for k in range(rows)]


# the sides; each returns the seconds of its calls alone ------------------------------------------------------------


def ours(url: str, rows: int, folder: str) -> float:
    import openai  # noqa: F401  # as the other sides: what is imported is not timed

    from rbd_train.engines.http import HttpEngine
    from rbd_train.exchange import Sampling
    from rbd_train.ledger import Ledger

    settings = HttpEngine(model="m", base_url=url, api_key_env=None, concurrency=CONCURRENCY)
    prompts = [[{"role": "user", "content": text}] for text in texts(rows)]
    began = time.monotonic()
    replies = settings.open(Ledger(Path(folder) / "ledger.sqlite")).generate(prompts, Sampling(max_new_tokens=64))  # type: ignore[arg-type]
    seconds = time.monotonic() - began
    assert all(reply.status == "ok" for reply in replies)
    return seconds


def bare_sdk(url: str, rows: int, folder: str) -> float:
    import openai

    async def collect() -> int:
        client = openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0)
        todo = iter(texts(rows))

        async def work() -> int:
            done = 0
            for text in todo:
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": text}], max_tokens=64, temperature=0
                )
                done += bool(answer.choices[0].message.content)
            return done

        return sum(await asyncio.gather(*(work() for _ in range(CONCURRENCY))))

    began = time.monotonic()
    assert asyncio.run(collect()) == rows
    return time.monotonic() - began


def inspect_ai(url: str, rows: int, folder: str) -> float:
    os.environ |= {"FAKE_BASE_URL": url, "FAKE_API_KEY": "none"}
    import inspect_ai as peer
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.solver import generate

    samples = MemoryDataset([Sample(input=text) for text in texts(rows)])
    task = peer.Task(dataset=samples, solver=generate())
    began = time.monotonic()
    (log,) = peer.eval(
        task, model="openai-api/fake/m", log_dir=folder, display="none", max_connections=CONCURRENCY,
        max_samples=2 * CONCURRENCY, max_tokens=64, temperature=0, log_realtime=False, score=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    assert log.status == "success" and len(log.samples or ()) == rows, log.error
    return seconds


def curator(url: str, rows: int, folder: str) -> float:
    os.environ |= {
        "TELEMETRY_ENABLED": "false", "CURATOR_DISABLE_RICH_DISPLAY": "1", "OPENAI_API_KEY": "none",
        "CURATOR_CACHE_DIR": folder, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # fmt: skip
    # curator counts tokens with a file that it would fetch; litellm, which it needs, brings the file along
    litellm = importlib.util.find_spec("litellm")
    assert litellm is not None and litellm.origin is not None
    os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(litellm.origin).parent / "litellm_core_utils" / "tokenizers")
    from bespokelabs import curator as peer

    class Asker(peer.LLM):  # type: ignore[misc]
        def prompt(self, row: dict[str, str]) -> str:
            return row["text"]

        def parse(self, row: dict[str, str], response: str) -> dict[str, str]:
            return {"text": row["text"], "reply": response}

    unlimited = {"max_requests_per_minute": 10**7, "max_tokens_per_minute": 10**10}
    asker = Asker(
        model_name="gpt-4", backend="openai", generation_params={"max_tokens": 64, "temperature": 0},
        backend_params={"base_url": url, "max_concurrent_requests": CONCURRENCY, **unlimited},
    )  # fmt: skip
    began = time.monotonic()
    answer = asker([{"text": text} for text in texts(rows)])
    seconds = time.monotonic() - began
    assert len(getattr(answer, "dataset", answer)) == rows
    return seconds


# the race -----------------------------------------------------------------------------------------------------------


def python_of(side: str) -> str:
    """Return the interpreter of a side; a peer's environment is made once."""
    if side not in PEERS:
        return sys.executable
    home = HERE.parents[1] / ".bench" / side
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin/python", "-m", "pip", "install", "--quiet", *PEERS[side]], check=True)
        (home / "ready").touch()
    return str(home / "bin/python")


def race(side: str, url: str, rows: int) -> tuple[float, float]:
    """Run one side over so many rows; returns calls per second and its peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python_of(side), str(HERE), "side", side, url, str(rows), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return rows / told["seconds"], told["peak_mb"]


def main(quick: bool) -> None:
    rows, rounds, many = (300, 1, 1000) if quick else (3000, 3, 100_000)
    for side in PEERS:
        python_of(side)
    server = subprocess.Popen(
        [sys.executable, "-m", "rbd_train.engines.fake_server", "--port=0", "--faults=0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        speeds: dict[str, list[float]] = {side: [] for side in SIDES}
        few = 0.0
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                speed, peak = race(side, url, rows)
                speeds[side].append(speed)
                few = peak if side == "ours" else few
                print(f"round {number + 1}: {side} {speeds[side][-1]:.0f} calls/s", flush=True)
        _, peak = race("ours", url, many)
    finally:
        server.kill()
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    rival = max(PEERS, key=lambda side: medians[side])
    ratios = {side: round(medians["ours"] / medians[side], 3) for side in SIDES if side != "ours"}
    print(json.dumps({
        "name": "collection", "ratio": ratios[rival], "ratios": ratios, "ours": round(medians["ours"], 1),
        "theirs": round(medians[rival], 1), "unit": "calls/s", "rival": rival, "runs": rounds,
        "rows": rows, "concurrency": CONCURRENCY, "peak_mb": round(peak), "peak_rows": many,
        "peak_mb_of_the_race": round(few), "bar_mb": BAR_MB, "in_bar": peak < BAR_MB,
    }))  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        name, url, rows, folder = sys.argv[2:]
        seconds = {"ours": ours, "bare_sdk": bare_sdk, "inspect_ai": inspect_ai, "curator": curator}[name](
            url, int(rows), folder
        )
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print("\n" + json.dumps({"seconds": seconds, "peak_mb": peak_mb}))
    else:
        main("quick" in sys.argv[1:])

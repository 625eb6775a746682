"""Upload to the hub, where a stage was asked to: `push_to_hub=owner/name`; nothing leaves this machine otherwise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rbd_train.errors import DataError, UsageError


def check_name(hub: str | None) -> None:
    """Refuse what is no repository's name, before anything is made that would be uploaded.

    Raises:
        UsageError: it isn't owner/name.
    """
    if hub is None:
        return
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(hub)
    except HFValidationError as error:
        raise UsageError(f"push_to_hub is {hub!r}: {error}") from error
    if "/" not in hub:
        raise UsageError(f"push_to_hub is {hub!r}; it is owner/name")


def upload(hub: str, kind: Literal["model", "dataset"], folder: Path, patterns: Sequence[str] = ()) -> None:
    """Upload a folder's files to a repository of the hub, made private where it is new; the token is HF_TOKEN's.

    Raises:
        DataError: the hub can't be reached or refuses; the files stay where they are.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(hub, repo_type=kind, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=hub, repo_type=kind, folder_path=folder, allow_patterns=list(patterns) or None)
    except Exception as error:  # its HTTP client's errors come through as they are, and the client changes by version
        told = str(error).strip().split("\n", 1)[0][:200]
        raise DataError(
            f"push_to_hub={hub}: {type(error).__name__}: {told}; check the name, HF_TOKEN and HF_HUB_OFFLINE, "
            f"or upload {folder} by hand: hf upload {hub} {folder} --repo-type {kind}"
        ) from error

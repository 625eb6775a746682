"""Upload to the hub, where a stage was asked to: `push_to_hub=owner/name`; nothing leaves this machine otherwise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rbd_train.errors import DataError


def upload(hub: str, kind: Literal["model", "dataset"], folder: Path, patterns: Sequence[str] = ()) -> None:
    """Upload a folder's files to a repository of the hub, made private where it is new; the token is HF_TOKEN's.

    Raises:
        DataError: the hub can't be reached or refuses; the files stay where they are.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        HfApi().create_repo(hub, repo_type=kind, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=hub, repo_type=kind, folder_path=folder, allow_patterns=list(patterns) or None)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        told = str(error).strip().split("\n", 1)[0][:200]
        raise DataError(
            f"push_to_hub={hub}: {type(error).__name__}: {told}; check the name, HF_TOKEN and HF_HUB_OFFLINE, "
            f"or upload {folder} by hand: hf upload {hub} {folder} --repo-type {kind}"
        ) from error

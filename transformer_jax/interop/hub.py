"""Where a checkpoint is: a folder on this machine, or a repository on the Hugging Face hub."""

import re
from pathlib import Path

from transformer_jax.errors import UserError

NEEDED = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "special_tokens_map.json"]
NEEDED += ["vocab.*", "merges.txt"]
OLDER = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def find_folder(path_or_name: str | Path) -> Path:
    """The folder of a checkpoint; of a name that is no folder, what the hub has, fetched once and kept in its cache."""
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path_or_name)) or folder.exists():
        raise UserError(f"{path_or_name} is no folder; name that of a checkpoint, or a repository on the hub")
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f'there is no folder {path_or_name}; to look for it on the hub: pip install "transformer_jax[hub]"'
        ) from None
    name = str(path_or_name)
    try:
        files = HfApi().list_repo_files(name)
        has_safetensors = any(file.endswith(".safetensors") for file in files)
        return Path(snapshot_download(name, allow_patterns=NEEDED if has_safetensors else NEEDED + OLDER))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{name} is no folder, and the hub does not give it: {reason}") from error

"""Where a checkpoint is: a folder on this machine, or a repository on the Hugging Face hub."""

import re
from pathlib import Path

from transformer_jax.errors import UserError

NEEDED = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]
NEEDED += ["tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt"]
OLDER = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def find_folder(path_or_name: str | Path) -> Path:
    """The folder of a checkpoint; of a name that is no folder, what the hub has, fetched once and kept in its cache."""
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path_or_name)) or folder.exists():
        raise UserError(f"{path_or_name} is no folder; name that of a checkpoint, or a repository on the hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f'there is no folder {path_or_name}; to look for it on the hub: pip install "transformer_jax[hub]"'
        ) from None
    name = str(path_or_name)
    try:
        folder = Path(snapshot_download(name, allow_patterns=NEEDED))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=NEEDED + OLDER))
    except Exception as error:  # of the name, the network, the hub or the disk, each by a library of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name} is no folder, and the hub does not give it: {reason}") from error
    return folder

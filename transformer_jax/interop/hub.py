"""Find a checkpoint: a folder on this machine, or a repository on the Hugging Face hub."""

import re
from pathlib import Path

from transformer_jax.errors import UserError

NEEDED = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]
NEEDED += ["tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt"]
OLDER = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def find_folder(path_or_name: str | Path) -> Path:
    """The folder of a checkpoint. A name that is not a folder is fetched from the hub, once: it is cached."""
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    is_local = folder.exists() or (len(folder.parts) > 1 and folder.parent.exists())  # a path with a mistake in it
    if is_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path_or_name)):
        raise UserError(
            f"{path_or_name} is not a folder; give the folder of a checkpoint, or the name of one on the hub"
        )
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
        raise UserError(f"{name} is not a folder, and cannot be fetched from the hub: {reason}") from error
    return folder

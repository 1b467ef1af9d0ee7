"""The tokenizer that lies beside a checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

from transformer_jax.data.tokenizer import Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError

ROLES = {
    "pad": ("pad_token", "eos_token", "unk_token"),
    "begin": ("cls_token", "bos_token", "pad_token", "eos_token"),
    "end": ("sep_token", "eos_token"),
}
"""For each of our special tokens those of transformers that have its role, the first that there is."""

WORD_PIECE = ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder: tokenizer.json, or the vocabulary files of old; None where there is neither."""
    special = _special_tokens(folder)
    found = _open(folder, special)
    if found is None:
        return None
    known = {name: token for name, token in special.items() if found.token_to_id(token) is not None}
    pad, begin, end = (next((known[name] for name in ROLES[role] if name in known), None) for role in ROLES)
    return Tokenizer(found, TokenizerConfig(pad=pad, begin=begin, end=end))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, and the names of its special tokens as transformers reads them."""
    tokenizer.save(folder / "tokenizer.json")
    pad, begin, end = tokenizer.tokens([tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id])
    names = {"pad_token": pad, "bos_token": begin, "cls_token": begin, "eos_token": end, "sep_token": end}
    for name, id in (("unk_token", tokenizer.unknown_id), ("mask_token", tokenizer.find("[MASK]", "<mask>"))):
        if id is not None:
            names[name] = tokenizer.tokens([id])[0]
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _open(folder: Path, special: Mapping[str, str]) -> tokenizers.Tokenizer | None:
    settings = _json(folder / "tokenizer_config.json")
    whole, words = folder / "tokenizer.json", folder / "vocab.txt"
    pieces, merges = folder / "vocab.json", folder / "merges.txt"
    try:
        if whole.is_file():
            return tokenizers.Tokenizer.from_file(str(whole))
        if words.is_file():
            names: dict[str, Any] = {name: special[name] for name in WORD_PIECE if name in special}
            word_piece = BertWordPieceTokenizer(
                str(words),
                **names,
                lowercase=settings.get("do_lower_case", True),
                strip_accents=settings.get("strip_accents"),
                handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            )
            return tokenizers.Tokenizer.from_str(word_piece.to_str())
        if pieces.is_file() and merges.is_file():
            byte_pairs = ByteLevelBPETokenizer(str(pieces), str(merges), settings.get("add_prefix_space", False))
            return tokenizers.Tokenizer.from_str(byte_pairs.to_str())
    except Exception as error:  # the library raises nothing more special
        raise UserError(f"the tokenizer in {folder} cannot be read: {error}") from error
    return None


def _special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens by the names that transformers has for them."""
    fields = _json(folder / "tokenizer_config.json") | _json(folder / "special_tokens_map.json")
    known = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    if not (folder / "vocab.txt").is_file():
        known = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    given = {name: _content(value) for name, value in fields.items() if name.endswith("_token") and value}
    return known | {name: token for name, token in given.items() if token}


def _content(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} holds no JSON object")
    return fields

"""The tokenizer beside a checkpoint, read and written as transformers does."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.tokenizer_config import TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop.untrusted import shown

ROLES = {
    "pad": ("pad_token", "eos_token", "unk_token"),
    "begin": ("cls_token", "bos_token", "pad_token", "eos_token"),
    "end": ("sep_token", "eos_token"),
}
"""For each of our special tokens, those of transformers that have its role: the first that exists is taken."""

MARKED = re.compile(r"\[.*\]|<.*>")  # how special tokens are written, in any case
WORD_PIECE = ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")


AROUND = {
    "bert": ("{begin} $A {end}", "{begin} $A {end} $B:1 {end}:1"),
    "roberta": ("{begin} $A {end}", "{begin} $A {end} {end} $B {end}"),
    "distilbert": ("{begin} $A {end}", "{begin} $A {end} $B {end}"),
    "gpt2": ("{begin} $A", "{begin} $A {begin} $B"),
    "llama": ("{begin} $A", "{begin} $A {begin} $B"),
    "t5": ("$A {end}", "$A {end} $B {end}"),
    "marian": ("$A {end}", "$A {end} $B {end}"),
    "pegasus": ("$A {end}", "$A {end} $B {end}"),
    "xlnet": ("$A {end} {begin}", "$A {end} $B {end} {begin}"),
}
"""The special tokens that models of each type read around a text, or a pair of texts, as the tasks here add them. For a
language model, the begin token is added only if `Tokenizer.add_begin` is set."""

LANGUAGE_MODELS = ("gpt2", "llama")
MASKED = ("bert", "roberta", "distilbert")
TYPED = ("bert",)  # model types that read token types: which text of a pair a token belongs to


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder: tokenizer.json, or the older vocabulary files; None where there is neither."""
    special = _special_tokens(folder)
    found = _open(folder, special)
    if found is None:
        return None
    known = {name: token for name, token in special.items() if found.token_to_id(token) is not None}
    pad, begin, end = (next((known[name] for name in ROLES[role] if name in known), None) for role in ROLES)
    tokenizer = Tokenizer(found, TokenizerConfig(pad=pad, begin=begin, end=end))
    add_begin = _json(folder / "tokenizer_config.json").get("add_bos_token")
    return tokenizer.with_begin(add_begin if isinstance(add_begin, bool) else tokenizer.begins_texts)


def save_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    *,
    model_type: str | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
) -> None:
    """Write a tokenizer as transformers reads it: tokenizer.json, and tokenizer_config.json with its special tokens.

    Args:
        tokenizer: The tokenizer that the model was trained with.
        folder: Where to write.
        model_type: The `model_type` of the checkpoint, which decides the special tokens that transformers adds around a
            text; None leaves that to the tokenizer's own file.
        vocab_size: The number of ids of the model. Where a masked language model has more ids than a tokenizer without
            a mask token, the mask is the id after those of the tokenizer.
        max_length: The most tokens that the model reads.
    """
    tokenizer.save(folder)
    written = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pad, begin, end = tokenizer.tokens([tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id])
    names = {"pad_token": pad, "bos_token": begin, "cls_token": begin, "eos_token": end, "sep_token": end}
    if tokenizer.unknown_id is not None:
        names["unk_token"] = tokenizer.tokens([tokenizer.unknown_id])[0]
    mask = tokenizer.mask_token
    if mask is None and model_type in MASKED and (vocab_size or 0) > tokenizer.vocab_size:
        mask = "[MASK]"
        written.add_special_tokens([AddedToken(mask, lstrip=tokenizer.spaces_begin_words)])
    if mask is not None:
        names["mask_token"] = mask
    if model_type in AROUND:
        _add_template(tokenizer, written, model_type)
    written.save(str(folder / "tokenizer.json"))
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    fields["clean_up_tokenization_spaces"] = False  # or decoded text would have fewer spaces than was encoded
    # GPT-2 would read token types as more tokens, and others refuse them.
    types = ["token_type_ids"] if model_type in TYPED else []
    fields["model_input_names"] = ["input_ids", *types, "attention_mask"]
    if model_type in LANGUAGE_MODELS:
        fields["add_bos_token"] = bool(tokenizer.add_begin)
    if max_length is not None:
        fields["model_max_length"] = max_length
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise if a tokenizer has ids that a model with this vocabulary has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        first = shown(next(token for token in tokenizer.vocabulary()[vocab_size:] if token))
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is {vocab_size} (without room "
            f"for {first}); give the tokenizer that the model was trained with"
        )


def _add_template(tokenizer: Tokenizer, written: tokenizers.Tokenizer, model_type: str) -> None:
    """Have transformers add the special tokens that the tasks here add, where the tokenizer does not yet."""
    begin, end = tokenizer.tokens([tokenizer.begin_id, tokenizer.end_id])
    single, pair = AROUND[model_type]
    if model_type in LANGUAGE_MODELS and not tokenizer.add_begin:
        single, pair = "$A", "$A $B"
    ids = {"{begin}": [tokenizer.begin_id], "{end}": [tokenizer.end_id], "$A": tokenizer.encode(["a"])[0]}
    if written.encode("a").ids == [id for item in single.split() for id in ids[item]]:
        return
    written.post_processor = processors.TemplateProcessing(
        single=[item.format(begin=begin, end=end) for item in single.split()],
        pair=[item.format(begin=begin, end=end) for item in pair.split()],
        special_tokens=[(begin, tokenizer.begin_id), (end, tokenizer.end_id)],
    )


def _open(folder: Path, special: Mapping[str, str]) -> tokenizers.Tokenizer | None:
    settings = _json(folder / "tokenizer_config.json")
    complete, words = folder / "tokenizer.json", folder / "vocab.txt"
    pieces, merges = folder / "vocab.json", folder / "merges.txt"
    try:
        if complete.is_file():
            return tokenizers.Tokenizer.from_file(str(complete))
        if words.is_file():
            names: dict[str, Any] = {name: special[name] for name in WORD_PIECE if name in special}
            lowercase = settings.get("do_lower_case")
            word_piece = BertWordPieceTokenizer(
                str(words),
                **names,
                lowercase=not _is_cased(words, special.values()) if lowercase is None else lowercase,
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


def _is_cased(path: Path, special: Collection[str]) -> bool:
    """Whether a vocabulary has pieces in upper case, which a lowercased text never contains."""
    pieces = models.WordPiece.read_file(str(path))
    return any(piece != piece.lower() for piece in pieces if piece not in special and not MARKED.fullmatch(piece))


def _special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens by the names that transformers has for them."""
    fields = _json(folder / "tokenizer_config.json") | _json(folder / "special_tokens_map.json")
    known = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    if not (folder / "vocab.txt").is_file():
        known = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    given = {name: _content(value) for name, value in fields.items() if name.endswith("_token") and value}
    return known | {name: token for name, token in given.items() if token}


def _content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return fields

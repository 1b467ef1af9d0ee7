"""Which tokens of a tokenizer have a meaning of their own, whoever made it."""

import tokenizers

from transformer_jax.errors import UserError

PAD, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"

WELL_KNOWN = {
    "pad": (PAD, "[PAD]"),
    "begin": (BEGIN, "[CLS]", "<bos>", "<|endoftext|>"),
    "end": (END, "[SEP]", "<eos>", "<|endoftext|>"),
    "unknown": (UNKNOWN, "[UNK]"),
    "mask": ("[MASK]", "<mask>"),
}
"""The names that published tokenizers give their special tokens, ours first."""


def special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """The special tokens and their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: id for id, token in added.items() if token.special}


def special_id(tokenizer: tokenizers.Tokenizer, role: str, name: str | None, *, otherwise: int | None = None) -> int:
    """The id of the token that is named, or else known, to have this role; it is made special if it is not."""
    special = special_tokens(tokenizer)
    name = name or next((known for known in WELL_KNOWN[role] if known in special), None)
    if name is not None:
        tokenizer.add_special_tokens([name])
        return special_tokens(tokenizer)[name]
    if otherwise is not None:
        return otherwise
    raise UserError(
        f"the tokenizer has no {role} token that is known; name it with --processor.{role} TOKEN: "
        f"one of its special tokens ({', '.join(special) or 'it has none'}) or a new one, which is added"
    )


def unknown_id(tokenizer: tokenizers.Tokenizer, name: str | None) -> int | None:
    """The id of the token that is named, or that the model says, or that is known; None where there is none."""
    special = special_tokens(tokenizer)
    known = next((known for known in WELL_KNOWN["unknown"] if known in special), None)
    found = name or getattr(tokenizer.model, "unk_token", None) or known
    id = None if found is None else tokenizer.token_to_id(found)
    if name is not None and id is None:
        raise UserError(f"processor.unknown={name!r} is not a token of the tokenizer; name one that is, or none")
    return id

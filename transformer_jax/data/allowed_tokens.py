"""Special tokens that may be written in a text: a copy of a tokenizer in which those allowed are found like words."""

import json
from collections.abc import Mapping

import tokenizers


def with_allowed(tokenizer: tokenizers.Tokenizer, allowed: Mapping[str, bool]) -> tokenizers.Tokenizer:
    """A tokenizer that finds these tokens in a text, and no other special token.

    Args:
        tokenizer: Is not changed.
        allowed: Tokens of its vocabulary, and whether the spaces before one are part of it (`lstrip`).

    The library finds either all special tokens or none, but it always finds those that are added and not special.
    """
    content = json.loads(tokenizer.to_str())
    added = {entry["content"]: entry for entry in content["added_tokens"]}
    for token, takes_space in allowed.items():
        plain = {"id": tokenizer.token_to_id(token), "content": token, "single_word": False, "rstrip": False}
        entry = added.setdefault(token, {**plain, "lstrip": False, "normalized": False})
        entry |= {"special": False, "lstrip": entry["lstrip"] or takes_space}
    content["added_tokens"] = sorted(added.values(), key=lambda entry: entry["id"])
    copy = tokenizers.Tokenizer.from_str(json.dumps(content))
    copy.encode_special_tokens = True
    return copy

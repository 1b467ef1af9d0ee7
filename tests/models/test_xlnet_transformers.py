"""XLNet beside that of transformers, where it is installed."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from tests.models.tiny_xlnet import (
    ALL_ALLOWED,
    ALL_VALID,
    CONFIG,
    LENGTH,
    NO_TYPES,
    ONE_SIDED,
    Text,
    attention,
    hidden_and_memory,
    make,
    predict,
    weights_of,
)


@cache
def original(config, **changes):
    """A model of transformers with the weights of ours, its tensors by their names there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = transformers.XLNetConfig(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        d_inner=config.d_ff,
        mem_len=config.memory_length,
        **changes,
    )
    model = transformers.XLNetLMHeadModel(settings).eval()
    weights = weights_of(config)
    names = {
        "transformer.word_embedding.weight": weights["embedding/table"],
        "transformer.mask_emb": weights["mask_embedding"][None, None],
        "lm_loss.weight": weights["embedding/table"],
        "lm_loss.bias": weights["lm_head/bias"],
    }
    ours = {
        "rel_attn.q": "self_attention/query/weight",
        "rel_attn.k": "self_attention/key/weight",
        "rel_attn.v": "self_attention/value/weight",
        "rel_attn.r": "self_attention/distance/weight",
        "rel_attn.o": "self_attention/output/weight",
        "rel_attn.r_w_bias": "self_attention/content_bias",
        "rel_attn.r_r_bias": "self_attention/distance_bias",
        "rel_attn.r_s_bias": "self_attention/type_bias",
        "rel_attn.seg_embed": "self_attention/type_embedding",
        "rel_attn.layer_norm.weight": "self_attention_residual/norm/scale",
        "rel_attn.layer_norm.bias": "self_attention_residual/norm/bias",
        "ff.layer_1.weight": "feed_forward/input/weight",
        "ff.layer_1.bias": "feed_forward/input/bias",
        "ff.layer_2.weight": "feed_forward/output/weight",
        "ff.layer_2.bias": "feed_forward/output/bias",
        "ff.layer_norm.weight": "feed_forward_residual/norm/scale",
        "ff.layer_norm.bias": "feed_forward_residual/norm/bias",
    }
    for layer in range(config.num_layers):
        for name, path in ours.items():
            value = weights[f"encoder/blocks/{path}"][layer]
            if name == "rel_attn.o":
                value = value.transpose(2, 0, 1)
            elif name.startswith("ff.layer_") and value.ndim == 2:
                value = value.T
            names[f"transformer.layer.{layer}.{name}"] = value
    model.load_state_dict({name: torch.tensor(value) for name, value in names.items()})
    return model


def run_original(model, text, **arguments):
    """Last hidden states, logits, memory [L B M D] and attention [L B N T S] of the content stream."""
    torch = pytest.importorskip("torch")
    given = {
        name: list(torch.tensor(value)) if name == "mems" else torch.tensor(value) for name, value in arguments.items()
    }
    with torch.no_grad():
        output = model(
            torch.tensor(text.ids), **given, use_mems=True, output_hidden_states=True, output_attentions=True
        )
    attentions = [layer[0] if isinstance(layer, tuple) else layer for layer in output.attentions]
    return SimpleNamespace(
        hidden=output.hidden_states[-1].numpy(),
        logits=output.logits.numpy(),
        memory=np.stack([layer.numpy().swapaxes(0, 1) for layer in output.mems]),
        weights=np.stack([layer.numpy() for layer in attentions]),
    )


def as_there(text):
    """What `text` says, as transformers says it: 1 is "may not see" in a mask of an order."""
    return {
        "token_type_ids": text.types,
        "attention_mask": text.valid.astype(np.float32),
        "perm_mask": 1 - text.allowed.astype(np.float32),
        "mems": text.memory.swapaxes(1, 2),
        "target_mapping": np.eye(LENGTH, dtype=np.float32)[text.places],
    }


def close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "given",
    [
        ("attention_mask",),
        ("token_type_ids",),
        ("perm_mask",),
        ("attention_mask", "token_type_ids", "perm_mask"),
        ("attention_mask", "mems"),
        ("token_type_ids", "mems"),
        ("attention_mask", "token_type_ids", "perm_mask", "mems"),
    ],
    ids=" ".join,
)
def test_one_stream_is_that_of_transformers(given):
    text, model = Text(), make()
    there = as_there(text)
    expected = run_original(original(CONFIG), text, **{name: there[name] for name in given})
    options = {
        "valid": text.valid if "attention_mask" in given else ALL_VALID,
        "allowed": text.allowed if "perm_mask" in given else ALL_ALLOWED,
        "memory": text.memory if "mems" in given else None,
    }
    x, memory = hidden_and_memory(model, text.ids, text.types if "token_type_ids" in given else NO_TYPES, **options)
    close(x, expected.hidden)
    close(memory, expected.memory)
    close(model.logits(x), expected.logits)
    assert memory.shape[2] == (2 * LENGTH if "mems" in given else LENGTH)


def test_a_plain_text_is_that_of_transformers():
    text, model = Text(), make()
    expected = run_original(original(CONFIG), text)
    x, memory = hidden_and_memory(model, text.ids)
    close(x, expected.hidden)
    close(memory, expected.memory)


@pytest.mark.parametrize("remembers", [False, True])
def test_two_streams_are_those_of_transformers(remembers):
    """Where every place sees something: one that sees nothing sees all alike there, its own token too."""
    text, model = Text(), make()
    text.allowed[:, :, LENGTH - 1] |= np.arange(LENGTH)[None] != LENGTH - 1
    text.places = np.array([[3, 0], [4, 1], [1, 3]])
    options, there = {"valid": text.valid, "allowed": text.allowed}, as_there(text)
    if remembers:
        expected = run_original(original(CONFIG), text, **there)
        options |= {"target_positions": text.places, "memory": text.memory}
        x, memory = hidden_and_memory(model, text.ids, text.types, **options)
        close(x, expected.hidden)
        close(memory, expected.memory)
        close(model.logits(x), expected.logits)
    else:
        del there["mems"]
        expected = run_original(original(CONFIG), text, **there)
        close(predict(model, text.ids, text.places, text.types, **options), expected.logits)


def test_one_sided_attention_is_that_of_transformers():
    """Without a mask of any kind, which transformers cannot add to its own here if there are several rows."""
    text = Text()
    there = {name: as_there(text)[name] for name in ("token_type_ids", "mems")}
    expected = run_original(original(ONE_SIDED, attn_type="uni", clamp_len=3), text, **there)
    options = {"valid": ALL_VALID, "allowed": ALL_ALLOWED, "memory": text.memory}
    x, memory = hidden_and_memory(make(ONE_SIDED), text.ids, text.types, **options)
    close(x, expected.hidden)
    close(memory, expected.memory)


def test_the_attention_is_that_of_transformers():
    text, there = Text(), as_there(Text())
    del there["target_mapping"]
    expected = run_original(original(CONFIG), text, **there)
    options = {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    close(attention(make(), text.ids, text.types, **options), expected.weights)

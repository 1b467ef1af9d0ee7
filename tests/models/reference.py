"""The 2017 model once more, in NumPy, head by head and position by position, straight from the paper."""

import numpy as np


def transformer(weights, config, source, target):
    """Logits of one pair of sequences without padding."""
    encoder = [
        {name: value[layer] for name, value in weights["encoder"].items()} for layer in range(config.num_encoder_layers)
    ]
    decoder = [
        {name: value[layer] for name, value in weights["decoder"].items()} for layer in range(config.num_decoder_layers)
    ]
    table = weights["table"]
    memory = embed(table, source)
    for layer in encoder:
        memory = sublayer(
            memory, layer, "self_attention", config, lambda x, layer=layer: attend(x, x, layer, "self_attention")
        )
        memory = sublayer(memory, layer, "feed_forward", config, lambda x, layer=layer: feed_forward(x, layer))
    memory = final_norm(memory, weights, "encoder_norm", config)
    x = embed(table, target)
    for layer in decoder:
        x = sublayer(
            x,
            layer,
            "self_attention",
            config,
            lambda x, layer=layer: attend(x, x, layer, "self_attention", causal=True),
        )
        x = sublayer(
            x, layer, "cross_attention", config, lambda x, layer=layer: attend(x, memory, layer, "cross_attention")
        )
        x = sublayer(x, layer, "feed_forward", config, lambda x, layer=layer: feed_forward(x, layer))
    return final_norm(x, weights, "decoder_norm", config) @ table.T


def embed(table, ids):
    size = table.shape[1]
    position = np.zeros((len(ids), size))
    for pos in range(len(ids)):
        for i in range(size // 2):
            position[pos, 2 * i] = np.sin(pos / 10_000 ** (2 * i / size))
            position[pos, 2 * i + 1] = np.cos(pos / 10_000 ** (2 * i / size))
    return table[np.asarray(ids)] * np.sqrt(size) + position


def sublayer(x, layer, name, config, function):
    def norm(x):
        return layer_norm(x, layer[f"{name}_residual/norm/scale"], layer[f"{name}_residual/norm/bias"], config)

    return norm(x + function(x)) if config.norm == "post" else x + function(norm(x))


def final_norm(x, weights, name, config):
    return layer_norm(x, *weights[name], config) if config.norm == "pre" else x


def layer_norm(x, scale, bias, config):
    return np.stack([(row - row.mean()) / np.sqrt(row.var() + config.norm_epsilon) * scale + bias for row in x])


def feed_forward(x, layer):
    hidden = np.maximum(x @ layer["feed_forward/input/weight"] + layer["feed_forward/input/bias"], 0)
    return hidden @ layer["feed_forward/output/weight"] + layer["feed_forward/output/bias"]


def attend(x, memory, layer, name, causal=False):
    def project(x, part, head):
        return x @ layer[f"{name}/{part}/weight"][:, head] + layer[f"{name}/{part}/bias"][head]

    num_heads = layer[f"{name}/query/weight"].shape[1]
    out = np.zeros_like(x) + layer[f"{name}/output/bias"]
    for head in range(num_heads):
        query, key, value = project(x, "query", head), project(memory, "key", head), project(memory, "value", head)
        for t in range(len(x)):
            seen = slice(0, t + 1) if causal else slice(None)
            scores = key[seen] @ query[t] / np.sqrt(query.shape[-1])
            weights = np.exp(scores) / np.exp(scores).sum()
            out[t] += (weights @ value[seen]) @ layer[f"{name}/output/weight"][head]
    return out

"""BERT, GPT and T5 once more in NumPy, straight from their papers: one row, head by head and position by position."""

import math

import numpy as np


def bert(weights, config, ids, positions, types=None):
    """A vector for each token, and the attention of each layer."""
    weights = _double(weights)
    tokens = np.asarray(ids) != config.pad_id
    x = weights["embedding/table"][ids] + weights["position_embedding/table"][positions]
    if config.num_types:
        x = x + weights["type_embedding/table"][np.zeros_like(ids) if types is None else types]
    x = norm(x, weights, "embedding_norm", config)
    seen = []
    for block in _blocks(weights, "encoder/blocks"):
        x = _layer(x, block, config, post=True, own={"sees": lambda t, s: tokens[s], "seen": seen})
    return x, np.stack(seen)


def gpt(weights, config, ids):
    """The logits, and the attention of each layer."""
    weights = _double(weights)
    learned = config.positions == "learned"
    x = weights["embedding/table"][ids]
    if learned:
        x = x + weights["position_embedding/table"][: len(ids)]

    def turn(vector, position):
        """Pairs of features as complex numbers, each turned by its own angle."""
        half = len(vector) // 2
        slower = config.rotary_scaling.factor if config.rotary_scaling else 1
        angles = position / slower * config.rotary_base ** (-np.arange(half) / half)
        turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag])

    seen = []
    own = {"sees": lambda t, s: s <= t, "seen": seen, "turn": None if learned else turn}
    for block in _blocks(weights, "decoder/blocks"):
        x = _layer(x, block, config, own=own)
    output = weights["embedding/table"] if config.tie_embeddings else weights["lm_head/output/table"]
    return norm(x, weights, "norm", config) @ output.T, np.stack(seen)


def t5(weights, config, source, target):
    """The logits, and the attention of each layer: of the encoder, of the decoder, of the decoder to the encoder."""
    weights = _double(weights)
    tokens = np.asarray(source) != config.pad_id

    def bias(side):
        two_sided, table = side == "encoder", weights[f"{side}/distance_bias"]
        limits = {"num_buckets": config.num_buckets, "max_distance": config.max_distance, "two_sided": two_sided}
        return lambda head, t, s: table[bucket(s - t, **limits), head]

    def options(seen, sees, bias=None):
        return {"sees": sees, "seen": seen, "bias": bias, "scale": 1.0}

    encoder, decoder, crossing = [], [], []
    memory = weights["embedding/table"][source]
    for block in _blocks(weights, "encoder/layers/blocks"):
        memory = _layer(memory, block, config, own=options(encoder, lambda t, s: tokens[s], bias("encoder")))
    memory = norm(memory, weights, "encoder/norm", config)
    x = weights["embedding/table"][target]
    for block in _blocks(weights, "decoder/layers/blocks"):
        own, cross = options(decoder, lambda t, s: s <= t, bias("decoder")), options(crossing, lambda t, s: tokens[s])
        x = _layer(x, block, config, own=own, memory=memory, cross=cross)
    x = norm(x, weights, "decoder/norm", config)
    tied = config.tie_embeddings
    logits = (
        x / math.sqrt(config.d_model) @ weights["embedding/table"].T if tied else x @ weights["lm_head/output/table"].T
    )
    return logits, np.stack(encoder), np.stack(decoder), np.stack(crossing)


def bucket(ahead, *, num_buckets, max_distance, two_sided):
    """T5's bucket of a key that is `ahead` of its query: in integers, since logarithms round."""
    first, distance = 0, max(-ahead, 0)
    if two_sided:
        num_buckets //= 2
        first, distance = (num_buckets if ahead > 0 else 0), abs(ahead)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    # The k-th of the n others begins where log(distance / exact) / log(max_distance / exact) reaches k / n.
    n = num_buckets - exact
    return first + exact + max(k for k in range(n) if distance**n * exact**k >= max_distance**k * exact**n)


def activation(name, x):
    """The activation functions, from their definitions."""
    functions = {
        "relu": lambda x: np.maximum(x, 0),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    }
    return functions[name](np.asarray(x, np.float64))


def norm(x, weights, name, config):
    """Layer norm where there is a bias, RMS norm where there is none."""
    scale, bias = weights[f"{name}/scale"], weights.get(f"{name}/bias")
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale
    return x if bias is None else x + bias


def _double(weights):
    return {name: np.asarray(value, np.float64) for name, value in weights.items()}


def _blocks(weights, prefix):
    """The weights of each layer."""
    names = [name for name in weights if name.startswith(f"{prefix}/")]
    for layer in range(len(weights[names[0]])):
        yield {name.removeprefix(f"{prefix}/"): weights[name][layer] for name in names}


def _layer(x, block, config, *, own, memory=None, cross=None, post=False):
    def around(x, name, sublayer):
        place = f"{name}_residual/norm"
        return norm(x + sublayer(x), block, place, config) if post else x + sublayer(norm(x, block, place, config))

    x = around(x, "self_attention", lambda y: _attend(y, y, block, "self_attention", **own))
    if memory is not None:
        x = around(x, "cross_attention", lambda y: _attend(y, memory, block, "cross_attention", **cross))
    return around(x, "feed_forward", lambda y: _feed_forward(y, block, config))


def _attend(x, known, block, name, *, sees, seen, scale=None, bias=None, turn=None):
    def project(vector, part, head, position=None):
        projected = vector @ block[f"{name}/{part}/weight"][:, head]
        if f"{name}/{part}/bias" in block:
            projected = projected + block[f"{name}/{part}/bias"][head]
        return turn(projected, position) if turn and part != "value" else projected

    num_heads, head_size = block[f"{name}/query/weight"].shape[1:]
    shared = num_heads // block[f"{name}/key/weight"].shape[1]
    scale = 1 / math.sqrt(head_size) if scale is None else scale
    weights = np.zeros((num_heads, len(x), len(known)))
    out = np.zeros_like(x) + block.get(f"{name}/output/bias", 0)
    for head in range(num_heads):
        keys = [project(vector, "key", head // shared, s) for s, vector in enumerate(known)]
        values = np.stack([project(vector, "value", head // shared) for vector in known])
        for t in range(len(x)):
            query = project(x[t], "query", head, t)
            for s in range(len(known)):
                score = query @ keys[s] * scale + (bias(head, t, s) if bias else 0)
                weights[head, t, s] = math.exp(score) if sees(t, s) else 0
            weights[head, t] /= weights[head, t].sum()
            out[t] += weights[head, t] @ values @ block[f"{name}/output/weight"][head]
    seen.append(weights)
    return out


def _feed_forward(x, block, config):
    def linear(x, part):
        return x @ block[f"feed_forward/{part}/weight"] + block.get(f"feed_forward/{part}/bias", 0)

    hidden, gated = linear(x, "input"), "feed_forward/gate/weight" in block
    active = activation(config.activation, linear(x, "gate") if gated else hidden)
    return linear(active * hidden if gated else active, "output")

# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The paper, equation by equation
#
# *Attention Is All You Need* (Vaswani et al. 2017) in the order of the paper, with the functions of this package. Each
# is a pure function of arrays: `jax.jit`, `jax.grad` and `jax.vmap` apply to it as it is.

# %%
# %matplotlib inline
import os
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import transformer_jax as tj
from transformer_jax import functional as F
from transformer_jax.visualize import AttentionPanel, attention_figure, position_figure

# %% [markdown]
# ## Softmax
#
# $$\mathrm{softmax}(x)_i = \frac{e^{x_i}}{\sum_j e^{x_j}}$$
#
# The largest logit is subtracted first, so nothing overflows. With a mask the sum runs over what is allowed; where
# none is allowed, the result is zero, and so is its gradient: no NaN to be found a thousand steps later.

# %%
print(F.softmax(jnp.array([2.0, 1.0, 0.1])))
print(F.softmax(jnp.array([1e4, 1e4, -1e4])))
print(F.softmax(jnp.array([2.0, 1.0, 0.1]), mask=jnp.array([True, False, True])))
print(F.softmax(jnp.array([2.0, 1.0, 0.1]), mask=jnp.array([False, False, False])))

# %% [markdown]
# ## 3.2.1 Scaled dot-product attention
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right)V$$
#
# Arrays are `[batch, length, heads, head size]`. The weights come out of the same function.

# %%
query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 1, 64))
out, weights = F.dot_product_attention(query, key, value, return_weights=True)
print(out.shape, weights.shape, weights.sum(-1).ravel())

# %% [markdown]
# Why divide by $\sqrt{d_k}$? The dot product of two random vectors of size $d_k$ has variance $d_k$. Without the scale
# the softmax saturates as the heads grow: one weight takes all, and the gradient vanishes.

# %%
for size in (4, 64, 1024):
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 64, 1, size))
    _, plain = F.multiplicative_attention(q, k, v, return_weights=True)
    _, scaled = F.dot_product_attention(q, k, v, return_weights=True)
    largest = plain.max(-1).mean(), scaled.max(-1).mean()
    print(f"d_k = {size:4}: largest weight {largest[0]:.2f} without the scale, {largest[1]:.2f} with it")

# %% [markdown]
# The paper compares it with *additive* attention (Bahdanau et al. 2015), whose scores are $v^T \tanh(Wq + Uk)$:

# %%
W, U = jax.random.normal(jax.random.key(2), (2, 64, 32)) / 8
v = jax.random.normal(jax.random.key(3), (32,))
additive, additive_weights = F.additive_attention(query, key, value, W, U, v, return_weights=True)
print(additive.shape, additive_weights.shape)

# %% [markdown]
# ## 3.2.3 What may attend to what
#
# A mask is a value. It becomes an array only inside attention, and masks combine with `&`.

# %%
valid = jnp.array([[True] * 6 + [False] * 2])
documents = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2]])
masks = {
    "causal()": F.causal(),
    "anti_causal()": F.anti_causal(),
    "window(2, 0)": F.window(2, 0),
    "padding(valid)": F.padding(valid),
    "causal() & segments(ids)": F.causal() & F.segments(documents),
}
figure, axes = plt.subplots(1, len(masks), figsize=(13, 2.8))
for axis, (name, mask) in zip(axes, masks.items(), strict=True):
    axis.imshow(np.broadcast_to(mask.array(8, 8)[0, 0], (8, 8)), cmap="Blues", vmin=0, vmax=1.4)
    axis.set(title=name, xticks=[], yticks=[], xlabel="key", ylabel="query")
figure.tight_layout()

# %% [markdown]
# Two queries against six keys: the queries are the last two. This is what makes decoding with a cache right.

# %%
print(F.causal().array(2, 6)[0, 0].astype(int))

# %% [markdown]
# ## 3.2.2 Multi-head attention
#
# $$\mathrm{MultiHead}(Q, K, V) = \mathrm{Concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h)W^O$$
#
# A layer holds parameters and is otherwise a function. It is a pytree: JAX's transformations take it as an argument.

# %%
attention = tj.layers.MultiHeadAttention(d_model=512, num_heads=8, dropout_rate=0.0, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(4), (2, 10, 512))
y, weights = jax.jit(tj.layers.MultiHeadAttention.__call__)(attention, x, mask=F.causal())
print(y.shape, weights.shape)
print(attention.query.weight.shape, attention.query.weight.axes)

# %% [markdown]
# ## 3.3 Feed-forward
#
# $$\mathrm{FFN}(x) = \max(0, xW_1 + b_1)W_2 + b_2$$

# %%
W1, W2 = jax.random.normal(jax.random.key(5), (512, 2048)) / 22, jax.random.normal(jax.random.key(6), (2048, 512)) / 45
print(F.feed_forward(x, W1, W2, jnp.zeros(2048), jnp.zeros(512), activation="relu").shape)

# %% [markdown]
# ## 3.5 Positions
#
# $$PE_{(pos, 2i)} = \sin(pos / 10000^{2i/d}) \qquad PE_{(pos, 2i+1)} = \cos(pos / 10000^{2i/d})$$

# %%
position_figure(F.sinusoidal(jnp.arange(64), 128), title="sinusoidal positions")

# %% [markdown]
# The paper chose them because $PE_{pos+k}$ is a linear function of $PE_{pos}$, the same at every position: each pair
# (sin, cos) is turned by the angle $k / 10000^{2i/d}$.

# %%
encoding, k = F.sinusoidal(jnp.arange(50), 16), 7
angles = k * 10_000.0 ** (-jnp.arange(8) / 8)
move = jnp.zeros((16, 16))
even, odd = jnp.arange(0, 16, 2), jnp.arange(1, 16, 2)
move = move.at[even, even].set(jnp.cos(angles)).at[odd, odd].set(jnp.cos(angles))
move = move.at[even, odd].set(jnp.sin(angles)).at[odd, even].set(-jnp.sin(angles))
print("largest difference:", jnp.abs(encoding[:-k] @ move.T - encoding[k:]).max())

# %% [markdown]
# ## 3.1 The model
#
# Six encoder and six decoder layers, each sub-layer inside $\mathrm{LayerNorm}(x + \mathrm{Sublayer}(x))$, and one
# embedding table for source, target and output. `eval_shape` counts the parameters without making them.


# %%
def count(config):
    model = jax.eval_shape(lambda: tj.models.Transformer(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(model))


print(f"base: {count(tj.models.TransformerConfig.base(37_000)):,} parameters")
print(f"big:  {count(tj.models.TransformerConfig.big(37_000)):,} parameters")

# %% [markdown]
# ## 5.3 The learning rate
#
# $$lrate = d^{-0.5} \cdot \min(n^{-0.5}, n \cdot warmup^{-1.5})$$

# %%
from transformer_jax.training.schedule import inverse_square_root

steps = jnp.arange(20_000)
for d_model, warmup in ((512, 4000), (512, 8000), (256, 4000)):
    plt.plot(steps, inverse_square_root(d_model, warmup)(steps), label=f"d = {d_model}, warm-up {warmup:,}")
plt.gca().set(xlabel="update", ylabel="learning rate")
_ = plt.legend()

# %% [markdown]
# ## 5.4 Label smoothing
#
# The target is $(1 - \epsilon)$ at the label plus $\epsilon / V$ everywhere. A loss is returned as a sum and a weight,
# and divided once, when all devices and micro-batches are added up.

# %%
logits, labels = jax.random.normal(jax.random.key(8), (4, 10)), jnp.array([1, 2, 3, 0])
total, weight = F.cross_entropy(logits, labels, weights=labels != 0, label_smoothing=0.1)
print(f"{total / weight:.4f} per token over {weight:.0f} tokens")

# %% [markdown]
# ## 6 Training
#
# The default of `train.py`: a small encoder-decoder that translates dates, times, numbers and units from English into
# five languages, held-out values. Under four minutes on two cores; when the run is there already, it is used.

# %%
config = runpy.run_path("../configs/dates.py")["config"]
config = replace(config, workdir=Path("../runs/dates"))
if "NOTEBOOK_WORKDIR" in os.environ:  # the tests run this at a tiny size
    config = replace(
        config,
        steps=2,
        model=replace(config.model, d_model=16, num_heads=2, d_ff=32),
        data=replace(config.data, train_size=200, valid_size=4, test_size=4),
        workdir=Path(os.environ["NOTEBOOK_WORKDIR"]),
    )
run, state = tj.training.train(config)

# %%
texts = [
    f"<{language}> {text}"
    for text in ("Tuesday, March 4, 2025", "3:04 PM", "1,234.5", "12 kilometers")
    for language in config.data.languages
]
predictor = run.predictor(state.model)
for text, translation in zip(texts, run.task.write(texts, predictor), strict=True):
    print(f"{text:30} {translation}")

# %% [markdown]
# ## What it attends to
#
# The weights of every layer and head come from the same functions. A row of the cross-attention is the token being
# written: 3 while looking at `March`, 火 while looking at `Tu` of Tuesday, the digits of the year one after the other.

# %%
source = "<ja> Tuesday, March 4, 2025"
(target,) = run.task.write([source], predictor)
(example,) = run.task.encode([{"source": source, "target": target}])
source_ids, target_ids = jnp.array([example["source"]]), jnp.array([example["target"]])
weights = jax.jit(tj.models.Transformer.attention)(state.model, source_ids, target_ids[:, :-1])
tokens = run.task.tokenizer.tokens
attention_figure(
    [
        AttentionPanel("cross", weights.cross[-1, 0], tokens(target_ids[0, 1:]), tokens(source_ids[0])),
        AttentionPanel("encoder", weights.encoder[-1, 0], tokens(source_ids[0]), tokens(source_ids[0])),
    ],
    title=f"{source} → {target}",
)

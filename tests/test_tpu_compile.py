"""The TPU compiler accepts what every kind of model is run with: its train step, its evaluation, its decoding loop."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.commands.configs import load_config
from transformer_jax.parallel import MeshConfig
from transformer_jax.parallel.collectives import collectives
from transformer_jax.parallel.topology import ENVIRONMENT, memory, tpu_devices
from transformer_jax.tasks.causal_lm import CausalLM
from transformer_jax.tasks.denoising import Denoising
from transformer_jax.tasks.masked_lm import MaskedLM
from transformer_jax.tasks.permutation_lm import PermutationLM
from transformer_jax.tasks.predictor import _compiled, _predict_with_loss
from transformer_jax.tasks.translation import Translation
from transformer_jax.training.abstract_step import AbstractStep

pytest.importorskip("libtpu")

TWO_STACKS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
FAMILIES = {
    "dates": ({**TWO_STACKS}, Translation.predict),
    "gpt_text": ({"num_layers": 2}, CausalLM._sample),
    "bert_text": ({"num_layers": 2}, MaskedLM._fill),
    "t5_text": ({**TWO_STACKS}, Denoising._search),
    "xlnet_text": ({"num_layers": 2}, PermutationLM._guess),
}
"""A config of each kind of model, and what writes text with it, or guesses what is masked."""


@pytest.fixture(scope="module")
def devices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield tpu_devices("v5e:2x2")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, devices):
    """The step of a small model on a mesh of two shards of the weights and two of each layer, and how it writes."""
    config = load_config(request.param)
    changes, write = FAMILIES[request.param]
    model = replace(config.model, vocab_size=640, max_length=32, unroll=1, **changes)
    batching = replace(config.batching, rows=8, pack_length=None)
    processor = replace(config.processor, vocab_size=512)
    config = replace(config, model=model, batching=batching, processor=processor, mesh=MeshConfig(fsdp=2, tensor=2))
    return AbstractStep.of(config, devices, "bfloat16"), write


def test_the_train_step(family):
    """Weights are in four shards, and gathered when they are needed."""
    step, _ = family
    compiled = step.compile()
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((step.state.model, step.state.optimizer))]
    assert memory(compiled).arguments < 0.4 * sum(sizes)  # small arrays are padded
    assert {("all-gather", 2), ("all-reduce", 2)} <= {(one.kind, one.group_size) for one in _collectives(compiled)}


def test_the_evaluation(family):
    step, _ = family
    compiled = _lowered(step, _predict_with_loss, step.batch).compile()
    assert _collectives(compiled)


def test_decoding(family):
    step, write = family
    compiled = _lowered(step, write, _inputs(step)).compile()
    assert _collectives(compiled)
    if write in (Translation.predict, CausalLM._sample, Denoising._search):
        assert " while(" in compiled.as_text()  # which is not unrolled


def _lowered(step, function, batch):
    return _compiled(function, step.run.strategy).lower(step.run.task, step.state.model, batch)


def _collectives(compiled):
    return collectives(compiled.as_text())


def _inputs(step):
    """What a decoding function reads, by the name of its columns: those of a batch, or prompts."""
    rows = step.batch["slot"].sharding

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

    prompt = {"prompt": array(8, 16), "prompt_segments": array(8, 16)}
    numbers = {name: array(8) for name in ("limit", "row", "turn")}
    return {**step.batch, **prompt, **numbers, "ids_segments": array(8, 32)}

"""What is said of compiled programs: what they take, and that there is one too many. And traces, and throughput."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from tests import tiny
from tests.training.test_step import batch_of, loss
from tests.training.test_verify import CONFIGS
from transformer_jax.errors import UserError
from transformer_jax.models import GPTConfig
from transformer_jax.parallel import MeshConfig, Strategy
from transformer_jax.parallel.chips import chip_named
from transformer_jax.training import TrainState, make_train_step, train
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.programs import Programs, readable
from transformer_jax.training.throughput import Throughput


class Notes:
    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)


class OfLoss:
    loss = staticmethod(loss)


def test_memory_is_said_once_and_a_shape_too_many_is_named():
    strategy, notes = Strategy.choose(devices=jax.devices()[:1]), Notes()
    state = strategy.initialize(lambda: TrainState.create(tiny.make(), optax.adam(1e-3), jax.random.key(0)))
    programs = Programs(strategy.compile(make_train_step(loss, optax.adam(1e-3)), state), OfLoss, 1, notes)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state.model))
    for rows in (8, 8, 4, 4):
        batch = strategy.place(batch_of(rows))
        program, flops = programs(state, batch)
        state, _ = program.run(state, batch)
    memory, warning = notes.lines
    assert memory.startswith(f"memory of each device: parameters {readable(parameters)}, optimizer ")
    assert warning.startswith("warning: the step was compiled again, for source 4 x 7, target 4 x 9, slot 4; batches")
    assert flops and flops > 0


def test_with_the_sequence_axis_a_device_keeps_its_share_of_the_activations():
    """At a length where attention does not count: what is left is a row's tokens times features."""
    config = replace(
        GPTConfig.small(64), d_model=64, num_heads=4, d_ff=256, num_layers=4, max_length=512, dtype="float32"
    )
    from flax import nnx

    from transformer_jax.functional import chunked_cross_entropy

    def of(model, batch, key):
        x, _ = model.hidden_and_balance(batch["text"][:, :-1], dropout_key=key)
        return chunked_cross_entropy(x, model.logits, batch["text"][:, 1:])

    def temporaries(count):
        strategy = Strategy.choose("jit", MeshConfig(data=1, sequence=count))
        state = strategy.initialize(
            lambda: TrainState.create(config.build(nnx.Rngs(0)), optax.sgd(0.1), jax.random.key(0))
        )
        batch = strategy.place({"text": np.zeros((8, 513), np.int32), "slot": np.arange(8, dtype=np.int32)})
        return strategy.compile(make_train_step(of, optax.sgd(0.1)), state).program(state, batch).memory.temporaries

    assert temporaries(4) < temporaries(1) / 4 * 1.1


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (1_234, "1.23 KB"), (45_600_000, "45.6 MB"), (2e12, "2e+03 GB")]
)
def test_bytes_are_readable(size, text):
    assert readable(size) == text


def test_utilization_is_model_flops_over_the_peak_of_all_chips(monkeypatch):
    device = jax.devices()[0]
    throughput = Throughput("tokens", [device] * 4)
    throughput._chip = chip = chip_named("v5e")
    throughput.restart()
    now = throughput._since
    monkeypatch.setattr("time.monotonic", lambda: now + 2.0)
    throughput.add(100, 3e12)
    throughput.add(100, 3e12)
    found = throughput.metrics()
    assert found["tokens_per_second"] == 100 and found["model_flops_per_second"] == 3e12
    assert found["model_flops_utilization"] == pytest.approx(3e12 / (4 * chip.bfloat16_flops))


def test_chosen_steps_are_traced_and_programs_are_kept(tmp_path, capsys):
    before = jax.config.jax_compilation_cache_dir
    config = replace(CONFIGS["gpt"], steps=4, log_every=1, profile=(2, 3), mesh=MeshConfig(data=1))
    try:
        train(replace(config, workdir=tmp_path / "run", compilation_cache=tmp_path / "programs"))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert [*(tmp_path / "run" / "profile").rglob("*.xplane.pb")]
    assert f"trace of steps 2 to 3: {tmp_path / 'run' / 'profile'}" in capsys.readouterr().err.replace("\n", "")
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert line["model_flops_per_second"] > 0 and "model_flops_utilization" not in line  # nobody knows a CPU's peak


@pytest.mark.parametrize("settings", [{"profile": (3, 2)}, {"profile": (0, 2)}, {"step_timeout": 0}])
def test_settings_that_mean_nothing_are_errors(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        replace(CONFIGS["gpt"], **settings)

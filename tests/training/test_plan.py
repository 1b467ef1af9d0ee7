"""Plans of small configs: what is compiled is what training compiles, and the numbers are those that follow by hand."""

from dataclasses import replace
from math import prod

import jax
import pytest

from transformer_jax.commands.configs import config_names, load_config
from transformer_jax.data import Batches, BatchingConfig, Records, Store, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.models import GPTConfig
from transformer_jax.parallel import MeshConfig
from transformer_jax.parallel.chips import chip_named
from transformer_jax.tasks import CausalLMConfig
from transformer_jax.training import Config
from transformer_jax.training import remedies as module
from transformer_jax.training.abstract_step import AbstractStep
from transformer_jax.training.plan import make_plan, needed_bytes
from transformer_jax.training.remedies import remedies, with_remedy
from transformer_jax.training.run import Run
from transformer_jax.training.step import make_train_step

V, D, N, F, L, T, ROWS = 320, 16, 2, 32, 2, 16, 8
CONFIG = Config(
    model=replace(
        GPTConfig.small(vocab_size=V), d_model=D, num_heads=N, d_ff=F, num_layers=L, max_length=T, rematerialize="none"
    ),
    data=Records(train=[{"text": f"number {n} of many words, and no more than that"} for n in range(40)]),
    task=CausalLMConfig(),
    processor=TokenizerConfig(kind="byte_bpe", vocab_size=V),
    batching=BatchingConfig(rows=ROWS),
    mesh=MeshConfig(fsdp=2, tensor=2),
    steps=1,
)


@pytest.fixture(scope="module")
def plan():
    return make_plan(CONFIG, jax.devices())


def test_what_is_compiled_is_what_training_compiles(plan, tmp_path):
    """The program of a run on real data takes the same memory in all of its parts."""
    run = Run.begin(replace(CONFIG, workdir=tmp_path / "run"))
    examples = Store.of(run.task.encode(CONFIG.data.split("train")), run.task.columns)
    batch = Batches(run.task.layout(examples, training=True), multiple=run.strategy.num_row_shards)[0]
    state = run.first_state()[0]
    step = run.strategy.compile(make_train_step(run.task.loss, run.optimizer), state)
    step(state, run.strategy.place(batch))
    (program,) = step.programs.values()
    assert plan.batch == {name: array.shape for name, array in batch.items()}
    assert plan.memory == program.memory


def test_parameters_and_their_bytes(plan):
    block = 4 * D * D + 4 * D + 2 * D * F + F + D + 4 * D
    assert plan.num_parameters == V * D + T * D + L * block + 2 * D
    table = next(group for group in plan.parameters if group.names == ("embedding.table",))
    assert (table.shape, table.axes, table.spec) == ((V, D), ("vocab", "embed"), "tensor, fsdp")
    assert table.bytes_per_device == 4 * V * D / 4
    projections = next(group for group in plan.parameters if len(group.names) == 3 and len(group.shape) == 4)
    assert [name.split(".")[-2] for name in projections.names] == ["key", "query", "value"]
    assert (projections.spec, projections.bytes_per_device) == ("-, fsdp, tensor, -", 3 * 4 * L * D * D / 4)
    assert sum(group.bytes_per_device for group in plan.parameters) == plan.parameter_bytes
    assert plan.optimizer_bytes == 2 * plan.parameter_bytes + 2 * 4  # two moments, and two counts of steps
    assert plan.batch_bytes == 4 * (2 * ROWS * (T + 1) + ROWS) / 4


def test_model_flops_are_three_forward_passes(plan):
    weights = L * (4 * D * D + 2 * D * F) + D * V
    attention = L * 2 * T * D  # scores and their products with the values, for a token
    assert plan.model_flops == 3 * 2 * ROWS * T * (weights + attention)
    assert plan.model_flops <= plan.executed_flops < 1.5 * plan.model_flops


def test_recomputation_is_executed_and_not_counted(plan):
    model = replace(CONFIG.model, rematerialize="full")
    full = AbstractStep.of(replace(CONFIG, model=model), jax.devices(), "float32").flops()
    layers = L * (4 * D * D + 2 * D * F + 2 * T * D) * 2 * ROWS * T
    assert full[0] == plan.model_flops
    assert full[1] == pytest.approx(plan.model_flops + layers, rel=0.05)


def test_replicated_weights_are_all_reduced_once_a_step():
    found = make_plan(replace(CONFIG, mesh=MeshConfig()), jax.devices())
    assert found.parameters[0].spec == "replicated"
    sent = found.collectives["all-reduce"].bytes_moved
    assert 2 * 7 / 8 * found.parameter_bytes <= sent < 1.1 * 2 * 7 / 8 * (found.parameter_bytes + 4 * V * D)


def test_the_estimate_and_the_verdict_for_a_chip():
    chip = chip_named("H100")
    fitting = make_plan(CONFIG, jax.devices(), chip)
    estimate = fitting.estimate
    assert (fitting.fits, fitting.available_bytes) == (True, 80 * 2**30)
    assert estimate.compute_seconds == fitting.executed_flops / 8 / 989e12
    sent = sum(traffic.bytes_moved for traffic in fitting.collectives.values())
    assert estimate.interconnect_seconds == pytest.approx(sent / 450e9)
    assert estimate.seconds == max(estimate.compute_seconds, estimate.interconnect_seconds)
    assert estimate.model_flops_utilization == pytest.approx(fitting.model_flops / 8 / 989e12 / estimate.seconds)
    assert not make_plan(CONFIG, jax.devices(), replace(chip, memory=fitting.peak_bytes - 1)).fits


@pytest.mark.parametrize("name", sorted(config_names()))
def test_every_config_has_a_step_without_its_data(name):
    """The longest rows, by the model or by the packing, and bfloat16 as on the devices that are planned for."""
    config = load_config(name)
    config = replace(config, mesh=MeshConfig(), model=replace(config.model, unroll=1))
    step = AbstractStep.of(config, jax.devices(), "bfloat16")
    width = max(shape[1] for shape in (array.shape for array in step.batch.values()) if len(shape) > 1)
    length = config.model.max_length
    packed = (config.batching.pack_length, length + 1)
    assert width in (packed if config.batching.pack_length else (length, length + 1))
    assert {array.shape[0] % 8 for array in step.batch.values()} == {0}
    assert step.run.config.model.dtype == "bfloat16"
    sizes = step.run.config.processor.vocab_size
    assert config.model.vocab_size or sizes <= step.run.config.model.vocab_size <= sizes + 100
    assert prod(step.state.model.embedding.table.shape) == step.run.config.model.vocab_size * config.model.d_model


def test_what_cannot_be_planned_is_an_error():
    with pytest.raises(UserError, match="init_from decides the sizes of the model; leave it out"):
        make_plan(replace(CONFIG, init_from="somewhere"), jax.devices())
    with pytest.raises(UserError, match="strategy=pmap cannot be compiled ahead of time"):
        make_plan(replace(CONFIG, strategy="pmap", mesh=MeshConfig()), jax.devices())


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded ...", 20.5 * 2**30),
        ("the total memory required for HLO temporaries (512.00M) exceeds available HBM (15.75G).", 2**29),
        ("RESOURCE_EXHAUSTED", None),
    ],
)
def test_what_the_compiler_needed(message, size):
    assert needed_bytes(message) == size


@pytest.fixture
def too_large(plan):
    """Of 20 bytes, 4 are weights, moments and gradients; 10 are there; 4 rows on each of 4 devices."""
    return replace(
        plan,
        fits=False,
        mesh={"data": 4, "fsdp": 1, "expert": 1, "sequence": 1, "tensor": 1},
        batch={"text": (16, 8)},
        parameter_bytes=1,
        optimizer_bytes=2,
        peak_bytes=20,
        available_bytes=10,
    )


def test_remedies_from_the_smallest_to_all_together(too_large):
    """Two micro-batches alone would take 4 + 16 / 2 bytes, and shards of the weights save 3 at most: not compiled."""
    flags = [" ".join(remedy.flags) for remedy in remedies(too_large, replace(CONFIG, mesh=MeshConfig()))]
    assert flags == [
        "--accumulate 4",
        "--model.rematerialize dots",
        "--model.rematerialize dots_without_batch",
        "--model.rematerialize full",
        "--model.rematerialize full --accumulate 4",
        "--mesh.fsdp 4 --accumulate 2",
        "--mesh.fsdp 4 --accumulate 4",
        "--mesh.fsdp 4 --model.rematerialize full",
        "--mesh.fsdp 4 --model.rematerialize full --accumulate 4",
    ]


def test_the_first_remedy_that_fits_is_advised(too_large, monkeypatch):
    def fake(config, devices, chip):
        return replace(too_large, fits=config.model.rematerialize == "dots_without_batch", peak_bytes=9)

    monkeypatch.setattr(module, "make_plan", fake)
    ticks = []
    found = with_remedy(too_large, replace(CONFIG, mesh=MeshConfig()), jax.devices(), tick=ticks.append)
    assert found.advice == "it fits with --model.rematerialize dots_without_batch"
    assert [attempt.fits for attempt in found.attempts] == [False, False, True]
    assert ticks == [" ".join(attempt.flags) for attempt in found.attempts]


def test_at_most_a_handful_is_compiled_and_the_last_one_saves_most(too_large, monkeypatch):
    monkeypatch.setattr(module, "make_plan", lambda config, devices, chip: too_large)
    found = with_remedy(too_large, replace(CONFIG, mesh=MeshConfig()), jax.devices())
    assert [len(attempt.flags) for attempt in found.attempts] == [2, 2, 2, 2, 4, 6]
    assert found.advice.startswith("nothing that was tried fits; use more devices")


def test_weights_that_are_too_large_alone_are_not_compiled_again(too_large):
    larger = replace(too_large, parameter_bytes=100, optimizer_bytes=200, peak_bytes=500)
    found = with_remedy(larger, replace(CONFIG, mesh=MeshConfig()), jax.devices())
    assert not found.attempts
    assert "use more than 40 devices, or --optimizer.kind adafactor" in found.advice

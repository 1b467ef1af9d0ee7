"""A run that starts from the weights of another, or from a checkpoint of transformers."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.interop.checkpoints import changed, tensor_of
from transformer_jax.data import BatchingConfig, Files, Text, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop.tokenizers import save_tokenizer
from transformer_jax.layers import named_parameters
from transformer_jax.models import BertConfig, GPTConfig
from transformer_jax.parallel import MeshConfig
from transformer_jax.tasks import ClassificationConfig, MaskedLMConfig
from transformer_jax.training import Config, OptimizerConfig, Run, train, transfer_weights
from transformer_jax.training.metrics import read_metrics

BERT = replace(
    BertConfig.base(None, pad_id=None),
    d_model=16,
    num_heads=2,
    d_ff=24,
    num_layers=2,
    max_length=12,
    dtype="float32",
)


def classification(folder, init_from, workdir, **changes):
    """Fine-tuning with a config whose sizes are others."""
    records = [{"text": "abc"[: 1 + n % 3] + "x" * (n % 2), "label": ("no", "yes")[n % 2]} for n in range(40)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = Config(
        model=replace(BERT, d_model=32, num_layers=1, dropout_rate=0.25),
        data=Files(train=(folder / "records.jsonl",), columns={"text": "text", "label": "label"}),
        task=ClassificationConfig(),
        batching=BatchingConfig(rows=4),
        optimizer=OptimizerConfig(schedule="linear", peak=0.01, warmup_steps=2),
        init_from=str(init_from),
        steps=4,
        log_every=1,
        mesh=MeshConfig(data=1),
        workdir=folder / workdir,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of another task, at step 3."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "text.txt").write_text("\n\n".join(["abc xcab\nbca cx"] * 30))
    config = Config(
        model=BERT,
        data=Text(train=(folder / "text.txt",), document="paragraph"),
        task=MaskedLMConfig(),
        processor=TokenizerConfig(kind="characters"),
        batching=BatchingConfig(rows=4),
        optimizer=OptimizerConfig(schedule="linear", peak=0.01, warmup_steps=1),
        steps=3,
        mesh=MeshConfig(data=1),
        workdir=folder / "run",
    )
    return train(config)


@pytest.fixture(scope="module")
def fine_tuned(source, tmp_path_factory):
    """A run from it that was never stopped, and the folder that it is in."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    return folder, *train(classification(folder, source[0].workdir.path, "whole"))


def assert_equal(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_are_those_of_the_run_and_what_it_lacks_is_initialized_and_listed(source, tmp_path):
    before, state = source
    run = Run.begin(classification(tmp_path, before.workdir.path, "run"))
    first, report = run.first_state()
    theirs, ours = named_parameters(state.model), named_parameters(first.model)
    fresh = named_parameters(jax.jit(run.initial_state)().model)
    head = {"classification_head.output.bias", "classification_head.output.weight"}
    assert ours.keys() - theirs.keys() == head
    for name, weight in ours.items():
        np.testing.assert_array_equal(weight[...], (fresh if name in head else theirs)[name][...], name)
    start, initialized, unused = report.split("; ")
    assert start == f"started from {before.workdir.path}: {len(ours) - 2} of {len(ours)} weights"
    assert initialized == f"initialized: {', '.join(sorted(head))}"
    assert unused.startswith("not used of the checkpoint: lm_head.") and "next_sentence" in unused
    assert not np.array_equal(ours["embedding.table"][...], fresh["embedding.table"][...])


def test_sizes_and_tokenizer_are_the_checkpoints_and_settings_that_change_no_weight_the_configs(source, tmp_path):
    before, _ = source
    config = Run.begin(classification(tmp_path, before.workdir.path, "run")).config
    assert (config.model.d_model, config.model.num_layers, config.model.vocab_size) == (
        *(16, 2),
        before.config.model.vocab_size,
    )
    assert config.model.dropout_rate == 0.25 and before.config.model.dropout_rate != 0.25
    assert config.model.label_names == ("no", "yes") and set(config.model.heads) == {"pooler", "classifier"}
    again = Run.open(tmp_path / "run")
    assert again.processor.encode(["abcx"]) == before.processor.encode(["abcx"])
    without = classification(tmp_path, before.workdir.path, "without", model=None)
    assert Run.begin(without).config.model.d_model == 16


def test_steps_and_schedule_are_those_of_the_new_run(fine_tuned):
    folder, run, state = fine_tuned
    lines = [line for line in read_metrics(folder / "whole" / "metrics.jsonl") if line["split"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and int(state.step) == 4
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.005, 0.01, 0.005, 0.0])
    assert run.config.optimizer.total_steps == 4
    counts = [int(leaf) for leaf in jax.tree.leaves(state.optimizer) if leaf.dtype == np.int32]
    assert counts and set(counts) == {4}


def test_killed_before_its_first_checkpoint_it_starts_again_from_the_same(source, tmp_path, fine_tuned):
    config = classification(tmp_path, source[0].workdir.path, "run")
    first, _ = Run.begin(config).first_state()
    again, _ = Run.begin(config).first_state()
    assert_equal(first.model, again.model)
    (tmp_path / "run" / "tokenizer.json").unlink()  # killed even before this was written
    _, state = train(config)
    assert_equal(state.model, fine_tuned[2].model)


def test_the_same_command_goes_on_without_the_checkpoint_that_it_started_from(source, tmp_path, fine_tuned):
    copy = shutil.copytree(source[0].workdir.path, tmp_path / "source")
    config = classification(tmp_path, copy, "run", optimizer=OptimizerConfig("linear", 2, peak=0.01, total_steps=4))
    train(replace(config, steps=2))
    shutil.rmtree(copy)
    _, state = train(config)
    assert_equal(state.model, fine_tuned[2].model)


def test_another_start_in_the_same_workdir_is_refused(source, fine_tuned, tmp_path):
    folder, _, _ = fine_tuned
    with pytest.raises(UserError, match=r"was begun with init_from=.* but .*elsewhere.* is asked for"):
        Run.begin(classification(folder, tmp_path / "elsewhere", "whole"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A classifier of transformers with five labels, and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    changed(folder, "bert_sequence_classification")
    save_tokenizer(Tokenizer.train(["abcx"], TokenizerConfig(kind="characters")), folder)
    return folder


def test_weights_are_those_of_the_checkpoint_but_for_a_head_of_other_labels(checkpoint, tmp_path):
    run = Run.begin(classification(tmp_path, checkpoint, "run"))
    first, report = run.first_state()
    name = "bert_sequence_classification"
    table = tensor_of(name, "bert.embeddings.word_embeddings.weight")
    np.testing.assert_array_equal(first.model.embedding.table[...], table)
    pooler = tensor_of(name, "bert.pooler.dense.weight")
    np.testing.assert_array_equal(first.model.pooler.output.weight[...], pooler.T)
    assert first.model.classification_head.output.weight.shape == (8, 2)
    assert "; initialized: classification_head.output.bias, classification_head.output.weight;" in report
    assert run.config.model.label_names == ("no", "yes") and run.config.model.max_length == 12
    _, state = train(classification(tmp_path, checkpoint, "run"))
    assert int(state.step) == 4
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["vocab_size"] == 40


def test_a_checkpoint_without_a_tokenizer_takes_the_one_that_is_named(checkpoint, tmp_path):
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*tokenizer*", "special*"))
    with pytest.raises(UserError, match=r"has no tokenizer that can be read; give one with --processor.path"):
        Run.begin(classification(tmp_path, bare, "run"))
    assert not (tmp_path / "run").exists()
    named = TokenizerConfig(path=checkpoint / "tokenizer.json")
    run = Run.begin(classification(tmp_path, bare, "run", processor=named))
    assert run.processor.encode(["abcx"]) == Tokenizer.load(checkpoint / "tokenizer.json").encode(["abcx"])


def test_a_checkpoint_that_the_task_cannot_train_is_refused_before_anything_is_written(source, tmp_path):
    config = classification(tmp_path, source[0].workdir.path, "run")
    with pytest.raises(UserError, match="nowhere is not a folder; give the folder of a checkpoint"):
        Run.begin(replace(config, init_from=str(tmp_path / "nowhere")))
    gpt = replace(GPTConfig.small(None), d_model=16, num_heads=2, d_ff=24, num_layers=1, max_length=12)
    with pytest.raises(UserError, match="MaskedLMConfig is for BertConfig; model is a GPTConfig"):
        replace(config, model=gpt, task=MaskedLMConfig(), data=Text())
    assert not (tmp_path / "run").exists()


def relabelled(model, *names):
    config = replace(model.config, num_labels=len(names), label_names=names)
    return jax.jit(lambda: config.build(nnx.Rngs(1)))()


@pytest.mark.parametrize(
    ("names", "is_kept"), [(("neg", "pos"), True), (("good", "bad"), False), (("pos", "neg"), False)]
)
def test_a_head_is_kept_for_the_same_labels_only(names, is_kept):
    made = replace(
        BERT, vocab_size=9, pad_id=0, heads=("pooler", "classifier"), num_labels=2, label_names=("neg", "pos")
    )
    source = jax.jit(lambda: made.build(nnx.Rngs(0)))()
    found, report = transfer_weights(source, relabelled(source, *names))
    weights = [model.classification_head.output.weight[...] for model in (source, found)]
    assert np.array_equal(*weights) == is_kept and ("classification_head" in report) != is_kept


def test_a_source_keeps_its_weights_and_gives_them_in_the_type_of_the_model():
    made = replace(BERT, vocab_size=9, pad_id=0, heads=())
    source = jax.jit(lambda: made.build(nnx.Rngs(0)))()
    half = jax.tree.map(lambda x: x.astype("bfloat16"), source)
    found, _ = transfer_weights(half, source)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}
    same, _ = transfer_weights(source, source)
    jax.block_until_ready(jax.jit(lambda model: jax.tree.map(lambda x: x + 1, model), donate_argnums=0)(same))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(source))


def test_a_checkpoint_of_another_class_of_models_is_trained_and_goes_on(tmp_path):
    """The config's model is a Bert's, and the checkpoint a GPT."""
    (tmp_path / "gpt").mkdir()
    folder = changed(tmp_path / "gpt", "gpt2_lm")
    save_tokenizer(Tokenizer.train(["abcx"], TokenizerConfig(kind="characters")), folder)
    config = classification(tmp_path, folder, "run", steps=2)
    with pytest.warns(UserWarning, match="the settings of BertConfig are not used"):
        run, _ = train(config)
    assert isinstance(run.config.model, GPTConfig)
    _, state = train(replace(config, steps=3))
    assert int(state.step) == 3


def test_a_run_of_somebodys_own_data_and_task_can_be_started_from(source, tmp_path):
    copy = shutil.copytree(source[0].workdir.path, tmp_path / "copy")
    value = json.loads((copy / "config.json").read_text())
    value["data"]["type"] = value["task"]["type"] = "elsewhere:Own"
    (copy / "config.json").write_text(json.dumps(value))
    run = Run.begin(classification(tmp_path, copy, "run"))
    assert run.first_state()[1].startswith(f"started from {copy}")

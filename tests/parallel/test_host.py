"""What a program sets before JAX starts: on CPU only what is for the CPU, and no warning is lost."""

import logging
from types import SimpleNamespace

import jax
import pytest

from tests import tiny
from transformer_jax.parallel import host, prepare_host
from transformer_jax.parallel.host import computes_on_cpu
from transformer_jax.training import OptimizerConfig, TrainState
from transformer_jax.training.checkpoints import Checkpoints


@pytest.fixture
def platforms():
    before = jax.config.jax_platforms
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(("value", "settings"), [("cpu", 3), ("cuda,cpu", 0), ("tpu", 0)])
def test_the_allocator_is_set_on_cpu_only(platforms, value, settings, monkeypatch):
    platforms(value)
    made = []
    libc = SimpleNamespace(mallopt=lambda *setting: made.append(setting))
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    monkeypatch.setattr(jax.config, "update", lambda *setting: made.append(setting))
    prepare_host()
    monkeypatch.undo()
    assert len(made) == settings


def test_where_jax_computes_is_known_before_it_starts(platforms, monkeypatch):
    for value, on_cpu in [("cpu", True), ("cpu,cuda", True), ("tpu", False), ("tpu,cpu", False)]:
        platforms(value)
        assert computes_on_cpu() is on_cpu
    platforms(None)
    monkeypatch.setattr("transformer_jax.parallel.host.find_spec", lambda name: None)
    monkeypatch.setattr("transformer_jax.parallel.host.entry_points", lambda group: [])
    assert computes_on_cpu()
    monkeypatch.setattr("transformer_jax.parallel.host.entry_points", lambda group: ["xla_cuda13"])
    assert not computes_on_cpu()


def test_warnings_of_orbax_are_heard_and_what_is_none_is_not(tmp_path, caplog):
    def create():
        return TrainState.create(tiny.make(), OptimizerConfig().build(16), jax.random.key(5))

    prepare_host()
    Checkpoints(tmp_path / "checkpoints").close()
    Checkpoints(tmp_path / "checkpoints", read_only=True).close()
    assert caplog.messages == []
    reader = Checkpoints(tmp_path / "checkpoints", read_only=True)
    reader.save(create())
    assert any("read only, save will be skipped" in message for message in caplog.messages)
    logging.getLogger("absl").warning("A checkpoint could not be deleted")
    assert "A checkpoint could not be deleted" in caplog.messages


def test_the_compiler_for_tpus_without_a_tpu_leaves_the_work_to_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "jax", SimpleNamespace(config=SimpleNamespace()))  # which was told nothing
    monkeypatch.setattr(host, "find_spec", lambda name: object() if name == "libtpu" else None)
    monkeypatch.setattr(host, "entry_points", lambda group: [])
    monkeypatch.setattr(host, "TPU_FILES", (str(tmp_path / "accel*"),))
    assert host.computes_on_cpu()
    (tmp_path / "accel0").touch()
    assert not host.computes_on_cpu()

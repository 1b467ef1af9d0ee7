"""What doctor calls missing is what the installed package says that it requires."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from transformer_jax.__main__ import _main as main

ROOT = Path(__file__).parent.parent
version = metadata.version


@pytest.fixture
def doctor(monkeypatch, capsys):
    """The report, with other versions installed: None is none at all."""

    def run(**changes):
        def changed(name):
            found = changes.get(re.sub(r"[-_.]+", "_", name), version)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return version(name) if found is version else found

        monkeypatch.setattr(metadata, "version", changed)
        monkeypatch.setattr(sys, "argv", ["transformer_jax", "doctor"])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().out

    return run


def test_it_names_versions_and_devices(doctor):
    code, out = doctor()
    assert code == 0
    assert "jax 0." in out and "cpu:0" in out and "all that is required is here" in out


def test_what_is_required_is_what_the_package_requires(doctor):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = [text for text in metadata.requires("transformer_jax") if "extra ==" not in text]
    required = {re.match(r"[\w-]+", text).group().lower().replace("_", "-") for text in installed}
    out = doctor()[1]
    reported = {line.split()[0].lower().replace("_", "-") for line in out.split("\noptional:")[0].splitlines()[1:]}
    assert reported == required
    for extra in project["optional-dependencies"]:
        assert f"\n  [{extra}] " in out


@pytest.mark.parametrize("package", ["safetensors", "tensorflow_cpu", "torch", "pytest"])
def test_a_plain_install_is_enough(doctor, package):
    assert doctor(**{package: None})[0] == 0


def test_tensorflow_is_for_preparing_sets_not_for_reading_them(doctor):
    (line,) = (line for line in doctor(tensorflow_cpu=None, tensorflow=None)[1].splitlines() if "[tfds]" in line)
    assert "lacks tensorflow-cpu" in line and "prepared ones are read without it" in line
    (line,) = (line for line in doctor(tensorflow_cpu=None, tensorflow="2.99")[1].splitlines() if "[tfds]" in line)
    assert "is installed" in line


def test_what_is_missing_or_too_old_is_named(doctor):
    code, out = doctor(grain=None, optax="0.0.1")
    assert code == 1
    assert re.search(r"\nmissing: grain, optax>=[\d.]+ \(there is 0.0.1\); ", out)


def test_without_a_device_the_report_goes_on(doctor, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr("jax.local_devices", fail)
    code, out = doctor()
    assert code == 1 and "none can be used: Unable to initialize backend 'cuda'" in out and "fonts" in out

"""`python -m transformer_jax doctor`: what is installed, which devices there are, what is missing."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import jax
from packaging.requirements import Requirement

from transformer_jax.errors import UserError

PACKAGE = "transformer_jax"
USES = {
    "tfds": "to download and prepare most sets of TensorFlow Datasets; prepared ones are read without it",
    "hub": "to load checkpoints by their names on the Hugging Face hub",
    "datasets": "for sets of Hugging Face datasets, and for .parquet files",
    "remote": "for workdirs in gs:// buckets",
    "cuda": "for NVIDIA GPUs",
    "tpu": "for TPUs",
    "bench": "for the benchmarks",
    "test": "for the tests",
}
"""What the extras of this package are for."""
ALTERNATIVES = {"tensorflow-cpu": "tensorflow"}
"""Packages that do as well."""
SCRIPTS = {"Japanese and Chinese": "年月日火曜星期", "Korean": "년월일", "Devanagari": "मार्च", "Arabic": "مارس"}


@dataclass(frozen=True)
class Doctor:
    """Show versions, devices, and what is missing."""

    def run(self) -> None:
        """Print the report; ends with 1 when something required is missing."""
        if _version(PACKAGE) is None:
            raise UserError(f"{PACKAGE} is not installed; pip install -e . in the folder of its pyproject.toml")
        print(f"python {platform.python_version()} on {platform.platform()}")
        missing = [problem for requirement in _requirements(PACKAGE) for problem in _report(requirement)]
        print("\noptional:")
        for extra in metadata.metadata(PACKAGE).get_all("Provides-Extra", []):
            _report_extra(extra)
        missing += _report_devices()
        _report_fonts()
        if missing:
            print(f"\nmissing: {', '.join(missing)}; to get packages: pip install --upgrade {PACKAGE}")
            raise SystemExit(1)
        print("\nall that is required is here")


def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """What the installed package says that it requires on this machine, or what an extra of it adds to that."""
    requirements = [Requirement(text) for text in metadata.requires(package) or ()]
    always = [requirement for requirement in requirements if _applies(requirement)]
    if not extra:
        return always
    return [requirement for requirement in requirements if _applies(requirement, extra) and requirement not in always]


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _report(requirement: Requirement) -> list[str]:
    """Print the version that is installed; returns what is missing."""
    problems = list(_problems(requirement))
    version = _version(requirement.name)
    print(f"  {requirement.name} {'is not installed' if version is None else version}")
    return problems


def _report_extra(extra: str) -> None:
    missing = [problem for requirement in _requirements(PACKAGE, extra) for problem in _problems(requirement)]
    state = f"lacks {', '.join(missing)}" if missing else "is installed"
    print(f"  [{extra}] {state}", *([f"({USES[extra]})"] if extra in USES else []), sep=" ", end="")
    print(f': pip install "{PACKAGE}[{extra}]"' if missing else "")


def _problems(requirement: Requirement) -> Iterator[str]:
    """What is missing or too old of a requirement and of the extras of it that are asked for."""
    version = _version(requirement.name)
    if version is None:
        yield requirement.name
    elif not requirement.specifier.contains(version, prereleases=True):
        yield f"{requirement.name}{requirement.specifier} (there is {version})"
    else:
        for extra in requirement.extras:
            for needed in _requirements(requirement.name, extra):
                yield from _problems(needed)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _version(ALTERNATIVES[name]) if name in ALTERNATIVES else None


def _report_devices() -> list[str]:
    print("\ndevices:")
    try:
        devices = jax.local_devices()
    except Exception as error:  # of several kinds, by platform and version
        print(f"  none can be used: {str(error) or type(error).__name__}")
        return [f"a device (JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', 'not set')})"]
    for device in devices:
        print(f"  {device.platform}:{device.id} {device.device_kind}")
    print(f"  training takes {'all of them' if len(devices) > 1 else 'this one'}, with jit on a mesh")
    return []


def _report_fonts() -> None:
    from transformer_jax.visualize.fonts import font_families

    print("\nfonts for pictures:")
    for script, sample in SCRIPTS.items():
        families, without = font_families(sample)
        print(f"  {script}: {'none; code points are drawn instead' if without else families[-1]}")

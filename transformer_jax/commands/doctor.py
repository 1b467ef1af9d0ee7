"""`python -m transformer_jax doctor`: what is installed, which devices there are, what is missing."""

import importlib.metadata
import platform
from dataclasses import dataclass

import jax

REQUIRED = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorflow-datasets",
    "grain",
    "tokenizers",
    "tyro",
    "rich",
    "numpy",
    "babel",
    "jaxtyping",
    "safetensors",
    "matplotlib",
    "tensorboardX",
    "sacrebleu",
)
OPTIONAL = {
    "tensorflow-cpu": 'TFDS sets that only exist as tfrecord: pip install "transformer_jax[tfds]"',
    "huggingface_hub": 'checkpoints from the hub: pip install "transformer_jax[hub]"',
    "torch": 'the benchmarks: pip install "transformer_jax[bench]"',
}
SCRIPTS = {"Japanese and Chinese": "年月日火曜星期", "Korean": "년월일", "Devanagari": "मार्च", "Arabic": "مارس"}


@dataclass(frozen=True)
class Doctor:
    """Show versions, devices, and what is missing."""

    def run(self) -> None:
        """Print the report; ends with 1 when something required is missing."""
        print(f"python {platform.python_version()} on {platform.platform()}")
        missing = [name for name in REQUIRED if not _report(name)]
        print("\noptional:")
        for name, use in OPTIONAL.items():
            _report(name, f"for {use}")
        print("\ndevices:")
        for device in jax.local_devices():
            print(f"  {device.platform}:{device.id} {device.device_kind}")
        print(f"  training takes {'pmap over all of them' if jax.local_device_count() > 1 else 'jit on this one'}")
        _report_fonts()
        if missing:
            print(f"\nmissing: {', '.join(missing)}; pip install transformer_jax")
            raise SystemExit(1)
        print("\nall that is required is here")


def _report(name: str, use: str = "") -> bool:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    print(f"  {name} {version or 'is not installed'}{f' ({use})' if use and not version else ''}")
    return version is not None


def _report_fonts() -> None:
    from transformer_jax.visualize.fonts import font_families

    print("\nfonts for pictures:")
    for script, sample in SCRIPTS.items():
        families, without = font_families(sample)
        print(f"  {script}: {'none; code points are drawn instead' if without else families[-1]}")

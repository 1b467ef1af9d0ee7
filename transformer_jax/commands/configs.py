"""Config files: found by path or by name, and run as modules, so that the types they define are found again."""

import difflib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import cloudpickle

from transformer_jax.errors import UserError
from transformer_jax.training import Config
from transformer_jax.training.serialization import USER_MODULE

PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")
"""Where the configs of this package are: in it when it was installed as a wheel, else beside it."""


def load_config(name: str) -> Config:
    """The config in a file, or the one of this package that is called so: `dates` for configs/dates.py."""
    path = find_config(name)
    config = getattr(import_file(path), "config", None)
    if not isinstance(config, Config):
        raise UserError(f"{path} defines no `config = Config(...)`")
    return replace(config, workdir=config.workdir or Path("runs") / path.stem)


def find_config(name: str) -> Path:
    """The file of a config."""
    if (path := Path(name)).is_file():
        return path
    known = config_names()
    if name in known:
        return known[name]
    if path.suffix or len(path.parts) > 1:
        raise UserError(f"config file {path} does not exist")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give the path of a file, or one of {', '.join(sorted(known))}"
    raise UserError(f"there is no config {name!r}; {hint}")


def config_names() -> dict[str, Path]:
    """The configs of this package."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.py"))}


def _is_taken(name: str, path: Path) -> bool:
    """Whether another module than this file has a name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no name of a module, or one that was made by hand
        return name in sys.modules
    return spec is not None and (spec.origin is None or Path(spec.origin).resolve() != path.resolve())


def import_file(path: Path) -> ModuleType:
    """Run a file that the user has named, as a module of its name; the types in it are known to runs from then on."""
    if not path.is_file():
        raise UserError(f"config file {path} does not exist")
    name, version = path.stem, (str(path.resolve()), path.stat().st_mtime_ns)
    known = next((module for module in [*sys.modules.values()] if getattr(module, USER_MODULE, None) == version), None)
    if known is not None:
        return known  # run twice, its types would be others than those of before
    if not hasattr(sys.modules.get(name), USER_MODULE) and _is_taken(name, path):
        name = f"config_{name}"  # not in place of a module that others need
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    setattr(module, USER_MODULE, version)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise UserError(f"{path}, line {error.lineno}: {error.msg}") from error
        raise
    cloudpickle.register_pickle_by_value(module)  # worker processes have not run the file
    return module

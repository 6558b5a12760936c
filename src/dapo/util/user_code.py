"""What a user names in a recipe: ``package.module:name`` or ``path/file.py:name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo.errors import ConfigError, UserError, shortened


def load_named(
    spec: str,
    what: str,
    error: type[UserError] = ConfigError,
    declared: Callable[[str], Mapping[str, Any]] = lambda module: {},
) -> Any:
    """What ``spec`` names, which can be called. A relative path starts in the working folder.

    Args:
        what: it is, for messages: ``reward function``.
        error: to raise.
        declared: of a module's name: what else it holds, by names that it gave.

    Raises UserError: (``error``) the file or module is missing, fails while being imported, or holds no such thing.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise error(f"{what} {spec!r}: expected package.module:name or path/file.py:name")

    def wrong(why: str) -> UserError:
        return error(f"{what} {spec}: {why}")

    module = _import_file(Path(place), wrong) if place.endswith(".py") else _import_module(place, wrong)
    own = declared(module.__name__)
    found = own.get(name) or getattr(module, name, None)
    if found is None:
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        advice = _nearest(name, list(dict.fromkeys([*own, *functions])))
        raise wrong(f"{place} has no {name!r}; {advice}")
    if not callable(found):
        raise wrong(f"{name!r} is a {type(found).__name__}, not a function")
    return found


def made(what: str, part: Any, protocol: type, *given: Any) -> Any:
    """What a user's class or function makes of ``given``; an object stands for itself.
    Raises ConfigError: the call failed, or what it made lacks something of ``protocol``."""
    found = call_own(what, part, *given) if callable(part) else part
    missing = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(found, name)]
    if missing:
        raise ConfigError(f"{what}: a {type(found).__name__} has no {', '.join(missing)}")
    return found


def call_own(what: str, part: Callable[..., Any], *given: Any) -> Any:
    """``part(*given)``, of the user's. Raises ConfigError: it failed; says where in the user's code."""
    try:
        return part(*given)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which is answered elsewhere
            raise
        raise ConfigError(f"{what}: {describe(error)}") from error


_files: dict[Path, tuple[int, ModuleType]] = {}
"""Modules of users' files, each with the time at which its file was changed last."""


def _import_file(path: Path, wrong: Callable[[str], UserError]) -> ModuleType:
    if not path.is_file():
        raise wrong(f"no such file: {path.absolute()}")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: helpers beside the file can be imported, but shadow nothing
    known = _files.get(path := path.absolute())
    changed = path.stat().st_mtime_ns
    if known is not None and known[0] == changed:  # so that what one file holds under two names is one module
        return known[1]
    name = f"dapo_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"  # others may have a file of this name
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise wrong(f"importing {path} failed: {describe(error)}") from None
    _files[path] = changed, module
    return module


def _import_module(name: str, wrong: Callable[[str], UserError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(missing + ".")):
            raise wrong(
                f"no module named {missing!r} (looked in the working folder and the installed packages); a file is "
                "named as path/file.py:name"
            ) from None
        raise wrong(f"importing {name} failed: {describe(error)}") from None
    except (Exception, SystemExit) as error:
        raise wrong(f"importing {name} failed: {describe(error)}") from None


def _nearest(name: str, functions: list[str]) -> str:
    near = difflib.get_close_matches(name, functions, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(functions) or 'no functions'}"


def describe(error: BaseException) -> str:
    """An exception in one line, with the place in the user's code where it was raised."""
    # it goes into every sample's line and onto the terminal, and some hold the whole response
    line = shortened(traceback.format_exception_only(error)[-1].strip(), 500, " ...")
    if isinstance(error, SyntaxError):
        return f"{line} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    ours = str(Path(__file__).parents[1])
    outside = [f for f in frames if not f.filename.startswith(ours)]
    if not outside:
        return line
    return f"{line} ({outside[-1].filename}:{outside[-1].lineno} in {outside[-1].name})"

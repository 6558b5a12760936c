"""Whether the hub can be asked at all. Without a network its client tries for 23 seconds, for each file anew."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo.errors import ModelError

LOADING = threading.RLock()
"""Held while Transformers may import its parts: two threads in which it does so at once find half of them."""
CONNECT_WITHIN_S = 3.0
LONGEST_NAME = 96  # Characters that the hub takes. File systems raise an error for names that are much longer.


def from_where(name: str) -> dict[str, Any]:
    """Arguments for ``from_pretrained`` with which a model that is not on this machine is given up at once where the
    hub cannot be reached. One that is, a folder or in the cache, is loaded without asking then.
    Raises ModelError: it is a file, which would be asked for on the hub."""
    if Path(name).expanduser().is_file():
        raise ModelError(f"{name} is a file; name the folder that holds config.json and the weights")
    return {} if Path(name).expanduser().is_dir() or hub_answers() else {"local_files_only": True}


def hub_answers() -> bool:
    """Ask it once, through the client that would download, so that proxies and mirrors count."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_WITHIN_S)
    except Exception:  # no route, no name, no certificate: the kinds are those of its HTTP library, which has changed
        return False
    return True


def require_folder(what: str, name: str) -> None:
    """Tell of a path at which nothing lies.
    Raises ModelError: ``name`` cannot be one on the hub, and there is no such folder."""
    if not is_name(name) and not Path(name).expanduser().exists():
        raise ModelError(f"{what} {name}: no such folder")


def require_at_hand(what: str, name: str) -> None:
    """Tell of a model that can be had from nowhere before any library is loaded for it.
    Raises ModelError: ``name`` is no folder, nothing of it is downloaded, and the hub lacks it or is out of reach."""
    require_folder(what, name)
    from huggingface_hub import constants, repo_exists

    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    if not is_name(name) or Path(name).expanduser().exists() or cached.exists():
        return
    if not hub_answers():
        raise ModelError(unreachable(what, name))
    there = True
    with suppress(Exception):  # no clear answer: whoever loads the model says what is wrong
        there = repo_exists(name)
    if not there:
        raise ModelError(f"{what} {name}: neither a folder nor on the hub")


def is_name(name: str) -> bool:
    """Whether ``name`` may be one on the hub: ``owner/name``, or a name alone."""
    return 0 < len(name) <= LONGEST_NAME and not name.startswith((".", "/", "~")) and name.count("/") <= 1


def unreachable(what: str, name: str) -> str:
    """Why a name on the hub that is not in the cache cannot be loaded."""
    return (
        f"{what} {name}: neither a folder nor in the cache of downloads, and the hub cannot be reached from here (no "
        "network, or HF_HUB_OFFLINE is set); name a folder that holds it"
    )

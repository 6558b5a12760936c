"""Whether the hub can be asked at all. Without a network its client tries for 23 seconds, for each file anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONNECT_WITHIN_S = 3.0


def from_where(name: str) -> dict[str, Any]:
    """Arguments for ``from_pretrained`` with which a model that is not on this machine is given up at once where the
    hub cannot be reached. One that is, a folder or in the cache, is loaded without asking then."""
    return {} if Path(name).expanduser().is_dir() or hub_answers() else {"local_files_only": True}


def hub_answers() -> bool:
    """Ask it once, through the client that would download, so that proxies and mirrors count."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_WITHIN_S)
    except Exception:  # no route, no name, no certificate: the kinds are those of its HTTP library, which has changed
        return False
    return True

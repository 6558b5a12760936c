"""Nothing of these tests goes into the user's own cache."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DAPO_CACHE", str(folder))
    return folder

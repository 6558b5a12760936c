"""When objects in cycles are collected."""

import gc
from types import SimpleNamespace

import pytest

from dapo.orchestrator.launch import run_to_end
from dapo.util.memory import collecting_later


@pytest.mark.parametrize("put_off", [True, False])
def test_collecting_is_put_off_until_the_model_loads(put_off):
    seen, frozen = {}, gc.get_freeze_count()

    async def look(name, result=None):
        seen[name] = gc.isenabled()
        return result

    async def nothing():
        pass

    experiment = SimpleNamespace(
        check=lambda: look("check"),
        load=lambda wait: seen.update(load=gc.isenabled()),
        run=lambda: look("run", {}),
        close=nothing,
    )
    try:
        if put_off:
            with collecting_later():
                run_to_end(experiment)
        else:
            run_to_end(experiment)
        assert seen == {"check": not put_off, "load": True, "run": True}
        assert (gc.get_freeze_count() > frozen) == put_off
    finally:
        gc.unfreeze()


def test_collecting_goes_on_after_an_error():
    with pytest.raises(ValueError), collecting_later():
        raise ValueError
    assert gc.isenabled()

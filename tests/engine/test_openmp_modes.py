"""Without libgomp `OpenmpWorkers` does nothing, and it refuses other modes."""

import pytest

from pagepool.engine import openmp
from pagepool.engine.openmp import OpenmpWorkers


def test_other_modes_are_refused():
    with pytest.raises(ValueError, match=r"openmp .*'spin'.*'active'"):
        OpenmpWorkers("active")


@pytest.mark.parametrize("mode", ["auto", "spin", "sleep"])
def test_nothing_happens_where_libgomp_is_not_loaded(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(openmp, "MAPS", tmp_path / "absent")
    workers = OpenmpWorkers(mode)
    workers.note_step(10.0, 0.0)
    assert not workers.is_sleeping
    workers.close()

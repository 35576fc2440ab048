from pathlib import Path

from service.beat import LEAD_KEY
from service.home import metrics, readiness


def test_readiness_looks_at_the_key_that_the_beat_holds():
    assert readiness.BEAT_LEAD == LEAD_KEY


def test_gauges_of_the_dead_are_dropped_and_all_else_stays(tmp_path):
    import os

    dead = 1 << 22  # above the largest process id of Linux
    names = {
        f"gauge_livesum_{dead}.db",
        f"gauge_livesum_{os.getpid()}.db",
        f"counter_{dead}.db",
        f"gauge_sum_{dead}.db",
    }
    for name in names:
        (tmp_path / name).touch()
    metrics.bury(tmp_path)
    assert {path.name for path in Path(tmp_path).iterdir()} == names - {f"gauge_livesum_{dead}.db"}

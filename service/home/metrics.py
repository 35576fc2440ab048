"""The folder in which the processes of one machine keep their Prometheus numbers, so that one page can add them up."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
_LIVE: Final = re.compile(r"gauge_live\w*_(\d+)\.db")


def empty(folder: Path) -> None:
    """Numbers of an earlier run would be added to this one's."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)


def bury(folder: Path) -> None:
    """Drop the gauges of processes that are gone: what they hold is held no more. Counters stay."""
    for path in folder.iterdir():
        found = _LIVE.fullmatch(path.name)
        if found and not _runs(int(found[1])):
            path.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

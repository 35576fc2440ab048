"""What can be known to be wrong before anything is started."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Final

from service.home.errors import HomeError
from service.home.ports import is_free, next_free_port

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")
_HAS_CUDA: Final = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 4 if torch.version.cuda else 3)"


def check_ports(port: int, dashboard_port: int | None) -> None:
    """Raises HomeError that names a free port."""
    if port == dashboard_port:
        raise HomeError(f"API and dashboard can't share port {port}: use --dashboard-port {next_free_port(port)}.")
    for option, wanted in (("--port", port), ("--dashboard-port", dashboard_port)):
        if wanted is not None and not is_free(wanted):
            raise HomeError(f"Port {wanted} is taken or not yours to use: {option} {next_free_port(wanted)} is free.")


def check_device(device: str) -> None:
    """Only a wish for CUDA can be in vain. Raises HomeError."""
    if not _DEVICE.fullmatch(device):
        raise HomeError(f"--device takes auto, cpu, cuda or cuda:N, not {device}.")
    if not device.startswith("cuda"):
        return
    match subprocess.run([sys.executable, "-P", "-c", _HAS_CUDA], capture_output=True, check=False).returncode:
        case 0:
            return
        case 3:
            raise HomeError(f"--device {device}: this PyTorch is the CPU build. `GPU=1 make up` installs the other.")
        case _:
            raise HomeError(f"--device {device}: no NVIDIA GPU is usable here. See `nvidia-smi`, or use --device cpu.")

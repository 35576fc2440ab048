"""Which device, which number format, how many threads."""

from __future__ import annotations

import contextlib

import torch


class DeviceError(RuntimeError):
    """The device that was asked for is not there. The message says what would do."""


def resolve(name: str) -> torch.device:
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit()):
        return _cuda(name)
    raise DeviceError(f"device {name[:40]!r} is not known; use auto, cpu, cuda or cuda:N")


def _cuda(name: str) -> torch.device:
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no usable GPU or driver was found"
        raise DeviceError(f"device {name} was asked for, but {why}; use --device cpu or auto")
    device = torch.device(name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device {name} was asked for, but there are only {torch.cuda.device_count()} CUDA devices")
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on the CPU; on CUDA bfloat16, or float16 on chips that lack it."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def use_threads(threads: int | None) -> None:
    """Threads of one operation; one for operations beside each other, as steps have none. None: torch's own choice."""
    if threads is not None:
        torch.set_num_threads(threads)
    with contextlib.suppress(RuntimeError):  # can be set only once in a process, before the first parallel work
        torch.set_num_interop_threads(1)

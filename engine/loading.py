"""From the configuration to a runner that is ready, and what the worker's card says of it. Imports torch."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from engine import models
from engine.config import ConfigError, EngineConfig, WorkerConfig
from engine.kernels.device import DeviceError
from engine.models import LoadedModel, ModelError
from engine.plan import Runner
from engine.protocol import WorkerCard
from engine.runner import BLOCK_SIZE, TorchRunner

# KV memory by default. On a GPU nearly all that is left; a CPU's memory is shared with the rest of the machine.
_CUDA_SHARE: Final = 0.85
_CPU_SHARE: Final = 0.25
_CPU_MOST: Final = 512 << 20  # zeroing it takes a second per GiB at every start
_OUTSTANDING_PER_KV_TOKEN: Final = 4  # queue of a worker, in fillings of its KV pool


@dataclass(frozen=True, slots=True)
class Loaded:
    runner: Runner
    model: LoadedModel
    device: str  # identity, e.g. "host-a/cpu"
    device_kind: str  # what a rate is set for, e.g. "cpu", "nvidia-h200"
    engine: EngineConfig


def load(config: WorkerConfig, threads: int) -> Loaded:
    """Raises ConfigError when the model or the device is not usable as configured."""
    try:
        model = models.load(config.model, device=config.device, arithmetic=config.weights)
        place = model.decoder.device
        runner = TorchRunner(
            model,
            device=str(place),
            num_blocks=None if config.kv_tokens is None else -(-config.kv_tokens // BLOCK_SIZE),
            kv_memory_bytes=config.kv_memory_mb << 20 if config.kv_memory_mb else _memory(place),
            threads=threads,
        )
    except (ModelError, DeviceError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return Loaded(runner, model, f"{socket.gethostname()}/{place}", _kind(place), config.engine(place.type))


def describe(card: WorkerCard, loaded: Loaded, config: WorkerConfig) -> WorkerCard:
    limits, model = loaded.runner.limits, loaded.model
    kv_tokens = limits.num_blocks * limits.block_size
    return msgspec.structs.replace(
        card,
        device=loaded.device,
        device_kind=loaded.device_kind,
        revision=model.revision,
        weights=model.arithmetic,
        context_length=limits.context_length,
        max_batch=loaded.engine.max_batch,
        default_max_tokens=min(config.default_max_tokens, limits.context_length),
        kv_tokens=kv_tokens,
        max_outstanding_tokens=config.max_outstanding_tokens or _OUTSTANDING_PER_KV_TOKEN * kv_tokens,
        eos_token_ids=limits.eos_token_ids,
        vocab_size=limits.vocab_size,
        chat_template=model.chat_template,
        special_tokens=model.special_tokens,
    )


def _memory(place: torch.device) -> int:
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return int(free * _CUDA_SHARE)
    return min(_CPU_MOST, int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _CPU_SHARE))


def _kind(place: torch.device) -> str:
    if place.type != "cuda":
        return place.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(place).lower()).strip("-")

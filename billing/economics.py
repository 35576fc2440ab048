"""Unit economics of a time range: what came in, what it cost on two bases, and where the device time went.

*Usage basis*: the measured device time of the requests themselves. *Fully loaded*: everything the devices cost in the
range, idle, loading, overhead and waste included, shared out over the requests in proportion to their usage cost; so
the loaded costs sum to the observed device time at its rates. What nobody's usage can carry is ``unallocated``.

Ranges are half-open and widened to quarters of an hour; every answer says the range it is about. A request counts where
it finished, device time where it passed: ``in_progress`` is the difference. It also holds what was busy and served
nobody in the end: failed requests, and attempts whose worker died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from billing.rating import BOOK_CURRENCY, add, per_hour, share_out, subtract
from billing.rollup import dirty, next_quarter, quarter_of

_MILLION: Final = Decimal(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Sums over requests: of one tenant and model, or of many where one of the names is None."""

    tenant_id: UUID | None = None
    tenant: str | None = None
    model: str | None = None
    requests: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0  # cached ones included
    cached_tokens: int = 0
    completion_tokens: int = 0  # billed ones
    revenue: Decimal = Decimal(0)
    cost: Decimal = Decimal(0)  # usage basis
    loaded_cost: Decimal = Decimal(0)
    device_seconds: Decimal = Decimal(0)
    waste_seconds: Decimal = Decimal(0)
    unpriced: int = 0  # requests whose price or cost is not in the sums
    uncosted: int = 0
    pending: int = 0
    example_priced: int = 0  # requests charged by an example price
    example_revenue: Decimal = Decimal(0)  # what these were charged

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def margin(self) -> Decimal:
        return subtract(self.revenue, self.cost)

    @property
    def loaded_margin(self) -> Decimal:
        return subtract(self.revenue, self.loaded_cost)

    def per_million_tokens(self, amount: Decimal) -> Decimal | None:
        return amount * _MILLION / self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Nanoseconds of device time by what they went into. ``unaccounted`` is what lies between the measured spans."""

    busy: int = 0
    idle: int = 0
    loading: int = 0
    waste: int = 0
    overhead: int = 0
    unaccounted: int = 0

    @property
    def wall(self) -> int:
        return self.busy + self.idle + self.loading + self.waste + self.overhead + self.unaccounted


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the spans cost."""

    busy: Decimal = Decimal(0)
    idle: Decimal = Decimal(0)
    loading: Decimal = Decimal(0)
    waste: Decimal = Decimal(0)
    overhead: Decimal = Decimal(0)
    unaccounted: Decimal = Decimal(0)

    @property
    def total(self) -> Decimal:
        return add((self.busy, self.idle, self.loading, self.waste, self.overhead, self.unaccounted))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Observed time of one device, or of all where ``device`` is None."""

    device: str | None = None
    kind: str | None = None
    spans: Spans
    costs: Costs
    uncosted_ns: int  # wall time without a rate; not in the costs
    example_cost: Decimal  # the part of the costs at example rates

    @property
    def utilisation(self) -> Decimal | None:
        """Busy share of the wall clock; None without any."""
        return Decimal(self.spans.busy) / self.spans.wall if self.spans.wall else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    start: datetime  # as widened
    end: datetime
    currency: str
    total: Line
    tenants: list[Line]  # largest revenue first, as in the next two
    models: list[Line]
    lines: list[Line]  # by tenant and model
    devices: list[DeviceTime]
    device_time: DeviceTime
    unallocated: Decimal  # device cost without usage to carry it
    dirty: int  # quarters whose newest records are not in the sums yet
    example_prices: list[str]  # models of which a request was charged by an example price
    example_rates: list[str]  # kinds of devices of which time was costed by an example rate

    @property
    def in_progress(self) -> Decimal:
        """Busy time that is in no usage cost: what runs at the end less what ran at the start, and failed requests'."""
        return subtract(self.device_time.costs.busy, self.total.cost)


def report(connection: Connection, start: datetime, end: datetime) -> Report:
    """Economics of [start, end), widened to quarters of an hour."""
    start, end = quarter_of(start), next_quarter(end)
    span = {"start": start, "end": end}
    devices = [_device_time(row) for row in connection.execute(_DEVICES, span)]
    device_time = _sum_devices(devices)
    usage = [Line(**row) for row in connection.execute(_LINES, span).mappings()]
    lines = _load(usage, device_time.costs.total)
    total = _sum(Line(), lines)
    return Report(
        start=start,
        end=end,
        currency=BOOK_CURRENCY,
        total=total,
        tenants=_group(lines, lambda line: Line(tenant_id=line.tenant_id, tenant=line.tenant)),
        models=_group(lines, lambda line: Line(model=line.model)),
        lines=lines,
        devices=devices,
        device_time=device_time,
        unallocated=subtract(device_time.costs.total, total.loaded_cost),
        dirty=dirty(connection, start, end),
        example_prices=sorted({line.model or "" for line in lines if line.example_priced}),
        example_rates=sorted({device.kind or "" for device in devices if device.example_cost}),
    )


_SPANS: Final = ("busy", "idle", "loading", "waste", "overhead", "unaccounted")


def _sum(names: Line, lines: Iterable[Line]) -> Line:
    """``names`` with the sums of ``lines``."""
    found = list(lines)
    return replace(
        names,
        requests=sum(line.requests for line in found),
        cancelled=sum(line.cancelled for line in found),
        failed=sum(line.failed for line in found),
        prompt_tokens=sum(line.prompt_tokens for line in found),
        cached_tokens=sum(line.cached_tokens for line in found),
        completion_tokens=sum(line.completion_tokens for line in found),
        revenue=add(line.revenue for line in found),
        cost=add(line.cost for line in found),
        loaded_cost=add(line.loaded_cost for line in found),
        device_seconds=add(line.device_seconds for line in found),
        waste_seconds=add(line.waste_seconds for line in found),
        unpriced=sum(line.unpriced for line in found),
        uncosted=sum(line.uncosted for line in found),
        pending=sum(line.pending for line in found),
        example_priced=sum(line.example_priced for line in found),
        example_revenue=add(line.example_revenue for line in found),
    )


def _group(lines: Iterable[Line], names: Callable[[Line], Line]) -> list[Line]:
    groups: dict[Line, list[Line]] = {}
    for line in lines:
        groups.setdefault(names(line), []).append(line)
    return _largest_first(_sum(key, members) for key, members in groups.items())


def _largest_first(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: (-line.revenue, -line.requests, line.tenant or "", line.model or ""))


def _load(usage: list[Line], device_cost: Decimal) -> list[Line]:
    """The lines with their share of all device cost, by usage cost."""
    if not any(line.cost for line in usage):
        return _largest_first(usage)
    loaded = share_out(device_cost, [line.cost for line in usage])
    return _largest_first(replace(line, loaded_cost=cost) for line, cost in zip(usage, loaded, strict=True))


def _device_time(row: Row[tuple[object, ...]]) -> DeviceTime:
    measured = {name: int(getattr(row, name)) for name in _SPANS[:-1]}
    costs = {name: per_hour(getattr(row, f"{name}_product")) for name in _SPANS[:-1]}
    gap = per_hour(subtract(row.wall_product, add(getattr(row, f"{name}_product") for name in _SPANS[:-1])))
    return DeviceTime(
        device=row.device,
        kind=row.device_kind,
        spans=Spans(**measured, unaccounted=int(row.wall) - sum(measured.values())),
        costs=Costs(**costs, unaccounted=gap),
        uncosted_ns=int(row.uncosted),
        example_cost=per_hour(row.example_product),
    )


def _sum_devices(devices: list[DeviceTime]) -> DeviceTime:
    return DeviceTime(
        spans=Spans(**{name: sum(getattr(d.spans, name) for d in devices) for name in _SPANS}),
        costs=Costs(**{name: add(getattr(d.costs, name) for d in devices) for name in _SPANS}),
        uncosted_ns=sum(d.uncosted_ns for d in devices),
        example_cost=add(d.example_cost for d in devices),
    )


_LINES: Final = text("""
SELECT u.tenant_id, coalesce(t.name, CAST(u.tenant_id AS text)) AS tenant, u.model,
       CAST(sum(u.requests) AS bigint) AS requests,
       CAST(coalesce(sum(u.requests) FILTER (WHERE u.status = 'cancelled'), 0) AS bigint) AS cancelled,
       CAST(coalesce(sum(u.requests) FILTER (WHERE u.status = 'failed'), 0) AS bigint) AS failed,
       CAST(sum(u.prompt_tokens) AS bigint) AS prompt_tokens,
       CAST(sum(u.cached_tokens) AS bigint) AS cached_tokens,
       CAST(sum(u.completion_tokens) AS bigint) AS completion_tokens,
       sum(u.price) AS revenue, sum(u.cost) AS cost,
       sum(u.device_seconds) AS device_seconds, sum(u.waste_seconds) AS waste_seconds,
       CAST(sum(u.unpriced) AS bigint) AS unpriced, CAST(sum(u.uncosted) AS bigint) AS uncosted,
       CAST(sum(u.pending) AS bigint) AS pending,
       CAST(sum(u.example_priced) AS bigint) AS example_priced, sum(u.example_price) AS example_revenue
FROM usage_15m u LEFT JOIN tenants t ON t.id = u.tenant_id
WHERE u.bucket >= :start AND u.bucket < :end
GROUP BY u.tenant_id, t.name, u.model
""")

# A product is nanoseconds times an hourly rate
_DEVICES: Final = text(f"""
SELECT u.device, u.device_kind, sum(u.wall_ns) AS wall, coalesce(sum(u.wall_ns * r.hourly), 0) AS wall_product,
       {", ".join(f"sum(u.{name}_ns) AS {name}" for name in _SPANS[:-1])},
       {", ".join(f"coalesce(sum(u.{name}_ns * r.hourly), 0) AS {name}_product" for name in _SPANS[:-1])},
       coalesce(sum(u.wall_ns) FILTER (WHERE r.id IS NULL), 0) AS uncosted,
       coalesce(sum(u.wall_ns * r.hourly) FILTER (WHERE r.example), 0) AS example_product
FROM device_15m u LEFT JOIN device_rates r ON r.id = u.rate_id
WHERE u.bucket >= :start AND u.bucket < :end
GROUP BY u.device, u.device_kind ORDER BY u.device, u.device_kind
""")

"""A small business with a past: tenants, prices, a rate, and requests of a simulated worker, by the recorder's door."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from sqlalchemy import Connection

from billing.ids import uuid7_floor
from billing.keys import create_key
from billing.prices import Amounts, set_price
from billing.rates import set_device_rate
from billing.recording import record
from billing.records import Attempt, AttemptSeen, Interval, Origin, Settlement
from billing.rollup import roll_up
from billing.tenants import add_tenant

TENANTS = ("Acme Robotics", "Harbour Analytics", "Northwind Labs", "Studio Lumen")
SHARES = (8, 5, 3, 1)
SMALL, LARGE = "smollm2-135m-instruct", "smollm2-360m-instruct"
PRICES = {SMALL: ("0.00000025", "0.0000001", "0.0000009"), LARGE: ("0.0000005", "0.0000002", "0.0000018")}
DEVICE, KIND = "host-a/cpu", "cpu"
TICK = timedelta(seconds=60)
S = 1_000_000_000


@dataclass
class Business:
    """Draws requests. The same seed draws the same ones."""

    seed: int = 7
    tenants: dict[str, UUID] = field(default_factory=dict)
    keys: dict[str, UUID] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sequence = 0

    def open(self, connection: Connection, *, examples: bool = False) -> None:
        """Tenants, keys, prices and the rate."""
        for name in TENANTS:
            self.tenants[name] = add_tenant(connection, name, actor="test").id
            self.keys[name] = create_key(connection, tenant_id=self.tenants[name], name="first", actor="test").id
        for model, (fresh, cached, output) in PRICES.items():
            amounts = Amounts(input=Decimal(fresh), cached_input=Decimal(cached), output=Decimal(output))
            set_price(connection, model, amounts, example=examples, actor="test")
        set_device_rate(connection, Decimal("0.12"), device_kind=KIND, example=examples, actor="test")

    def run(self, connection: Connection, start: datetime, end: datetime, *, per_hour: float = 190) -> None:
        """Serve from ``start`` until ``end`` and roll up: as many an hour as said, more by day than by night."""
        settlements: list[Settlement] = []
        attempts: list[Attempt] = []
        at = start
        while (at := at + timedelta(hours=self.random.expovariate(per_hour * _daylight(at)))) < end:
            settlement, tried = self.request(at)
            settlements.append(settlement)
            attempts.extend(tried)
        record(connection, settlements=settlements, attempts=attempts, intervals=self._intervals(attempts, start, end))
        while roll_up(connection):
            pass

    def request(self, finished: datetime, *, tenant: str | None = None) -> tuple[Settlement, list[Attempt]]:
        draw = self.random
        tenant = tenant or draw.choices(TENANTS, SHARES)[0]
        model = SMALL if draw.random() < 0.7 else LARGE
        status = draw.choices(("completed", "cancelled", "failed"), (94, 4, 2))[0]
        prompt = int(draw.lognormvariate(5.6, 0.8)) + 8
        cached = min(prompt - 1, draw.choice((0, 0, 16, 64, 128)))
        generated = min(int(draw.lognormvariate(4.7, 0.7)) + 2, 900)
        slow = 1.0 if model == SMALL else 2.2
        queue = int(draw.expovariate(25) * S)
        prefill = int((0.02 + (prompt - cached) * 0.0007) * slow * S)
        decode = int(generated * 0.024 * slow * S)
        ttft = queue + prefill + 4_000_000
        total = ttft + decode + 2_000_000
        created = finished - timedelta(microseconds=total // 1000)
        origin = self._origin(tenant, model, created)
        used = int((prefill + decode) * draw.uniform(0.55, 0.95))
        failed = status == "failed"
        attempt = Attempt(
            request_id=self._id(created), attempt=1, origin=origin, worker="worker-1", device=DEVICE, device_kind=KIND,
            outcome=status, prompt_tokens=prompt - cached, cached_tokens=cached, generated_tokens=generated,
            received_at=created, finished_at=finished, queue_ns=queue, prefill_ns=prefill, decode_ns=decode,
            used_ns=0 if failed else used, wasted_ns={"failed": used} if failed else {}, kv_block_ns=used * 20,
            steps=generated, peak_batch=draw.randint(1, 9), interval=1,
        )  # fmt: skip
        tried = [attempt]
        if draw.random() < 0.01 and not failed:
            tried = [_lost(attempt), _second(attempt)]
        settlement = Settlement(
            request_id=attempt.request_id, origin=origin, status=status,
            finish_reason={"completed": draw.choice(("stop", "length")), "cancelled": "cancelled"}.get(status, "error"),
            error_code="worker_failed" if failed else "", winning_attempt=None if failed else tried[-1].attempt,
            attempts=tuple(_seen(a) for a in tried),
            prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated,
            delivered_tokens=max(generated - (2 if status != "completed" else 0), 0),
            billed_tokens=0 if failed else generated,
            queue_ns=queue, ttft_ns=ttft, tpot_ns=decode // max(generated - 1, 1),
            total_ns=total, finished_at=finished,
        )  # fmt: skip
        return settlement, tried

    def _origin(self, tenant: str, model: str, created: datetime) -> Origin:
        self.sequence += 1
        chat = self.random.random() < 0.9
        return Origin(
            tenant_id=self.tenants[tenant], api_key_id=self.keys[tenant], kind="generate", model=model, route="",
            arm="", deployment=model, revision="3f2a9c", endpoint="/v1/chat/completions" if chat else "/v1/completions",
            stream=self.random.random() < 0.8, boot_id="api-1", boot_seq=self.sequence, batch_id=None,
            trace_id=f"{self.random.getrandbits(128):032x}",
            created_at=created, deadline=created + timedelta(minutes=10),
        )  # fmt: skip

    def _id(self, created: datetime) -> UUID:
        return UUID(int=uuid7_floor(created).int | self.random.getrandbits(62))

    def _intervals(self, attempts: list[Attempt], start: datetime, end: datetime) -> list[Interval]:
        busy: dict[int, int] = {}
        waste: dict[int, int] = {}
        for attempt in attempts:
            tick = (attempt.finished_at - start) // TICK
            busy[tick] = busy.get(tick, 0) + attempt.used_ns
            waste[tick] = waste.get(tick, 0) + sum(attempt.wasted_ns.values())
        wall = int(TICK.total_seconds()) * S
        intervals = []
        for tick in range((end - start) // TICK):
            loading = wall // 3 if tick == 0 else 0
            spent = min(busy.get(tick, 0), wall - loading)
            wasted = min(waste.get(tick, 0), wall - loading - spent)
            overhead = (wall - loading - spent - wasted) // 60 + spent // 40 if spent < wall // 2 else 0
            intervals.append(
                Interval(
                    worker="worker-1",
                    device=DEVICE,
                    device_kind=KIND,
                    deployment=SMALL,
                    number=tick + 1,
                    started_at=start + tick * TICK,
                    start_ns=tick * wall,
                    end_ns=(tick + 1) * wall,
                    busy_ns=spent,
                    waste_ns=wasted,
                    loading_ns=loading,
                    overhead_ns=overhead,
                    idle_ns=wall - loading - spent - wasted - overhead,
                )
            )
        return intervals


def _daylight(at: datetime) -> float:
    return 0.45 + 0.55 * max(0.0, math.sin((at.hour + at.minute / 60 - 6) / 24 * 2 * math.pi) * 0.7 + 0.5)


def _seen(attempt: Attempt) -> AttemptSeen:
    return AttemptSeen(
        attempt=attempt.attempt,
        worker=attempt.worker,
        device=attempt.device,
        device_kind=attempt.device_kind,
        device_ns=attempt.used_ns + sum(attempt.wasted_ns.values()),
    )


def _lost(attempt: Attempt) -> Attempt:
    return replace(attempt, outcome="lost", used_ns=0, wasted_ns={"lost": attempt.used_ns // 3}, worker="worker-0")


def _second(attempt: Attempt) -> Attempt:
    return replace(attempt, attempt=2)


def now() -> datetime:
    return datetime.now(UTC)

"""A worker that speaks the real streams on a real Valkey and says exactly what a test tells it to.

In a test's own event loop (``ScriptedWorker``), or as a process of its own that can be killed:
``python -m tests.service.scripted REDIS_URL NAME [--step-s S] [--text TEXT]``.
Its model's tokenizer has one token per byte, so that characters fall apart at token borders.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable

from redis.asyncio import Redis
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.keys import (
    DATA,
    PRODUCER,
    RECORDS,
    SEQ,
    WORKERS,
    events_key,
    inbox_key,
    incumbent_key,
    lease_key,
    tokenizer_key,
)
from engine.protocol import (
    Abort,
    AbortReason,
    AttemptReport,
    Event,
    EventBatch,
    FinishReason,
    Job,
    Logprob,
    Outcome,
    WorkerCard,
    WorkerState,
    pack,
    unpack_inbound,
)

MODEL = "scripted"
END = 257
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEASE_MS = 2000


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


TOKENIZER = byte_tokenizer()
REVISION = "scripted-revision"


def logprob_of(token: int, count: int) -> Logprob:
    """What a worker tells of a token: it is the likeliest but one, after the token whose id is one higher."""
    best = [(token + 1 - n) % 257 for n in range(count)]
    return Logprob(logprob=-1.0 - token / 1000, ids=best, logprobs=[-token / 1000 - n for n in range(count)])


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


class ScriptedWorker:
    """Registers a card and answers jobs with ``answer`` (text of a job), ``per_step`` tokens every ``step_s``.

    With ``manual`` it only collects: the test takes jobs from ``jobs`` and says what happens with ``emit``.
    """

    def __init__(
        self,
        redis_url: str,
        name: str = "test/worker-0",
        *,
        text: str = "Hello there, friend.",
        step_s: float = 0.0,
        per_step: int = 1,
        manual: bool = False,
        max_outstanding: int = 100_000,
        answers_aborts: bool = True,
        state: WorkerState = WorkerState.READY,
        model: str = MODEL,
    ) -> None:
        self.boot = f"{name}-{uuid.uuid4().hex[:8]}"
        self.redis = Redis.from_url(redis_url)
        self.answer: Callable[[Job], list[int]] = lambda _: [*ids_of(text), END]
        self.step_s, self.per_step, self.manual = step_s, per_step, manual
        self.answers_aborts = answers_aborts
        self.jobs: asyncio.Queue[Job] = asyncio.Queue()
        self.seen: list[Job] = []
        self.aborts: list[Abort] = []
        self.card = WorkerCard(
            worker=self.boot,
            name=name,
            state=state,
            device="test/cpu",
            device_kind="cpu",
            deployment="default",
            model=model,
            revision=REVISION,
            context_length=8192,
            default_max_tokens=256,
            max_batch=64,
            kv_tokens=100_000,
            max_outstanding_tokens=max_outstanding,
            eos_token_ids=(END,),
            vocab_size=258,
            chat_template=TEMPLATE,
            special_tokens={"eos_token": "<|im_end|>"},
            started_at=time.time(),
        )
        self._emitted: dict[uuid.UUID, int] = {}
        self._running: dict[uuid.UUID, asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._reports = 0

    async def __aenter__(self) -> ScriptedWorker:
        await self.register()
        self._loops = [asyncio.create_task(self._keep()), asyncio.create_task(self._read())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        await self.redis.hdel(WORKERS, self.boot)
        await self.redis.delete(inbox_key(self.boot))
        await self.redis.aclose()

    async def register(self) -> None:
        before = await self.redis.getset(incumbent_key(self.card.name), self.boot)
        if before and before.decode() != self.boot:
            await self.redis.delete(lease_key(before.decode()))
        await self.redis.set(tokenizer_key(REVISION), TOKENIZER.to_str())
        await self.redis.hset(WORKERS, self.boot, pack(self.card))
        await self.redis.set(lease_key(self.boot), b"worker", px=LEASE_MS)

    async def die(self) -> None:
        """As kill -9 with a lease that lapses at once: no last word, no report."""
        pending = {*self._loops, *self._running.values()}
        while pending:  # a timeout that ends at the same moment can swallow a cancellation
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.2)
        with contextlib.suppress(ConnectionError):
            await self.redis.delete(lease_key(self.boot))

    async def emit(
        self,
        job: Job,
        ids: list[int],
        finish: FinishReason | None = None,
        *,
        index: int | None = None,
        error: str = "",
        cached: int = 0,
    ) -> None:
        start = self._emitted.setdefault(job.request_id, len(job.generated[0]) if job.generated else 0)
        event = Event(
            request_id=job.request_id,
            attempt=job.attempt,
            choice=0,
            index=start if index is None else index,
            ids=ids,
            device_ns=1000 * (start + len(ids)),
            finish=finish,
            cached_tokens=cached,
            queue_ns=1000,
            error=error,
            logprobs=None if (told := job.sampling.logprobs) is None else [logprob_of(one, told) for one in ids],
        )
        self._emitted[job.request_id] = start + len(ids)
        batch = EventBatch(worker=self.boot, step=0, events=[event])
        await self.redis.xadd(events_key(job.origin.boot_id), {DATA: pack(batch)})
        if finish is not None:
            await self._report(job, finish)

    async def _report(self, job: Job, finish: FinishReason) -> None:
        self._reports += 1
        outcome = {FinishReason.STOP: Outcome.COMPLETED, FinishReason.LENGTH: Outcome.COMPLETED}
        report = AttemptReport(
            request_id=job.request_id,
            attempt=job.attempt,
            origin=job.origin,
            worker=self.boot,
            device=self.card.device,
            device_kind=self.card.device_kind,
            outcome=outcome.get(finish, Outcome.CANCELLED),
            prompt_tokens=len(job.prompt),
            generated_tokens=self._emitted.pop(job.request_id, 0),
            received_at=time.time(),
            finished_at=time.time(),
            used_ns=1000,
        )
        fields = {PRODUCER: self.boot.encode(), SEQ: b"%d" % self._reports, DATA: pack(report)}
        await self.redis.xadd(RECORDS, fields)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 4000)
            with contextlib.suppress(Exception):
                await self.register()

    async def _read(self) -> None:
        last = b"0-0"
        while True:
            try:
                reply = await self.redis.xread({inbox_key(self.boot): last}, block=500)
            except Exception:
                await asyncio.sleep(0.1)
                continue
            for entry, fields in reply[0][1] if reply else []:
                last = entry
                await self._handle(unpack_inbound(fields[DATA]))
            if reply:  # what came meanwhile stays
                await self.redis.xdel(inbox_key(self.boot), *[entry for entry, _ in reply[0][1]])

    async def _handle(self, message: Job | Abort) -> None:
        if isinstance(message, Abort):
            self.aborts.append(message)
            task = self._running.pop(message.request_id, None)
            if task:
                task.cancel()
            job = next((j for j in self.seen if j.request_id == message.request_id), None)
            if self.answers_aborts and job and job.request_id in self._emitted | {job.request_id: 0}:
                if message.reason is not AbortReason.SUPERSEDED:
                    await self.emit(job, [], FinishReason.CANCELLED)
            return
        if earlier := self._running.pop(message.request_id, None):
            earlier.cancel()  # a higher attempt ends the lower one, also where its abort got lost
        self._emitted.pop(message.request_id, None)
        self.seen.append(message)
        self.jobs.put_nowait(message)
        if not self.manual:
            self._running[message.request_id] = asyncio.create_task(self._answer(message))

    async def _answer(self, job: Job) -> None:
        given = len(job.generated[0]) if job.generated else 0
        whole = self.answer(job)[: job.sampling.max_tokens]
        ends = bool(whole) and whole[-1] in (END, *job.sampling.stop_token_ids)
        finish = FinishReason.STOP if ends else FinishReason.LENGTH
        rest = whole[given:]
        if not self.step_s:
            await self.emit(job, rest, finish)
        else:
            for at in range(0, len(rest), self.per_step):
                await asyncio.sleep(self.step_s)
                last = at + self.per_step >= len(rest)
                await self.emit(job, rest[at : at + self.per_step], finish if last else None)
        self._running.pop(job.request_id, None)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("redis_url")
    parser.add_argument("name")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--text", default="Hello there, friend.")
    arguments = parser.parse_args()
    worker = ScriptedWorker(
        arguments.redis_url, arguments.name, step_s=arguments.step_s, text=arguments.text.encode().decode("utf-8")
    )
    async with worker:
        print(worker.boot, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())

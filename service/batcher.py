"""Concurrent requests gathered into batches, from an event loop to a thread that computes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .batch import Fill
from .engine import Answer, Job
from .requests import RequestError

Work = Callable[[Sequence[Job]], list[Answer]]


@dataclass(frozen=True)
class _Waiting:
    job: Job
    rows: int
    answer: asyncio.Future[Answer]


class Batcher:
    """Runs `work` on what is waiting, batch after batch, in order.

    A batch is what came while the last one was computed, and in `window` seconds more. At most
    `queue_rows` rows wait; more are refused with 503. After `close` none is taken, and those
    taken have been answered.
    """

    def __init__(
        self, work: Work, window: float, batch_rows: int, queue_rows: int,
        waiting: Callable[[int], None] = lambda rows: None,
    ) -> None:  # fmt: skip
        self._work, self._window = work, window
        self._batch_rows, self._queue_rows = batch_rows, queue_rows
        self._tell = waiting
        self._queue: deque[_Waiting] = deque()
        self._rows = 0
        self._closing = False
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "rudnn-service")
        self._task = asyncio.create_task(self._run())

    async def submit(self, job: Job) -> Answer:
        """The answer to a job. Raises RequestError, or what `work` raised."""
        rows = len(job.rows.rows)
        if self._closing:
            raise RequestError(503, "needs a running service, got one that is stopping")
        if self._rows + rows > self._queue_rows:
            raise RequestError(503, f"needs at most {self._queue_rows} rows waiting, got "
                                    f"{self._rows} and {rows} more: try again")  # fmt: skip
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(job, rows, answer))
        self._rows += rows
        self._tell(self._rows)
        self._came.set()
        return await answer

    async def close(self) -> None:
        """Answer all that wait, then stop."""
        self._closing = True
        self._came.set()
        await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        while self._queue or not self._closing:
            if not self._queue:
                self._came.clear()
                await self._came.wait()
                continue
            if self._window and not self._closing:
                await asyncio.sleep(self._window)
            await self._compute(self._take())

    def _take(self) -> list[_Waiting]:
        fill, taken = Fill(self._batch_rows), []
        while self._queue and fill.add(self._queue[0].rows):
            taken.append(self._queue.popleft())
        self._rows -= fill.total
        self._tell(self._rows)
        return taken

    async def _compute(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._work, [w.job for w in batch])
        except Exception as error:  # each of the batch is told; the next may do better
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():  # its client may have gone
                waiting.answer.set_result(answer)

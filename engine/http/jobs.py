"""Long work in the background, with its progress: verifying the store. For the admin key."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from engine.http.admin import Body, store_of
from engine.http.errors import route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.prompts import RowId
from kvdb.check.verify import VerifyReport
from kvdb.errors import KvdbError, StoreMissing, UsageError

log = logging.getLogger("kvdb.http")

router = Router(
    "administration", prefix="/v1/kvdb", tags=["Jobs"], route_class=route_class(openai_error)
)

State = Literal["running", "done", "cancelled", "failed"]
KEPT = 20


class Cancelled(KvdbError):
    """A job was told to stop."""


@dataclass(slots=True)
class Job:
    """One piece of work. ``done`` of ``total`` steps; ``result`` grows as it goes."""

    id: int
    kind: str
    state: State = "running"
    done: int = 0
    total: int = 0
    error: str | None = None
    result: Callable[[], dict[str, Any]] = dict
    stop: threading.Event = field(default_factory=threading.Event)

    def advance(self, done: int, total: int) -> None:
        """Between two steps: note the progress. Raises Cancelled."""
        self.done, self.total = done, total
        if self.stop.is_set():
            raise Cancelled("The job was cancelled.")

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "error": self.error,
            **self.result(),
        }


class Jobs:
    """One job at a time, on a thread of its own, and the latest that ended."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next = 1

    def start(self, kind: str, run: Callable[[Job], None]) -> Job:
        """Begin a job. Raises UsageError while another one runs."""
        with self._lock:
            if any(job.state == "running" for job in self._jobs.values()):
                raise UsageError("A job is running: cancel it, or wait until it has ended.")
            job = self._jobs[self._next] = Job(self._next, kind)
            self._next += 1
            while len(self._jobs) > KEPT:
                del self._jobs[min(self._jobs)]
            self._thread = threading.Thread(
                target=_run, name="kvdb-job", daemon=True, args=(job, run)
            )
            self._thread.start()
        return job

    def find(self, job_id: int) -> Job:
        """Raises StoreMissing for a job that there is not, or no longer."""
        job = self._jobs.get(job_id)
        if job is None:
            raise StoreMissing(f"There is no job {job_id}.")
        return job

    def all(self) -> list[Job]:
        """The running one and the latest that ended, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def close(self) -> None:
        """Cancel what runs and wait for it: the store is about to close."""
        for job in self.all():
            job.stop.set()
        if self._thread is not None:
            self._thread.join()


def _run(job: Job, run: Callable[[Job], None]) -> None:
    try:
        run(job)
    except Cancelled:
        job.state = "cancelled"
    except KvdbError as error:
        job.state, job.error = "failed", str(error)
    except Exception as error:  # the border of the thread: whoever asks must hear of it
        log.exception("a job failed, by a defect of kvdb")
        job.state, job.error = "failed", f"It failed: {type(error).__name__}."
    else:
        job.state = "done"


def jobs_of(request: Request) -> Jobs:
    jobs: Jobs = request.app.state.jobs
    return jobs


class VerifyBody(Body):
    """As the options of kvdb verify."""

    data: bool = False
    sample: Annotated[RowId, Field(ge=1)] | None = None
    repair: bool = False
    start: RowId = 0


@router.post("/verify", status_code=202)
def verify(body: VerifyBody, request: Request) -> dict[str, Any]:
    """Begin to check the store; the job's id is what to ask for its progress with."""
    store, report = store_of(request), VerifyReport()

    def run(job: Job) -> None:
        job.result = lambda: _found(report)
        store.verify(
            data=body.data,
            repair=body.repair,
            sample=body.sample,
            start=body.start,
            report=report,
            progress=job.advance,
        )

    return jobs_of(request).start("verify", run).shown()


def _found(report: VerifyReport) -> dict[str, Any]:
    return {
        "checked_shards": report.checked_shards,
        "checked_bytes": report.checked_bytes,
        "next_shard": report.next_shard,
        "problems": [dataclasses.asdict(problem) for problem in list(report.problems)],
    }


@router.get("/jobs")
def list_jobs(request: Request) -> dict[str, Any]:
    """The running job and the latest that ended."""
    return {"jobs": [job.shown() for job in jobs_of(request).all()]}


@router.get("/jobs/{job_id}")
def show_job(job_id: int, request: Request) -> dict[str, Any]:
    """One job: how far it is, and what it found so far."""
    return jobs_of(request).find(job_id).shown()


@router.delete("/jobs/{job_id}", status_code=202)
def cancel_job(job_id: int, request: Request) -> dict[str, Any]:
    """Stop a job between two steps."""
    job = jobs_of(request).find(job_id)
    job.stop.set()
    return job.shown()

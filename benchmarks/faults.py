"""Jobs whose processes are killed and stopped, and checkpoints that are damaged: `python -m benchmarks.faults`.

On this machine's loopback, on CPU devices:
- detection: of a job of 2 to 4 processes one, by lot, is killed (SIGKILL) or stopped (SIGSTOP) while it steps; how long
  it takes until all others have ended, with exit code 69, and have named it;
- restarts: `autopar run --processes` trains with a checkpoint every third step; a process by lot is killed at a moment
  by lot (starting, compiling, restoring, stepping, saving), and the job is started again, on 1 to 4 processes by lot,
  in the same folder, until it has made all its steps; it has to go on from the latest complete checkpoint, and the
  losses have to be those of a run that nothing happened to;
- storage: a bit of the latest checkpoint flipped, or a file of it cut short: the one before is taken, and that is said;
  no file may become longer than some bytes, as on a full disk, for one process: the job ends, and goes on from the
  latest complete one; a second job that saves into the same folder is refused, and the first goes on; the clock of one
  process is an hour behind;
- recovery: the GPT of `make train` on two processes of `autopar run --elastic`, one of which is killed: how long it
  takes until the first step after that, where plans and XLA's programs are kept;
- endurance: 10,000 steps with a checkpoint every 500; what each process holds at the end over what it held after 2,000,
  both in medians of three checkpoints, since threads of JAX's transfers come and go.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import common

FOLDER = pathlib.Path(__file__).parent
SCRIPT = FOLDER / "faults_processes.py"
HEARTBEAT = 5  # seconds
NAMED, SLACK = 2.0, 5.0  # seconds until one that is killed is named; after the heartbeat's, one that is stopped
FIRST = 30.0  # seconds from a start until the first step
STEPS, GPT_STEPS = 45, 6
GROWTH = 0.02  # of what a process holds
ENDURANCE_LIMIT = 1200.0
LIMIT = 120.0  # seconds after which a job that should have ended hangs
LOST = 69
TOLERANCE = 1e-5  # of losses, relative


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Processes of one job, or `autopar run` that has started them; where they log and complain."""

    folder: pathlib.Path
    processes: Sequence[subprocess.Popen[bytes]]
    complaints: Sequence[pathlib.Path]

    def log(self) -> list[dict[str, Any]]:
        """What has been logged, of a line that is being written nothing."""
        path = self.folder / "log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.complaints)

    def wait(self, who: Sequence[int], limit: float = LIMIT) -> bool:
        """For these to end; whether they have within the limit."""
        until = time.monotonic() + limit
        with contextlib.suppress(subprocess.TimeoutExpired):
            for index in who:
                self.processes[index].wait(max(0.0, until - time.monotonic()))
            return True
        return False

    def children(self) -> list[int]:
        """Of `autopar run`: its processes' ids, in order."""
        (run,) = self.processes
        with contextlib.suppress(OSError):
            return [int(pid) for pid in pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        return []


@contextlib.contextmanager
def _job(
    folder: pathlib.Path, command: Sequence[str], environments: Sequence[Mapping[str, str]],
    before: Callable[[int], None] | None = None,
) -> Iterator[Job]:  # fmt: skip
    """Started; ended whatever happens. `before`: called in each process before its program."""
    base = {**os.environ, "PYTHONPATH": os.fspath(FOLDER.parent), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    complaints = [folder / f"stderr-{time.monotonic_ns()}-{index}" for index in range(len(environments))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, (variables, path) in enumerate(zip(environments, complaints, strict=True)):
            with path.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, env={**base, **variables}, stdout=subprocess.DEVNULL, stderr=file,
                        start_new_session=True, preexec_fn=None if before is None else lambda i=index: before(i),
                    )
                )  # fmt: skip
        yield Job(folder, processes, complaints)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _words(folder: pathlib.Path, steps: int, skewed: int | None = None) -> list[str]:
    return [os.fspath(SCRIPT), os.fspath(folder), str(steps), *([] if skewed is None else [str(skewed)])]


def _apart(
    folder: pathlib.Path, count: int, steps: int, before: Callable[[int], None] | None = None,
    skewed: int | None = None,
) -> contextlib.AbstractContextManager[Job]:  # fmt: skip
    """A job whose processes nobody watches, as those on several hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        sys.executable, "-m", "autopar", "run", "--devices-per-process", "1", "--heartbeat-timeout", str(HEARTBEAT),
        *_words(folder, steps, skewed),
    ]  # fmt: skip
    job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    alone: list[Mapping[str, str]] = [{}]
    return _job(
        folder, command, alone if count == 1 else [{**job, "JAX_PROCESS_ID": str(i)} for i in range(count)], before
    )


def _launched(folder: pathlib.Path, count: int, steps: int) -> contextlib.AbstractContextManager[Job]:
    """`autopar run` of so many processes."""
    command = [
        sys.executable, "-m", "autopar", "run", "--processes", str(count), "--devices-per-process", "1",
        "--heartbeat-timeout", str(HEARTBEAT), *_words(folder, steps),
    ]  # fmt: skip
    return _job(folder, command, [{}])


def _until(holds: Callable[[], bool], limit: float = LIMIT) -> bool:
    until = time.monotonic() + limit
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def detection(kind: signal.Signals, trial: int) -> dict[str, Any]:
    """One process is killed or stopped: who was named where, and after how many seconds."""
    lot = random.Random(f"{kind.name} {trial}")
    count = lot.choice((2, 3, 4))
    victim = trial % count
    row: dict[str, Any] = {"what": f"{kind.name} of process {victim} of {count}", "trial": trial}
    with tempfile.TemporaryDirectory() as name, _apart(pathlib.Path(name), count, 10**6) as job:
        others = [index for index in range(count) if index != victim]
        if not _until(lambda: len(job.log()) > 5):
            return {**row, "holds": False, "failed": f"it did not begin: {job.said()}"}
        time.sleep(lot.uniform(0.0, 1.5))
        began = time.monotonic()
        job.processes[victim].send_signal(kind)
        ended = job.wait(others)
        row["seconds"] = time.monotonic() - began
        row["codes"] = [job.processes[index].poll() for index in others]
        named = f"autopar: stopped, since process {victim} of this job (process id {job.processes[victim].pid} on "
        row["named"] = sum(named in job.complaints[index].read_text(errors="replace") for index in others)
        row["holds"] = ended and row["named"] == len(others) and set(row["codes"]) == {LOST}
    return row


def complete(folder: pathlib.Path) -> int:
    """The step of the latest checkpoint that is complete; 0: there is none."""
    checkpoints = folder / "checkpoints"
    steps = [int(entry.name) for entry in checkpoints.iterdir() if entry.name.isdigit()] if checkpoints.exists() else []
    return max(steps, default=0)


def losses(log: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Of each step, all that were computed."""
    found: list[list[float]] = [[] for _ in range(STEPS)]
    for line in log:
        if "step" in line:
            found[line["step"] - 1].append(line["loss"])
    return found


def undisturbed() -> list[float]:
    """The losses of a run that nothing happens to, in one process."""
    with tempfile.TemporaryDirectory() as name, _apart(pathlib.Path(name), 1, STEPS) as job:
        if not job.wait([0]) or job.processes[0].returncode:
            raise RuntimeError(f"the run that nothing happens to failed: {job.said()}")
        return [loss for (loss,) in losses(job.log())]


def _error(log: Sequence[Mapping[str, Any]], right: Sequence[float]) -> float:
    """The largest relative error of a loss; infinite if one is missing."""
    found = losses(log)
    if not all(found):
        return float("inf")
    return max(abs(x - y) / abs(y) for computed, y in zip(found, right, strict=True) for x in computed)


def restarts(kills: int, right: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Jobs whose processes are killed, until that has happened so many times; a row for each start."""
    lot, done = random.Random(0), 0
    while done < kills:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            finished = False
            while not finished:
                count, moment = lot.randint(2, 4) if done < kills else 2, lot.uniform(0.3, 11.0)
                latest = complete(folder)
                with _launched(folder, count, STEPS) as job:
                    before = len(job.log())
                    row: dict[str, Any] = {"what": "start", "processes": count, "latest": latest}
                    began = time.monotonic()  # of the system, for all processes the same
                    if done < kills:
                        job.wait([0], moment)
                        victims = job.children() if job.processes[0].poll() is None else []
                        if victims:
                            row["killed"] = lot.randrange(len(victims))
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(victims[row["killed"]], signal.SIGKILL)
                    row["hangs"] = not job.wait([0])
                    finished = job.processes[0].poll() == 0
                    if finished:  # it was at its end already
                        row.pop("killed", None)
                    done += "killed" in row
                    lines = job.log()[before:]
                    if steps := [line["at"] for line in lines if "step" in line]:
                        row["first"] = steps[0] - began
                    row["seconds"] = time.monotonic() - began
                    row["start"] = next((line["start"] for line in lines if "start" in line), None)
                    row["steps"] = sum("step" in line for line in lines)
                    row["code"] = job.processes[0].poll()
                    stopped = [line for line in job.said().splitlines() if "autopar: stopped" in line]
                    row["said"] = stopped[:1]
                    row["holds"] = row["start"] in (None, latest) and not row["hangs"]
                    if "killed" not in row and not finished:
                        row |= {"holds": False, "failed": job.said()}
                    if finished:
                        row["error"] = _error(job.log(), right)
                    yield row
                    if not row["holds"]:
                        return


def _until_done(folder: pathlib.Path, count: int) -> tuple[int | None, str, list[dict[str, Any]]]:
    """Start a job there again: the exit code, what it said, and its log from then on."""
    with _launched(folder, count, STEPS) as job:
        before = len(job.log())
        job.wait([0])
        return job.processes[0].poll(), job.said(), job.log()[before:]


def damage(kind: str, trial: int, right: Sequence[float]) -> dict[str, Any]:
    """The latest checkpoint of a job that was killed is damaged: the one before has to be taken."""
    lot = random.Random(f"{kind} {trial}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with _launched(folder, 2, STEPS):
            _until(lambda: complete(folder) >= 12)
        steps = sorted(int(entry.name) for entry in (folder / "checkpoints").iterdir() if entry.name.isdigit())
        state = folder / "checkpoints" / str(steps[-1]) / "state"
        files = sorted(file for file in state.rglob("*") if file.is_file() and file.name != "commit_success.txt")
        file = lot.choice([file for file in files if file.stat().st_size])
        content = bytearray(file.read_bytes())
        if kind == "flipped":
            content[lot.randrange(len(content))] ^= 1 << lot.randrange(8)
        else:
            content = content[: lot.randrange(len(content))]
        file.write_bytes(content)
        code, said, log = _until_done(folder, lot.choice((1, 2, 3)))
        start = next((line["start"] for line in log if "start" in line), None)
        whole = [line for line in Job(folder, [], []).log() if "step" in line]
        row = {"what": f"{kind} {file.relative_to(state)}", "trial": trial, "code": code, "start": start}
        row["holds"] = code == 0 and start == steps[-2] and "is damaged" in said and _error(whole, right) <= TOLERANCE
        return row if row["holds"] else {**row, "steps": steps, "said": said[-2000:]}


def full(trial: int, right: Sequence[float]) -> dict[str, Any]:
    """One process can write no more from the start on, as if the disk were full; then there is room again."""
    count = 2
    victim = trial % count

    def limit(index: int) -> None:
        if index == victim:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with _launched(folder, count, STEPS) as job:
            _until(lambda: complete(folder) >= 6)
        before = complete(folder)
        with _apart(folder, count, STEPS, limit) as job:
            hangs = not job.wait(range(count))
            codes, said = [process.poll() for process in job.processes], job.said()
        kept = complete(folder)
        code, _, log = _until_done(folder, count)
        start = next((line["start"] for line in log if "start" in line), None)
        row = {"what": f"full, process {victim}", "trial": trial, "codes": codes, "start": start}
        row["holds"] = (
            not hangs and all(codes) and code == 0 and before <= kept == start and "File too large" in said
            and _error(Job(folder, [], []).log(), right) <= TOLERANCE
        )  # fmt: skip
        return row if row["holds"] else {**row, "kept": kept, "before": before, "said": said[-2000:]}


def two_runs(trial: int, right: Sequence[float]) -> dict[str, Any]:
    """A second job in the folder of one that runs on and on."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with _launched(folder, 2, 10**6) as first:
            _until(lambda: complete(folder) >= 3)
            own = folder / "log-of-the-first"
            os.rename(folder / "log", own)  # each has its own
            with _launched(folder, 1 + trial % 2, 10**6) as second:
                hangs = not second.wait([0])
                refused = second.processes[0].poll() != 0 and "what two runs write must not mix" in second.said()
            least = max(STEPS, len(own.read_text().splitlines())) + 10
            hangs |= not _until(lambda: len(own.read_text().splitlines()) >= least)
            lines = [json.loads(line) for line in own.read_text().splitlines()[:least]]
            early = [line for line in lines if line.get("step", 0) <= STEPS]
            good = first.processes[0].poll() is None and _error(early, right) <= TOLERANCE
        row = {"what": "two runs in one folder", "trial": trial, "holds": refused and good and not hangs}
        return row if row["holds"] else {**row, "said": [first.said()[-2000:], second.said()[-2000:]]}


def skewed(trial: int, right: Sequence[float]) -> dict[str, Any]:
    """The clock of one process is an hour behind."""
    with tempfile.TemporaryDirectory() as name, _apart(pathlib.Path(name), 2, STEPS, skewed=trial % 2) as job:
        hangs = not job.wait([0, 1])
        codes = [process.poll() for process in job.processes]
        good = not hangs and codes == [0, 0] and _error(job.log(), right) <= TOLERANCE
        row = {"what": f"clock of process {trial % 2} an hour behind", "trial": trial, "holds": good}
        return row if good else {**row, "codes": codes, "said": job.said()[-2000:]}


def recovery(trial: int) -> dict[str, Any]:
    """The GPT of `make train` on two processes, one of which is killed: until the first step of the next start.

    Plans and XLA's programs are kept, as the first start has made them.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [
            sys.executable, "-m", "autopar", "run", "--elastic", "2:2", "--devices-per-process", "1",
            os.fspath(FOLDER / "faults_gpt.py"), name, str(GPT_STEPS), str(trial % 2),
        ]  # fmt: skip
        kept = {
            "AUTOPAR_PLAN_CACHE": os.fspath(folder / "plans"), "JAX_COMPILATION_CACHE_DIR": os.fspath(folder / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }  # fmt: skip
        began = time.monotonic()
        with _job(folder, command, [kept]) as job:
            if not job.wait([0], ENDURANCE_LIMIT) or job.processes[0].returncode:
                raise RuntimeError(f"a GPT did not recover: {job.said()}")
        log, killed = job.log(), float((folder / "killed").read_text())
    after = [line for line in log if line["at"] > killed]
    lost = max(line["step"] for line in log if line["at"] <= killed) + 1 - after[0]["step"]
    return {
        "what": "recovery", "trial": trial, "seconds": after[0]["at"] - killed, "steps lost": lost,
        "first start": log[0]["at"] - began,
    }  # fmt: skip


def endurance() -> dict[str, Any]:
    """How much more two processes hold after five times as many steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [
            sys.executable, "-m", "autopar", "run", "--processes", "2", "--devices-per-process", "1",
            os.fspath(FOLDER / "faults_endurance.py"), name,
        ]  # fmt: skip
        with _job(folder, command, [{}]) as job:
            if not job.wait([0], ENDURANCE_LIMIT) or job.processes[0].returncode:
                raise RuntimeError(f"ten thousand steps failed: {job.said()}")
        held = [json.loads((folder / f"held-{index}").read_text()) for index in range(2)]
    growth = max(
        statistics.median(look[what] for look in looks[-3:]) / statistics.median(look[what] for look in looks[2:5])
        for looks in held
        for what in looks[0]
    )
    return {"what": "endurance", "held": held, "growth": growth - 1.0}


def _say(row: Mapping[str, Any]) -> Mapping[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def bars_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, common.Bar]:
    """By what the rows are of."""
    bars: dict[str, common.Bar] = {}

    def missed(name: str, chosen: Sequence[Mapping[str, Any]]) -> None:
        if chosen:
            bars[name] = common.Bar(sum(not row["holds"] for row in chosen), 0, n=len(chosen))

    for kind, name, allowed in (("SIGKILL", "killed", NAMED), ("SIGSTOP", "stopped", HEARTBEAT + SLACK)):
        chosen = [row for row in rows if row["what"].startswith(kind)]
        missed(f"{name}_and_not_named", chosen)
        if seconds := [row["seconds"] for row in chosen if "seconds" in row]:
            bars[f"{name}_seconds_until_named"] = common.Bar(max(seconds), allowed, n=len(seconds))
    starts = [row for row in rows if row["what"] == "start"]
    missed("starts_that_hang_or_fail", [{"holds": not row["hangs"] and "failed" not in row} for row in starts])
    begun = [{"holds": row["start"] == row["latest"]} for row in starts if row["start"] is not None]
    missed("starts_not_from_the_latest_checkpoint", begun)
    if starts:
        bars["kills"] = common.Bar(sum("killed" in row for row in starts), None)
        firsts = [row["first"] for row in starts if "first" in row]
        bars["seconds_until_the_first_step"] = common.Bar(max(firsts, default=float("inf")), FIRST, n=len(firsts))
        errors = [row["error"] for row in starts if "error" in row]
        bars["largest_error_of_losses"] = common.Bar(max(errors, default=float("inf")), TOLERANCE, n=len(errors))
    if recovered := [row["seconds"] for row in rows if row["what"] == "recovery"]:
        bars["gpt_seconds_from_a_kill_to_a_step"] = common.Bar(max(recovered), FIRST, n=len(recovered))
    if growths := [row["growth"] for row in rows if row["what"] == "endurance"]:
        bars["growth_over_10000_steps"] = common.Bar(max(growths), GROWTH, n=2, unit="%")
    for name in ("flipped", "cut", "full", "two runs", "clock"):
        missed(f"{name.replace(' ', '_')}_and_not_survived", [row for row in rows if row["what"].startswith(name)])
    return bars


TRIALS, KILLS, DAMAGES = 20, 30, 5


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help="of processes that are killed, and stopped")
    parser.add_argument("--kills", type=int, default=KILLS, help="of jobs that are started again")
    parser.add_argument("--damages", type=int, default=DAMAGES, help="of each kind")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    rows = [
        _say(detection(kind, trial)) for kind in (signal.SIGKILL, signal.SIGSTOP) for trial in range(arguments.trials)
    ]
    right = undisturbed()
    rows += [_say(row) for row in restarts(arguments.kills, right)]
    for trial in range(arguments.damages):
        rows += [_say(damage(kind, trial, right)) for kind in ("flipped", "cut")]
        rows += [_say(check(trial, right)) for check in (full, two_runs, skewed)]
        rows.append(_say(recovery(trial)))
    if arguments.damages:
        rows.append(_say(endurance()))
    common.report(bars_of(rows), rows, arguments.json)


if __name__ == "__main__":
    main()

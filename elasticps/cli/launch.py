"""`elasticps launch`: a command, with a cluster beside it, on one machine or as every task of a job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from elasticps.cli.checkpoint import parse_keep
from elasticps.cli.options import URL_VARIABLE, seconds, usable_place
from elasticps.cli.output import err, signals_handled
from elasticps.errors import ConfigError, KernelsMissing
from elasticps.launch.core import task as tasks
from elasticps.launch.core.task import Task
from elasticps.launch.job import LEAVE_S, JobMembership
from elasticps.launch.processes import LaunchOptions, TaskProcesses
from elasticps.local import supervisor
from elasticps.local.scaling import SERVERS_MAX
from elasticps.system.memory import parse_size

_LOOK_S = 0.1
_ASK_S = 1.0  # between questions to etcd, which every task of a job asks
_LATE_S = 30.0
_TWICE_S = 1.0  # within that the same signal counts once: schedulers send it to a process and to its group


def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="What trains, and its arguments.", show_default=False)
    ],
    servers: Annotated[int, typer.Option(min=1, help="How many servers, on all machines together.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of each range, on as many machines where possible.")] = 2,
    ranges: Annotated[int, typer.Option(help="Slices of the hash space, a power of two.")] = 256,
    name: Annotated[str, typer.Option(help="The cluster's name.  \\[default: the job's]", show_default=False)] = "",
    nodes: Annotated[
        str,
        typer.Option(
            help="Without SLURM: all machines, as 10.0.0.1,10.0.0.2 or node[1-4]; the first one has etcd.",
            show_default=False,
        ),
    ] = "",
    node: Annotated[int, typer.Option(min=0, help="With --nodes: which of them this one is, from 0.")] = 0,
    head: Annotated[
        str, typer.Option(help="Under SLURM: the first machine's address, where its name does not lead to it.")
    ] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --nodes: etcd's port.")] = tasks.PORT,
    plugin: Annotated[
        list[str] | None, typer.Option(help="A module that every server imports first. May be given again.")
    ] = None,
    memory_limit: Annotated[
        str,
        typer.Option(help="What each server may use, such as 4GiB.  \\[default: the machine's]", show_default=False),
    ] = "",
    checkpoint_url: Annotated[
        str, typer.Option(metavar="URL", callback=usable_place, help="Where checkpoints go.", show_default=False)
    ] = "",
    checkpoint_every: Annotated[
        str, typer.Option(help="Make one so often: 30s, 5m, 2h.  \\[default: when a worker asks]", show_default=False)
    ] = "",
    checkpoint_keep: Annotated[
        str, typer.Option(help="Which are kept, as for `coordinator`.  \\[default: all]", show_default=False)
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Begin with the newest checkpoint at --checkpoint-url, if there is one.")
    ] = False,
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Encrypt everything: the authority there (`elasticps certificates FOLDER`) signs for each process.",
            show_default=False,
        ),
    ] = None,
    stop_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds after SIGTERM that the command has before servers hand over.")
    ] = 15.0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that servers have to hand over.")] = 60.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds that a task which has died is waited for at the end of a job.")
    ] = 60.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the start may take.")] = 600.0,
) -> None:
    """Run a command with a cluster beside it: etcd, a coordinator and servers, which end with it.

    The command finds the cluster by itself: `eps.connect()` reads ELASTICPS_URL. Its exit code is this one's. Under
    SLURM, `srun elasticps launch …`, all tasks share one cluster, by srun's variables and without a shared folder. On
    SIGTERM the command gets it too, and servers hand over what they hold before they end.
    """
    KernelsMissing.check()
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no command {command[0]!r}: what trains stands behind --, as in: -- python train.py"
        )
    task = _task(name, nodes, node, head, port)
    if servers > SERVERS_MAX * len(task.nodes):
        raise ConfigError(f"a machine has at most {SERVERS_MAX} servers: {servers} are too many for {len(task.nodes)}")
    given = _checkpoint_options(checkpoint_url, checkpoint_every, checkpoint_keep)
    if resume and task.first:
        given += _resume_options(checkpoint_url)
    memory = ("--memory-limit", str(parse_size(memory_limit))) if memory_limit else ()
    plugged = (part for each in plugin or () for part in ("--plugin", each))
    options = LaunchOptions(
        servers, replicas, ranges, (*memory, *plugged), tuple(given), tls, drain_timeout, timeout,
        keeps_lost_rows=bool(checkpoint_url) and not resume,
    )  # fmt: skip
    run = _Run(task, options, stop_timeout, patience)
    raise typer.Exit(run(command))


def _task(name: str, nodes: str, node: int, head: str, port: int) -> Task:
    try:
        if nodes:
            return tasks.of_nodes(name or "launch", nodes, node, port)
        if tasks.in_slurm(os.environ):
            return tasks.of_slurm(os.environ, name, head)
        return Task(name or f"launch-{os.getpid()}")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _checkpoint_options(url: str, every: str, keep: str) -> list[str]:
    if (every or keep) and not url:
        raise ConfigError(f"--checkpoint-{'every' if every else 'keep'} needs --checkpoint-url: where they go")
    if every:
        seconds(every, "--checkpoint-every")
    if keep:
        parse_keep(keep)
    given = {"--checkpoint-url": url, "--checkpoint-every": every, "--checkpoint-keep": keep}
    return [part for option, value in given.items() if value for part in (option, value)]


def _resume_options(url: str) -> list[str]:
    """Options of the coordinator that begin the cluster with the newest checkpoint; none if there is none yet."""
    if not url:
        raise ConfigError("--resume needs --checkpoint-url: where the checkpoint is")
    from elasticps.checkpoint import catalog  # brings in obstore, which a cluster without checkpoints never needs
    from elasticps.checkpoint.storage import Storage

    storage = Storage(url)
    if not catalog.cuts_of(storage):
        return []
    catalog.chain(storage)  # what is wrong with it is said before anything starts
    return ["--restore", url]


class _Stop(Exception):
    """Somebody has asked a second time: what runs ends now."""


class _Run:
    """One run of a command beside a task's processes. stop_s: how long the command may go on after SIGTERM before
    servers hand over; patience_s: as for `JobMembership`."""

    def __init__(self, task: Task, options: LaunchOptions, stop_s: float, patience_s: float) -> None:
        self._task = task
        self._processes = TaskProcesses(task, options, self._tell)
        self._stop_s = stop_s
        self._patience_s = patience_s
        self._drain_s = options.drain_s
        self._leave_s = 2 * options.drain_s + _LATE_S  # servers stay beyond the former where they have the last copies
        self._started = False
        self._command: int | None = None  # its process id, until it has been waited for
        self._stopping_since: float | None = None  # when somebody asked it to end, in monotonic seconds
        self._at_once = False  # somebody has asked again

    def _tell(self, line: str) -> None:
        err.print(f"task {self._task.number}: {line}" if self._task.count > 1 else line, markup=False, soft_wrap=True)

    def __call__(self, command: Sequence[str]) -> int:
        """Runs the command; returns its exit code, 128 + n for death by signal n."""
        over = self._task.count == 1
        with self._signals():
            try:
                url = self._processes.start()
                self._started = True
                job = JobMembership(self._processes.operator_url, self._task, self._patience_s)
                try:
                    if not over:
                        job.begin(self._patience_s)
                    code = self._run(command, url)
                    if not over:
                        over = self._leave_job(job, code)
                except _Stop:
                    code = 128 + signal.SIGTERM
                finally:
                    job.close()
            finally:
                self._started = True  # no signal interrupts the end
                self._processes.stop(keep_etcd=self._task.first and not over)
        return code

    # ----------------------------------------------------------------------------------------------- the command

    def _run(self, command: Sequence[str], url: str) -> int:
        if self._task.first:
            self._announce(url)
        own_group = not _at_terminal()  # with all that the command starts; at a terminal Ctrl-C is to reach it
        mark = supervisor.mark_of(os.getpid())
        variables = {**os.environ, URL_VARIABLE: url, supervisor.MARK: mark}
        try:
            running = subprocess.Popen(command, env=variables, process_group=0 if own_group else None)
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be executed: {error.strerror}") from None
        try:
            self._command = running.pid
            self._processes.watch(running.pid, supervisor.started_at(running.pid) or "")
            if self._stopping_since is not None:  # before there was anybody to tell
                self._pass_on(signal.SIGTERM)
            self._wait(lambda: _has_ended(running) or self._late())
            if not _has_ended(running):
                self._tell("the command has not ended yet; servers hand over what they hold")
                self._processes.leave()
                self._wait(lambda: _has_ended(running), self._leave_s)
        finally:
            self._command = None
            left = supervisor.descendants(running.pid)
            if own_group:
                with suppress(ProcessLookupError, PermissionError):  # PermissionError: some run as another user
                    os.killpg(running.pid, signal.SIGKILL)
            with suppress(PermissionError):  # `sudo`: it ends when it is told, or by itself
                running.kill()
            for pid, moment in left:
                supervisor.kill(pid, moment)
            supervisor.kill_marked(mark)  # ranks of a torchrun that is dead have sessions of their own, and no parent
            code = running.wait()
        return code if code >= 0 else 128 - code

    def _late(self) -> bool:
        """Whether servers have to hand over though the command still runs; without other tasks there is nobody to hand
        over to."""
        since = self._stopping_since
        return since is not None and self._task.count > 1 and time.monotonic() > since + self._stop_s

    def _announce(self, url: str) -> None:
        self._tell(f"cluster: {url}")
        if self._processes.exposed:
            err.print(
                "no TLS: whoever reaches the ports of these machines can read and change everything; --tls FOLDER "
                "encrypts, and asks for certificates",
                style="yellow",
            )

    # ------------------------------------------------------------------------------------------ the end of a job

    def _leave_job(self, job: JobMembership, code: int) -> bool:
        """Returns whether the job is over, so that nobody needs this task's etcd any more."""
        if code == 0 and self._stopping_since is None:
            job.done()
            self._wait(
                lambda: self._stopping_since is not None or not job.waits_for(), every_s=_ASK_S, until_asked=True
            )
            if not job.gave_up and self._stopping_since is None:
                job.left()
                self._wait(lambda: not self._task.first or not job.staying(), LEAVE_S, _ASK_S)
                return True
        self._processes.leave()
        self._wait(self._processes.have_left, self._leave_s)
        if not self._processes.have_left():
            self._tell(f"servers have not handed over all that they hold in {self._leave_s:g} s; they end now")
        job.sign_off()
        if not self._task.first or self._stopping_since is None:
            return not self._task.first
        self._wait(lambda: not job.staying(), self._drain_s, _ASK_S)  # they need etcd to hand over
        return not job.staying()

    def _wait(
        self, done: Callable[[], bool], timeout_s: float = float("inf"), every_s: float = 0.0, *,
        until_asked: bool = False,
    ) -> None:  # fmt: skip
        """Waits until `done()`, which is asked every `every_s` seconds, or for `timeout_s`; until_asked: or until
        somebody asks for the end. Raises _Stop when somebody asks again."""
        look = time.monotonic()
        until = look + timeout_s
        while True:
            if self._at_once:
                raise _Stop
            now = time.monotonic()
            if now >= look:
                if done():
                    return
                look = now + every_s
            if now >= until or (until_asked and self._stopping_since is not None):
                return
            for line in self._processes.ended():
                self._tell(f"{line}: started again")
            time.sleep(_LOOK_S)

    # -------------------------------------------------------------------------------------------------- signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Hands signals on to the command: SIGTERM and SIGINT, and SIGHUP as SIGTERM, ask everything to end, a second
        one at once; SIGUSR1 and SIGUSR2 are the command's alone. Before it starts one of the former interrupts."""

        def handle(number: int, frame: object) -> None:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._pass_on(number)
                return
            now, first = time.monotonic(), self._stopping_since is None
            if self._stopping_since is None:
                self._stopping_since = now
            if not self._started:
                if first:  # later ones find everything ending already
                    raise KeyboardInterrupt
            elif now > self._stopping_since + _TWICE_S:
                self._at_once = True  # for `_wait`: raised here it could leave anything half done
            if not (number == signal.SIGINT and _at_terminal()):
                self._pass_on(signal.SIGTERM if number == signal.SIGHUP else number)

        with signals_handled(handle, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            yield

    def _pass_on(self, number: int) -> None:
        if self._command is not None:  # and not waited for yet, so the id is nobody else's
            with suppress(ProcessLookupError):
                os.kill(self._command, number)


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. It is not waited for, so that its id, and its group's, stay its own."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # who started us has the system wait for our children
        return True

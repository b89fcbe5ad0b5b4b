"""Two "hosts" on one machine: namespaces of their own for network, mounts, IPC, names and processes, one link between.

host a  10.77.0.1 --- veth --- 10.77.0.2  host b          each sees its own folder, and an empty one in place of the
                                                          other's
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

UNSHARE = ("unshare", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
READY_S = 10.0


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        pid: of its first process.
        address: on the link.
        folder: for its files.
    """

    pid: int
    address: str
    folder: Path

    def command(self, words: Sequence[str]) -> list[str]:
        """A command line that runs there."""
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--ipc", "--uts", "--pid", "--", *words]

    def start(self, words: Sequence[str], log: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command there; what it prints goes to a file of the host."""
        with (self.folder / log).open("wb") as out:
            return subprocess.Popen(
                self.command(words),
                env=dict(os.environ) | {"TMPDIR": str(self.folder)} | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )


def why_not_two_hosts() -> str | None:
    """Why this machine cannot play two hosts; None when it can."""
    if os.geteuid() != 0:
        return "namespaces and links between them take root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"namespaces cannot be made: {tried.stderr.strip()}"
    name = f"cpkv{os.getpid()}"
    tried = subprocess.run(
        ["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"], capture_output=True, text=True
    )
    if tried.returncode != 0:
        return f"links cannot be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "link", "del", name], check=True)
    return None


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link; both and everything on them end with the block."""
    folders = (folder / "host-a", folder / "host-b")
    for path in folders:
        path.mkdir()
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_namespaces(other)) for other in reversed(folders)]
        link = (f"a{os.getpid()}", f"b{os.getpid()}")
        _run("ip", "link", "add", link[0], "type", "veth", "peer", "name", link[1])
        hosts = []
        for pid, name, path, number in zip(pids, link, folders, (1, 2), strict=True):
            host = Host(pid, f"10.77.0.{number}", path)
            _run("ip", "link", "set", name, "netns", str(pid))
            _run(*host.command(("ip", "addr", "add", f"{host.address}/24", "dev", name)))
            _run(*host.command(("ip", "link", "set", name, "up")))
            _run(*host.command(("ip", "link", "set", "lo", "up")))
            hosts.append(host)
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def _namespaces(hidden: Path) -> Iterator[int]:
    """Namespaces with a process that keeps them; an empty file system lies over `hidden` and over shared memory."""
    script = f"mount -t tmpfs none {hidden} && mount -t tmpfs none /dev/shm && echo ready && exec sleep infinity"
    outer = subprocess.Popen([*UNSHARE, "sh", "-c", script], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        assert outer.stdout is not None
        assert outer.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text(encoding="ascii").split()
        yield int(children[0])
    finally:
        outer.kill()
        outer.wait()
        assert outer.stdout is not None
        outer.stdout.close()


def terminate(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM for what `Host.start` started; the process itself is that of the tool which entered the namespaces."""
    inner = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    os.kill(int(inner[0]), signal.SIGTERM)


def wait_for(host: Host, log: str, text: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> str:
    """The line of a log that holds `text`, once it is there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        printed = (host.folder / log).read_text(encoding="utf-8", errors="replace")
        for line in printed.splitlines():
            if text in line:
                return line
        if process.poll() is not None:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    raise AssertionError(f"{text!r} was never printed; {log} holds: {printed[-2000:]}")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)

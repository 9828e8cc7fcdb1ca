"""A Ray cluster of several nodes on this machine: each has a raylet and an address of the loopback of its own."""

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

START_S = 180.0


@dataclasses.dataclass
class Node:
    """`ray start --block`, and all processes below it."""

    address: str
    process: subprocess.Popen[bytes]

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def commands(self) -> dict[psutil.Process, str]:
        """The command lines of its processes that run."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found[process] = " ".join(process.cmdline())
        return found

    def kill_raylet(self) -> None:
        """Kills -9 the raylet: for the cluster the machine is gone."""
        (raylet,) = (p for p in self.processes() if p.name() == "raylet")
        raylet.kill()


class Cluster:
    """The head at 127.0.0.2, further nodes at 127.0.0.3 and so on."""

    def __init__(self, cpus: int) -> None:
        """Starts nothing yet.

        Args:
            cpus: logical ones of each node.
        """
        self._cpus = cpus
        self._folder = tempfile.mkdtemp(prefix="ray-nodes-")
        self.nodes: list[Node] = []
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """Who wants to join needs it."""
        with socket.create_server(("127.0.0.2", 0)) as probe:
            self.address = f"127.0.0.2:{probe.getsockname()[1]}"

    def start_node(self) -> Node:
        """Starts the next node and waits until Ray says that it runs."""
        address = f"127.0.0.{2 + len(self.nodes)}"
        port = self.address.partition(":")[2]
        where = ["--address", self.address] if self.nodes else ["--head", "--port", port, "--temp-dir", self._folder]
        output = Path(self._folder) / f"node{len(self.nodes)}.txt"
        with output.open("w") as out:
            process = subprocess.Popen(
                [
                    *(str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"),
                    *("--node-ip-address", address, "--num-cpus", str(self._cpus)),
                    *("--object-store-memory", str(128 << 20), *where),
                    *([] if self.nodes else ["--include-dashboard", "false"]),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | self.environment,
                start_new_session=True,
            )
        node = Node(address, process)
        self.nodes.append(node)
        end = time.monotonic() + START_S
        while "Ray runtime started" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < end, output.read_text()
            time.sleep(0.2)
        return node

    def close(self) -> None:
        """Ends every process of every node."""
        for node in self.nodes:
            for process in node.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            node.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def still_running(processes: Iterable[psutil.Process], deadline_s: float = 120.0) -> list[psutil.Process]:
    """Those that are still there after the deadline; empty as soon as there are none."""
    end = time.monotonic() + deadline_s
    while True:
        left = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)

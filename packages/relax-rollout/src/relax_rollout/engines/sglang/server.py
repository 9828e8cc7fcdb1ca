"""One SGLang server as a child process: start, health, stop, and never a process left behind."""

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import httpx

from relax_rollout.engines.base import EngineAddress, EngineDied
from relax_rollout.engines.sglang import arguments
from relax_rollout.engines.sglang.log import last_lines, last_words
from relax_rollout.engines.sglang.process import SUPERVISOR
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.engines.sglang.transport import bearer
from relax_rollout.weight_sync.feeders import interface_of

# Below the range that the kernel gives to outgoing connections, so that nothing takes the port while the server loads.
_PORTS = range(20000, 32000)
_PORT_ATTEMPTS = 3
_STOP_DEADLINE_S = 15.0


class SGLangServer:
    """Owns one SGLang server and every process below it.

    The server ends when :meth:`stop` is called, when this object or its process goes away (``kill -9`` too), and all
    of its processes end with it.
    """

    def __init__(  # noqa: PLR0913  # what a server is started with, by name
        self,
        settings: SGLangSettings,
        *,
        model_path: str | Path,
        name: str,
        log_path: str | Path,
        device: Literal["cpu", "cuda"],
        tp_size: int = 1,
        gpu_ids: Sequence[int | str] = (),
        port: int | None = None,
        host: str = "127.0.0.1",
        dtype: str = "auto",
        seed: int = 0,
        enable_memory_saver: bool = False,
        weight_version: int = 0,
        context_length: int | None = None,
        extra: dict[str, Any] | None = None,
        keeps_cache: bool = False,
        key: str | None = None,
    ) -> None:
        """Prepares, without starting, the server.

        Args:
            settings: options of all engines.
            model_path: Hugging Face folder of the start weights.
            name: ``engine0``, ``engine1``, ...: how messages call it.
            log_path: file that its output goes to (appended).
            device: ``cuda`` or ``cpu``.
            tp_size: GPUs of this engine.
            gpu_ids: what ``CUDA_VISIBLE_DEVICES`` shall be for it; empty leaves it as it is.
            port: port to listen on; None picks a free one.
            host: address to listen on; other nodes reach the engine only if it is one of this node's.
            dtype: ``bfloat16``, ``float32`` or ``auto``.
            seed: of the sampler.
            enable_memory_saver: let GPU memory be released and resumed while the server runs.
            weight_version: version of the start weights.
            context_length: most tokens of prompt and response; None takes the model's.
            extra: further server options by SGLang's names, below the user's in priority.
            keeps_cache: clients leave its prefix cache as it is when new weights come.
            key: letters and digits that every request has to carry, but for one about its health; None makes one up.

        Raises:
            ValueError: an option is not one of SGLang's, or has no meaning on this device.
        """
        if problems := settings.problems():
            raise ValueError("\n".join(problems))
        if gpu_ids and len(gpu_ids) != tp_size:
            raise ValueError(f"{name}: {tp_size} GPUs an engine, but {len(gpu_ids)} given: {list(gpu_ids)}")
        self.name, self.host, self.log_path = name, host, Path(log_path)
        self._keeps_cache = keeps_cache
        self._device, self._wanted_port, self._gpu_ids = device, port, [str(g) for g in gpu_ids]
        self.key = key or secrets.token_urlsafe(32)
        """Known to whoever asks this object, and in no command line, log or file."""
        self._port: int | None = None
        self._pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        if device == "cpu":
            from relax_rollout.engines.sglang import cpu

            cpu.check(tp_size=tp_size, enable_memory_saver=enable_memory_saver)
            defaults = dict(cpu.OPTIONS)
        else:
            from relax_rollout.engines.sglang import gpu

            defaults = gpu.options()
        owned = {
            "model-path": str(model_path),
            "host": host,
            "dtype": dtype,
            "tp-size": tp_size,
            "random-seed": seed,
            "enable-memory-saver": enable_memory_saver,
            "weight-version": str(weight_version),
            "mem-fraction-static": settings.sglang_mem_fraction_static,
            # Chunks of a stream then hold new tokens only, so that a long response costs linear time.
            "incremental-streaming-output": True,
            # The first rollout does that; SGLang's own would be a request without the key.
            "skip-server-warmup": True,
        }
        general = {
            "context-length": context_length,
            # A line a request would bury what matters.
            "log-level-http": "warning",
        }
        self._options = arguments.merge(defaults, general, extra or {}, settings.sglang_extra, owned)

    # ------------------------------------------------------------------ what it is

    @property
    def url(self) -> str:
        """``http://host:port`` once :meth:`launch` was called."""
        if self._port is None:
            raise RuntimeError(f"{self.name} was not started: call start() first")
        return f"http://{self.host}:{self._port}"

    @property
    def address(self) -> EngineAddress:
        """All that a client needs, in this process or in another one; after :meth:`launch`."""
        return EngineAddress(self.name, self.url, str(self.log_path), self.key, self._keeps_cache)

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        if self._pid is None:
            raise RuntimeError(f"{self.name} was not started: call start() first")
        return self._pid

    def command(self) -> list[str]:
        """The server's command line."""
        return [
            sys.executable,
            "-m",
            "relax_rollout.engines.sglang.process.launch",
            *arguments.to_argv({**self._options, "port": self._port}),
        ]

    def poll(self) -> int | None:
        """Exit code once the server has ended, else None."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started: call start() first")
        return self._process.poll()

    def alive(self) -> bool:
        """True while the server's process runs."""
        return self._process is not None and self._process.poll() is None

    # ------------------------------------------------------------------ start

    def start(
        self,
        progress: Callable[[str], None] | None = None,
        *,
        deadline_s: float = 1800.0,
        every_s: float = 5.0,
    ) -> None:
        """Starts the server and waits until it answers.

        Args:
            progress: called about every ``every_s`` seconds with the seconds waited and the log's last line.
            deadline_s: how long a start may take; loading a large model takes minutes.

        Raises:
            ValueError: the given port is in use.
            EngineDied: the server ended; the message holds the last lines of its log.
            TimeoutError: it was not healthy in time; it is stopped then.
        """
        for attempt in range(_PORT_ATTEMPTS):
            self.launch()
            try:
                self.wait_healthy(progress, deadline_s=deadline_s, every_s=every_s)
                return
            except EngineDied as error:
                self.stop()
                taken = "address already in use" in str(error).lower()
                if self._wanted_port is not None or not taken or attempt + 1 == _PORT_ATTEMPTS:
                    raise
            except BaseException:
                self.stop()
                raise

    def launch(self) -> None:
        """Starts the process and returns; :meth:`wait_healthy` waits for it.

        Raises:
            ValueError: the given port is in use.
            EngineDied: the process could not be started.
        """
        if self.alive():
            raise RuntimeError(f"{self.name} runs already")
        self._port = self._wanted_port if self._wanted_port is not None else _free_port(self.host)
        if self._wanted_port is not None and not _is_free(self.host, self._wanted_port):
            raise ValueError(
                f"{self.name}: port {self._wanted_port} on {self.host} is already in use; "
                "give another port, or none to let a free one be picked"
            )
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            # -I and -S: the supervisor is standard library only and must not load what the server's path holds.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), *self.command()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )
        self._send_key(self._process.stdin)
        self._pid = self._read_pid(self._process.stdout)

    def _send_key(self, stream: IO[bytes] | None) -> None:
        assert stream is not None, "the supervisor was started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has ended, which whoever reads from it finds out
            stream.write(self.key.encode() + b"\n")
            stream.flush()

    def _read_pid(self, stream: IO[bytes] | None) -> int:
        assert stream is not None, "the supervisor was started with a pipe"
        line = stream.readline().split()
        if len(line) != 2 or line[0] != b"pid":
            self.stop()
            raise EngineDied(f"{self.name} could not be started. {last_words(self.log_path)}")
        return int(line[1])

    def wait_healthy(
        self,
        progress: Callable[[str], None] | None = None,
        *,
        deadline_s: float = 1800.0,
        every_s: float = 5.0,
    ) -> None:
        """Waits until the server generates; see :meth:`start` for arguments and errors (it is not stopped here)."""
        begin = told = time.monotonic()
        headers, timeout = bearer(self.key), httpx.Timeout(30.0, connect=2.0)
        with httpx.Client(trust_env=False, timeout=timeout, headers=headers) as http:
            while True:
                code = self.poll()
                waited = time.monotonic() - begin
                if code is not None:
                    raise EngineDied(
                        f"{self.name} ended with exit code {code} after {waited:.0f} s while starting. "
                        f"{last_words(self.log_path)}"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(self.url + "/health").status_code == 200:
                        # Every flush collects garbage; without the objects of the start it takes 10 ms, not a second.
                        http.post(self.url + "/freeze_gc")
                        return
                if waited > deadline_s:
                    raise TimeoutError(f"{self.name} was not healthy after {waited:.0f} s. {last_words(self.log_path)}")
                if progress is not None and time.monotonic() - told >= every_s:
                    told = time.monotonic()
                    line = (last_lines(self.log_path, 1) or ["no output yet"])[0]
                    progress(f"{waited:.0f} s: {line[:160]}")
                time.sleep(0.25)

    def environment(self) -> dict[str, str]:
        """The environment variables of the server's process."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        interface = interface_of(self.host)
        if interface is not None:
            # Its process groups listen where it does; otherwise at the address of the host's name.
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            if interface.startswith("lo"):  # between nodes NCCL knows better
                environment.setdefault("NCCL_SOCKET_IFNAME", interface)
        if self._device == "cpu":
            from relax_rollout.engines.sglang import cpu

            return cpu.environment(environment)
        if self._gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpu_ids)
        return environment

    # ------------------------------------------------------------------ end

    def stop(self) -> None:
        """Ends the server and everything below it. May be called twice, from any thread.

        Raises:
            RuntimeError: processes are still there after the deadline; the message names the supervisor's pid.
        """
        with self._lock:
            process = self._process
            if process is None:
                return
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    # A supervisor that was stopped (SIGSTOP) with the rest could not end anything.
                    os.killpg(process.pid, signal.SIGCONT)
            try:
                process.wait(timeout=_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"{self.name} did not end within {_STOP_DEADLINE_S:.0f} s; see processes below {process.pid}"
                ) from None
            finally:
                if process.stdout is not None:
                    process.stdout.close()

    def __enter__(self) -> "SGLangServer":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a port whose last connections are still closing down counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _free_port(host: str) -> int:
    for port in random.SystemRandom().sample(_PORTS, 200):
        if _is_free(host, port):
            return port
    raise ValueError(
        f"no free port found between {_PORTS.start} and {_PORTS.stop} on {host}; is {host} an address of this machine?"
    )

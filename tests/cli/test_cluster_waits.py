"""Waits of the driver: they end at a deadline, at a failure and at a stop; and signals stay ours."""

import re
import signal
import socket
import threading
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from relax_cli.cluster import ray_cluster, waits
from relax_cli.cluster.ray_cluster import connected
from relax_cli.cluster.waits import Heartbeat, StopFlag, StopRequested
from relax_cli.run.launch import explanation

wait_for: Any = waits.wait_for
"""References of the Ray of this file are functions, which no type says."""


class Clock:
    """What the waits take for the time; it moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setitem(wait_for.__globals__, "time", clock)
    return clock


def test_the_first_signal_counts_and_its_time_too(clock: Clock) -> None:
    stop = StopFlag(grace_s=0.0)
    assert not stop.requested
    assert not stop.expired
    assert stop.left(8.0) == 8.0
    stop.set(signal.SIGINT)
    stop.set(signal.SIGTERM)
    assert stop.signal_number == signal.SIGINT
    clock.now += 5.0
    assert stop.expired
    assert stop.left(8.0) == 3.0, "five of eight seconds are gone"
    clock.now += 100.0
    assert stop.left(8.0) == 1.0
    assert stop.left(0.5) == 0.5


def test_a_stop_within_its_grace_has_not_expired(clock: Clock) -> None:
    stop = StopFlag(grace_s=10.0, stepping=True)
    stop.set(signal.SIGTERM)
    clock.now += 10.0
    assert stop.requested
    assert not stop.expired
    stop.stepping = False
    assert stop.expired, "a start is given up at once"


class Ray:
    """The two calls that a wait makes; references are functions that return, raise or (None) are not done yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self._clock = clock
        monkeypatch.setattr("ray.wait", self._wait)
        monkeypatch.setattr("ray.get", lambda ref: ref())

    def _wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        pending = [r for r in refs if not callable(r)]
        self._clock.now += timeout if pending else 0.0
        return [r for r in refs if callable(r)], pending


@pytest.fixture
def _ray(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    Ray(monkeypatch, clock)


@pytest.mark.usefixtures("_ray")
def test_values_come_in_the_order_of_the_references() -> None:
    assert wait_for([lambda: 1, lambda: 2], "numbers", deadline_s=1) == [1, 2]
    assert wait_for(lambda: 3, "a number", deadline_s=1) == 3


@pytest.mark.usefixtures("_ray")
def test_one_failure_is_raised_while_others_still_run() -> None:

    def fail() -> None:
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        wait_for([None, fail], "the ranks", deadline_s=1000)


@pytest.mark.usefixtures("_ray")
def test_a_process_that_died_is_told_with_what_it_was_needed_for() -> None:

    def die() -> None:
        raise ActorDiedError

    with pytest.raises(ActorDiedError) as died:
        wait_for([die], "training step 3", deadline_s=1000)
    assert explanation(died.value).splitlines()[-1] == "The run was waiting for training step 3."


@pytest.mark.usefixtures("_ray")
def test_a_wait_that_is_too_long_says_what_it_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TimeoutError, match="waited 100 s for training step 3: giving up"):
        wait_for(None, "training step 3", deadline_s=100.0, remind_s=40.0, status=lambda: "rank 1 is computing")
    assert [record.getMessage() for record in caplog.records] == [
        f"still waiting for training step 3 ({seconds} s): rank 1 is computing" for seconds in (40, 80)
    ]


@pytest.mark.usefixtures("_ray")
def test_a_stop_ends_a_wait_only_when_its_grace_is_over() -> None:
    stop = StopFlag(grace_s=6.0, stepping=True)
    stop.set(signal.SIGINT)
    with pytest.raises(StopRequested, match="rollout 7"):
        wait_for(None, "rollout 7", stop=stop, deadline_s=1000)
    patient = StopFlag(grace_s=1000, stepping=True)
    patient.set(signal.SIGINT)
    assert wait_for(lambda: "done", "rollout 7", stop=patient, deadline_s=1000) == "done"


def test_ray_does_not_keep_our_sigterm_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ray.init`` puts a handler of its own in its place, which would end the run without finishing the step."""
    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr("ray.init", lambda **options: signal.signal(signal.SIGTERM, lambda n, f: None))
    ended: list[bool] = []
    monkeypatch.setattr("ray.shutdown", lambda: ended.append(True))

    def ours(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with connected(None, min_cpus=1):
            assert signal.getsignal(signal.SIGTERM) is ours
        assert ended == [True]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_ends_the_start(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """``ray.init`` waits for minutes when the same signal has ended the processes it has just started."""
    told: list[int] = []
    monkeypatch.setattr("ray.init", lambda **options: signal.raise_signal(number))
    monkeypatch.setattr("ray.shutdown", lambda: told.append(0))
    before = signal.signal(number, lambda n, frame: told.append(n))
    try:
        with pytest.raises(SystemExit) as end, connected(None, min_cpus=1):
            raise AssertionError("not reached")
        assert end.value.code == number
        signal.raise_signal(number)
        assert told == [number, 0, number], "the caller's handler, the end of Ray, the caller's handler again"
    finally:
        signal.signal(number, before)


def test_a_cluster_that_does_not_answer_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # left as it is when it is set
    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # something else
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        message = rf"--ray-address {re.escape(address)}: no Ray cluster answers there \(nobody there\)"
        with pytest.raises(ValueError, match=message), connected(address, min_cpus=1):
            raise AssertionError("not reached")


@pytest.mark.parametrize("port", ["free", "99999"])
def test_an_address_where_nothing_listens_is_not_given_to_ray(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    """Ray would wait for minutes there, and no signal would end that."""
    given: list[Any] = []
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_cluster, "KNOCK_S", 1.5)
    monkeypatch.setattr("ray.init", lambda **options: given.append(options["address"]))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1] if port == 'free' else port}"
        message = f"--ray-address {re.escape(address)}: no Ray cluster answers there"
        with pytest.raises(ValueError, match=message), connected(address, min_cpus=1):
            raise AssertionError("not reached")
    assert given == []


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:1"])
def test_addresses_without_host_and_port_are_left_to_ray(address: str) -> None:
    ray_cluster._knock(address)


def test_without_an_address_no_other_cluster_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own default joins whatever RAY_ADDRESS names, or a cluster that once ran on this machine."""
    given: list[Any] = []
    monkeypatch.setattr("ray.init", lambda **options: given.append(options.get("address")))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with connected(None, min_cpus=1):
        pass
    assert given == ["local"]


class Start:
    """A start on a clock of its own: what the user was told, and when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[tuple[float, str]] = []
        self.heartbeat = Heartbeat(lambda line: self.told.append((self.now, line)), clock=lambda: self.now)

    def wait(self, seconds: float, what: str) -> None:
        """As the loops do: a look every quarter of a second."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.heartbeat.waiting(what, lambda: "loading")


def test_no_start_is_silent_for_ten_seconds_however_its_waits_follow_each_other() -> None:
    start = Start()
    start.heartbeat.note("starting")
    for seconds, what in ((7.0, "room"), (7.0, "an address"), (30.0, "engines"), (2.0, "prompts"), (9.0, "a model")):
        start.wait(seconds, what)
    times = [when for when, _ in start.told]
    gaps = [b - a for a, b in zip(times, [*times[1:], start.now], strict=True)]
    assert max(gaps) < 10, start.told
    assert min(gaps[:-1]) >= 5, "and it does not chatter"
    assert start.told[1][1] == "waiting for an address: loading"


def test_what_a_start_says_of_its_own_accord_ends_the_silence() -> None:
    start = Start()
    start.wait(7.0, "engines")
    start.heartbeat.note("engines healthy")
    start.wait(7.0, "a model")
    assert [line for _, line in start.told] == ["engines healthy"]


def test_a_wait_of_a_start_beats_instead_of_writing_to_the_log(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    Ray(monkeypatch, clock)
    told: list[str] = []
    heartbeat = Heartbeat(told.append, clock=lambda: clock.now)
    with pytest.raises(TimeoutError):
        wait_for(None, "the model", deadline_s=20.0, remind_s=1.0, heartbeat=heartbeat)
    assert told == ["waiting for the model", "waiting for the model"]
    assert not caplog.text

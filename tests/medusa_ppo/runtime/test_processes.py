"""Signals: one stop, and a clean-up that nothing cuts short."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from heads.errors import RunError
from medusa_ppo.runtime import processes as runtime
from medusa_ppo.runtime.processes import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_once_and_the_cleanup_goes_on(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
):
    before = signal.getsignal(number)
    cleaned = False
    with StopSignals():
        with pytest.raises(KeyboardInterrupt):
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)
                cleaned = True
        assert cleaned and "Already stopping" in caplog.text
    assert signal.getsignal(number) is before


def test_a_signal_that_other_code_caught_still_stops(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(runtime.time, "monotonic", lambda: now[0])
    with StopSignals() as signals:
        signals.stop_if_told()
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signals.stop_if_told()
        # Whoever has not caught it may be on the way out.
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += runtime.SWALLOWED_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.ignore()
        now[0] += runtime.SWALLOWED_S
        os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_put_back_even_if_a_library_replaced_them():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        signal.signal(signal.SIGTERM, lambda *_: None)  # what Ray does
        signals.install()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_of_the_main_thread_it_does_nothing():
    errors = []

    def run():
        try:
            with StopSignals():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors


def test_the_object_store_has_room_but_not_more_than_a_quarter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        runtime.psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * 10**9)
    )
    assert runtime._object_store_bytes(10**9) == 5 * 10**8
    monkeypatch.setattr(runtime.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    assert runtime._object_store_bytes(10**9) == 10**9 + 128 * runtime.MIB


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_calls_stay_in_the_dashboard_of_a_cluster_that_a_run_joins(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    import ray

    name = "RAY_task_events_report_interval_ms"
    monkeypatch.setenv(name, "")  # So that it is put back whatever the block sets.
    monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with runtime.local_ray():
        assert (name in os.environ) == (not address)


@pytest.mark.parametrize(("failures", "starts"), [(1, True), (2, True), (3, False)])
def test_ray_gets_more_than_one_chance_to_start(
    failures: int, starts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import ray

    calls = []

    def init(**arguments: object) -> None:
        calls.append(arguments)
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if starts:
        runtime._start(tmp_path, 2, 1)
    else:
        with pytest.raises(RunError, match="Ray did not start"):
            runtime._start(tmp_path, 2, 1)
    assert len(calls) == min(failures + 1, 3) and calls[0] == calls[-1]


HOST_AND_STRANGERS = """
import os, subprocess, sys
import psutil, ray
from medusa_ppo.runtime.processes import local_ray

join = (
    "import sys, ray;"
    "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='CRITICAL')"
)
without_token = {
    name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")
}
# Else Ray looks for itself at the machine's own address.
on_loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
with local_ray():
    for environment in (os.environ, without_token):
        command = [sys.executable, "-c", join, ray.get_runtime_context().gcs_address]
        joined = subprocess.run(
            command, env={**environment, **on_loopback}, stderr=subprocess.DEVNULL, timeout=120
        )
        print(joined.returncode)
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for process in everyone for socket in process.net_connections("tcp")]
    listening = [socket.laddr for socket in sockets if socket.status == psutil.CONN_LISTEN]
    loopback = ("127.", "::1")
    outside = [
        where for where in listening
        if not where.ip.removeprefix("::ffff:").startswith(loopback)
    ]
    print(len(listening) > 3, outside)
"""


def test_a_local_ray_lets_in_only_who_is_on_this_machine_and_has_its_token():
    """Another user of the network or of the machine must not run code in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, "-c", HOST_AND_STRANGERS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["0", "1", "True", "[]"], ran.stdout + ran.stderr[-1000:]


AFTER_A_SIGNAL = """
import ray
from medusa_ppo.runtime.processes import StopSignals, local_ray

with StopSignals() as signals, local_ray():
    signals.install()
    answer = ray.remote(lambda: "still there")
    ray.get(answer.remote())
    try:
        print("ready", flush=True)
        input()
    except KeyboardInterrupt:
        signals.ignore()
        print(ray.get(answer.remote(), timeout=60))
"""


def test_a_signal_to_the_whole_group_leaves_ray_until_the_clean_up_is_done():
    """As `timeout` and Slurm send it."""
    with subprocess.Popen(
        [sys.executable, "-c", AFTER_A_SIGNAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        servers = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.read() == "still there\n"
    assert process.returncode == 0
    assert servers and not any(
        server.is_running() and server.status() != psutil.STATUS_ZOMBIE for server in servers
    )


def test_one_line_is_left_out_of_stderr_and_the_others_come(capfd: pytest.CaptureFixture[str]):
    with runtime.without_line("known words"), pytest.raises(ValueError):
        os.write(2, b"before\na line with known words in it\n")
        os.write(2, b"after\n")
        raise ValueError
    os.write(2, b"known words\n")
    assert capfd.readouterr().err == "before\nafter\nknown words\n"


class Full:
    """A Ray without room: a stand-in for the group that waits for it, and its clock."""

    def __init__(self, interrupted_after: int | None = None) -> None:
        self.waits = list[float]()
        self.removed = list[object]()
        self.now = 1000.0
        self._interrupted_after = interrupted_after

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        if len(self.waits) == self._interrupted_after:
            raise KeyboardInterrupt
        return False


def put_in_place_of_ray(full: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "placement_group", lambda bundles, strategy: full)
    monkeypatch.setattr(runtime, "remove_placement_group", full.removed.append)
    monkeypatch.setattr(runtime, "_free", lambda: "nothing")
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: full.now))


def test_a_signal_is_heard_while_a_run_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hears none in Ray's call."""
    full = Full()
    put_in_place_of_ray(full, monkeypatch)
    with pytest.raises(RunError, match="within 600 s"):
        runtime.reserve([runtime.bundle(1.0, None)], "engine", timeout_s=600.0)
    assert max(full.waits) <= 2.0 and sum(full.waits) == pytest.approx(600.0)
    assert full.removed == [full]


def test_an_interrupt_takes_the_request_for_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that others use would find the room later, and keep it for nobody."""
    full = Full(interrupted_after=3)
    put_in_place_of_ray(full, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        runtime.reserve([runtime.bundle(1.0, None)], "engine", timeout_s=600.0)
    assert full.removed == [full] and len(full.waits) == 3

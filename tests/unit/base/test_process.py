"""How a process begins and ends."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from monarch.actor import ActorError

from goaly.base.process import FATAL, FATAL_EXIT_CODE, give_up
from goaly.plan.placement import IMPORTS
from goaly.run.process_watch import fatal_reason


def test_leaving_runs_exit_handlers_keeps_the_output_and_the_code_and_waits_for_nothing_else() -> None:
    script = (
        "import atexit, threading\n"
        "from goaly.base.process import exit_quickly\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "atexit.register(print, 'handled')\n"
        "print('said', end=' ')\n"
        "exit_quickly(3)\n"
    )
    left = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=20, check=False)
    assert (left.returncode, left.stdout) == (3, "said handled\n")


def test_what_is_imported_ahead_is_never_looked_at_by_the_collector_and_what_is_missing_is_left_out() -> None:
    script = (
        "import gc, sys\n"
        "from goaly.base.process import import_ahead\n"
        "before = gc.get_freeze_count()\n"
        "import_ahead(['goaly.no_such_module', 'fractions'])\n"
        "assert 'fractions' in sys.modules and gc.isenabled() and gc.get_freeze_count() > before\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=20, check=True)


def test_the_exit_of_a_process_calls_the_finalizers_of_its_own_but_leaves_torch_its_operators() -> None:
    script = (
        "import tempfile, weakref\n"
        "from goaly.base.process import exit_quickly, import_ahead\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "import_ahead(['torchtitan.models.common.attention'])\n"
        "of_torch = [one for one in weakref.finalize._registry if one.peek()[1].__module__ == 'torch.library']\n"
        "assert of_torch and not any(one.atexit for one in of_torch)\n"
        "print(folder.name)\n"
        "exit_quickly(0)\n"
    )
    left = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert not Path(left.stdout.strip()).exists()


WITHOUT_COMPILER = {"controller": ("goaly.run.start",), "hub": IMPORTS["hub"], "rollout": IMPORTS["rollout"]}


@pytest.fixture(scope="module")
def imported() -> str:
    """A line for each of these processes that imported its modules and did not load the compiler."""
    script = f"""
import multiprocessing, sys, torch
from goaly.base.process import import_ahead
def imports(process, modules):
    import_ahead(modules)
    assert 'tensordict' in sys.modules and 'torch._dynamo' not in sys.modules
    marked = torch.compiler.disable(lambda: 1)
    assert marked() == 1 and 'torch._dynamo' in sys.modules, 'the compiler is as it was'
    print(process, 'is without it', flush=True)
for arguments in {WITHOUT_COMPILER}.items():  # each has the torch of this process, and nothing of the others
    child = multiprocessing.get_context('fork').Process(target=imports, args=arguments)
    child.start()
    child.join()
"""
    return subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60).stdout


@pytest.mark.parametrize("process", WITHOUT_COMPILER)
def test_controller_hub_and_rollout_workers_do_not_load_the_compiler(imported: str, process: str) -> None:
    assert f"{process} is without it" in imported.splitlines()


def test_a_controller_places_its_run_without_the_compiler(tiny_model_folder: Path) -> None:
    script = (
        "import sys, goaly.run.start\n"
        "from goaly.base.config import load\n"
        "from goaly.plan.dry_run import placed\n"
        "from goaly.plan.cluster import one_host, this_machine\n"
        "from goaly.plan.run_config import RunConfig\n"
        f"settings = ['--config=configs/grpo/tiny.yaml', 'model.path={tiny_model_folder}', 'hosts.bind={{}}']\n"
        "config = load(RunConfig, settings, prog='', description='').config\n"
        "assert placed(config, one_host(this_machine())).keys() >= {'trainer', 'hub'}\n"
        "assert 'torch._dynamo' not in sys.modules and 'torchtitan' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_stop_signals_end_what_a_process_of_a_run_starts_but_not_itself() -> None:  # base-2
    script = """
import subprocess, threading
from goaly.base.process import outlive_stop_signals
thread = threading.Thread(target=outlive_stop_signals)  # actors run in threads
thread.start()
thread.join()
print(flush=True)
input()
sleeper = subprocess.Popen(["sleep", "60"])
sleeper.terminate()
print(sleeper.wait(10))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        output, _ = process.communicate("\n", timeout=20)
    assert (process.returncode, output) == (0, f"{-signal.SIGTERM}\n")


ENDS = {
    "a call": "process.give_up('the link broke', OSError('reset'))",
    "a thread": "threading.Thread(target=int, args=('x',), name='engine').start(); threading.Event().wait()",
    "a task": "asyncio.run(waits_for_a_vital_task())",
    "a callback": "asyncio.run(waits_for_a_callback())",
}


@pytest.mark.parametrize("how", ENDS)
def test_what_cannot_continue_ends_its_process_at_once_and_says_why(how: str) -> None:  # base-1
    script = f"""
import asyncio, atexit, logging, threading
from goaly.base import process
from goaly.base.process import SilenceWatch
logging.basicConfig()
atexit.register(print, 'exit handlers may wait for what is broken')
process.give_up_when_a_thread_fails()
process.give_up_when_a_callback_fails()
async def waits_for_a_callback():
    asyncio.get_running_loop().call_soon(int, "only logged: not goaly's")
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    SilenceWatch("not a function", seconds=0.01, tick_seconds=0.01)
    await asyncio.Event().wait()
async def broken():
    raise OSError('reset')
async def waits_for_a_vital_task():
    process.vital_task(broken(), 'follower')
    await asyncio.Event().wait()
{ENDS[how]}
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout) == (FATAL_EXIT_CODE, "")
    why = {"a call": "the link broke: OSError", "a thread": "thread engine", "a task": "task follower"}.get(
        how, "callback SilenceWatch._tick failed: TypeError"
    )
    assert f"{FATAL}{why}" in ended.stderr


def test_the_reason_is_the_error_that_started_it_on_one_line_however_many_actor_calls_it_came_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    error: Exception = RuntimeError("the store\n  is full")
    for _ in range(3):
        error = pickle.loads(pickle.dumps(ActorError(error)))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        give_up("task weight follower failed", error)
    log = tmp_path / "log"
    log.write_text(caplog.text)
    assert fatal_reason(log) == "task weight follower failed: RuntimeError: the store is full"
    assert "ActorError: A remote actor call has failed." in caplog.text  # the whole of it, below the reason


def test_a_vital_task_that_ends_or_is_cancelled_leaves_its_process_alone() -> None:
    script = """
import asyncio
from goaly.base.process import vital_task
async def main():
    await vital_task(asyncio.sleep(0), 'ends')
    cancelled = vital_task(asyncio.Event().wait(), 'cancelled')
    cancelled.cancel()
    await asyncio.wait([cancelled])
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], timeout=20, check=True)

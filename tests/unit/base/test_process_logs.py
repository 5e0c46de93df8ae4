"""Logs: a child says nothing on the terminal, the controller only what a person must see."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from goaly.base.telemetry import process_logs


def test_a_quiet_process_writes_everything_to_its_file_and_nothing_to_its_parent(tmp_path: Path):
    script = (
        "import ctypes, logging, os, subprocess, sys, warnings\n"
        "from goaly.base.telemetry.process_logs import quiet\n"
        "quiet(sys.argv[1])\n"
        "sys.stdout.write('python out\\n')\n"
        "sys.stderr.write('python err\\n')\n"
        "os.write(1, b'descriptor out\\n')\n"
        "subprocess.run(['sh', '-c', 'echo grandchild'])\n"
        "logging.getLogger('goaly.x').info('record %d', 1)\n"
        "warnings.warn('careful')\n"
        "ctypes.string_at(0)\n"
    )
    log_file = tmp_path / "logs" / "generator-0.log"
    done = subprocess.run([sys.executable, "-c", script, str(log_file)], capture_output=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == (b"", b"")
    text = log_file.read_text()
    for piece in ("python out", "python err", "descriptor out", "grandchild", "INFO goaly.x: record 1", "careful"):
        assert piece in text
    assert "Segmentation fault" in text  # an engine's crash leaves its stack


def test_a_quiet_process_appends_to_the_log_of_its_predecessor(tmp_path: Path):
    log_file = tmp_path / "worker.log"
    quiet = "import sys; from goaly.base.telemetry.process_logs import quiet; quiet(sys.argv[1])"
    script = f"{quiet}; sys.stdout.write('life\\n')"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script, str(log_file)], timeout=30, check=True)
    assert log_file.read_text() == "life\nlife\n"


def test_the_controller_shows_our_warnings_and_all_errors_and_files_everything(tmp_path: Path, capfd):
    with process_logs.controller(tmp_path / "logs" / "controller.log"):
        logging.getLogger("goaly.run").info("quiet fact")
        logging.getLogger("goaly.run").warning("replica %s lost", "[bold]generator-0")
        logging.getLogger("some.library").warning("not for people")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("nor this", UserWarning, stacklevel=1)
        try:
            raise ValueError("bad shard")
        except ValueError:
            logging.getLogger("asyncio").exception("task failed")
    shown = capfd.readouterr().err
    assert shown == "warning: replica [bold]generator-0 lost\nerror: task failed (ValueError: bad shard)\n"
    text = (tmp_path / "logs" / "controller.log").read_text()
    for piece in ("quiet fact", "lost", "not for people", "nor this", "Traceback", "bad shard"):
        assert piece in text


def test_the_controller_leaves_logging_as_it_was(tmp_path: Path):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with pytest.raises(RuntimeError), process_logs.controller(tmp_path / "controller.log"):
        raise RuntimeError
    assert (root.handlers, root.level) == before


def test_a_full_disk_is_reported_once_and_not_by_a_traceback_for_each_record(capfd):
    with process_logs.controller("/dev/full"):
        for number in range(3):
            logging.getLogger("goaly.run").info("fact %d", number)
    assert capfd.readouterr().err == (
        "warning: /dev/full cannot be written, records are lost: [Errno 28] No space left on device\n"
    )

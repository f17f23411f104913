import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext.checkpoints.folder import resume_point
from verl_ext.checkpoints.manifest import vouch
from verl_ext.quickstart import disk

REPO = Path(__file__).resolve().parents[3]

# A command as a stage runs it: its output goes into a log in its folder.
STAGE = """
import sys
from pathlib import Path
from verl_ext.quickstart import supervise
supervise.POLL_S = 0.02
out = Path(sys.argv[1])
try:
    with supervise.Supervisor() as supervisor:
        supervisor.run([sys.executable, "-c", sys.argv[2]], log=out / "rl" / "log.txt")
except supervise.CommandFailed as error:
    print(type(error).__name__, error, sep="\\n")
"""


def stage(folder: Path, code: str, *before: str) -> str:
    """The failure of a command that runs `code`; `before` stands before it on the command line."""
    command = [*before, sys.executable, "-c", STAGE, str(folder), code]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_command_that_met_a_full_disk_is_named_with_the_folder_and_what_frees_space(tmp_path):
    """/dev/full fails every write as a full disk does."""
    failure = stage(tmp_path, "open('/dev/full', 'w').write('x' * 100000)")
    assert failure.startswith("DiskFull\n")
    assert "No space left on device" in failure
    last = failure.splitlines()[-1]
    assert last.startswith("The disk is full: ") and " are free" in last and "`du -xh --max-depth=2 /" in last


def test_the_folder_of_the_file_that_did_not_fit_is_taken_from_the_message(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    code = f"raise OSError(28, 'No space left on device', '{tmp_path}/elsewhere/new/model.pt')"
    assert f"The disk is full: {tmp_path}/elsewhere (on /" in stage(tmp_path / "out", code)


@pytest.mark.parametrize(
    "line",
    [
        "OSError: [Errno 28] No space left on device",
        "safetensors_rust.SafetensorError: I/O error: No space left on device (os error 28)",
        "OSError: [Errno 122] Disk quota exceeded",
        "write failed: ENOSPC",
    ],
)
def test_all_spellings_of_a_full_disk_are_known(tmp_path, line):
    assert disk.full_folder([tmp_path], f"Traceback\n{line}\n") == tmp_path
    assert disk.full_folder([tmp_path], "AssertionError: Errno 280 of layer 28") is None


def test_another_failure_says_nothing_of_the_disk_and_an_older_one_does_not_count(tmp_path):
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "log.txt").write_text("OSError: [Errno 28] No space left on device\n")  # of an earlier attempt
    failure = stage(tmp_path, "raise ValueError('lr')")
    assert failure.startswith("CommandFailed\n") and "disk is full" not in failure.lower()


def test_an_interrupted_checkpoint_is_offered_for_deletion_with_its_size(tmp_path):
    (tmp_path / ".saving").mkdir()
    (tmp_path / ".saving" / "model.pt").write_bytes(bytes(2_000_000))
    assert f"`rm -r {tmp_path}/.saving` frees 2.0 MB of an interrupted checkpoint." in disk.describe(tmp_path)


@pytest.mark.parametrize("place", ["global_step_20", "replaced/global_step_20"])
def test_a_whole_checkpoint_that_a_kill_left_in_saving_is_not_offered_for_deletion(tmp_path, place):
    """It may be the only one: a kill between the two renames of a step that is saved again."""
    checkpoint = tmp_path / ".saving" / place
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.pt").write_bytes(bytes(1000))
    vouch(checkpoint)
    assert resume_point(tmp_path) == checkpoint
    assert "rm -r" not in disk.describe(tmp_path)


def can_mount() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this machine lets nobody mount a file system in a namespace")
def test_a_disk_so_full_that_the_log_could_not_be_written_is_found_by_its_free_space(tmp_path):
    """The log, on the same disk, has lost the message: only the free space reveals it."""
    out = tmp_path / "out"
    out.mkdir()
    fill = (
        "import os, sys\n"
        f"file = open('{out}/rl/shard.pt', 'wb', buffering=0)\n"
        "try:\n"
        "    while True: file.write(bytes(2**16))\n"
        "except OSError:\n"
        "    sys.exit(3)"
    )
    mount = f'mount -t tmpfs -o size=8m none {out} && exec "$@"'
    failure = stage(out, fill, "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    assert failure.startswith("DiskFull\n") and "No space left" not in failure
    assert f"The disk is full: {out}/rl (on {out}), 0.0 MB of 8.4 MB are free." in failure


def test_proc_is_not_a_disk_and_a_folder_with_space_is_not_full(tmp_path):
    assert not disk.is_full(Path("/proc")) and not disk.is_full(tmp_path / "not" / "there" / "yet")
    assert os.statvfs("/proc").f_blocks == 0

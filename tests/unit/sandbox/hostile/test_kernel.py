"""System calls that programs have no use for are denied; they have no capability; the server names its layers."""

import pytest

from tests.unit.sandbox.hostile.attacks import ALL_LAYERS, PROC, SECCOMP, HostileServer, need

# --- the kernel


BAD = -1  # a pointer that no call accepts


@pytest.mark.parametrize(
    ("name", "number", "arguments"),
    [
        ("mount", 165, (BAD, BAD, BAD, 0, 0)),
        ("umount2", 166, (BAD, 0)),
        ("unshare user", 272, (0x10000000,)),
        ("unshare mount", 272, (0x00020000,)),
        ("setns", 308, (0, 0)),
        ("pivot_root", 155, (BAD, BAD)),
        ("fsopen", 430, (BAD, 0)),
        ("open_tree", 428, (-100, BAD, 0)),
        ("move_mount", 429, (-100, BAD, -100, BAD, 0)),
        ("mount_setattr", 442, (-100, BAD, 0, 0, 0)),
        ("open_by_handle_at", 304, (-100, BAD, 0)),
        ("name_to_handle_at", 303, (-100, BAD, BAD, BAD, 0)),
        ("bpf", 321, (0, BAD, 0)),
        ("perf_event_open", 298, (BAD, 0, -1, -1, 0)),
        ("io_uring_setup", 425, (1, BAD)),
        ("io_setup", 206, (1, BAD)),
        ("userfaultfd", 323, (1,)),
        ("keyctl", 250, (0, -3, 0, 0, 0)),
        ("add_key", 248, (BAD, BAD, BAD, 0, 0)),
        ("init_module", 175, (BAD, 1, BAD)),
        ("finit_module", 313, (-1, BAD, 0)),
        ("reboot", 169, (0, 0, 0, 0)),
        ("syslog", 103, (10, 0, 0)),
        ("settimeofday", 164, (BAD, BAD)),
        ("sethostname", 170, (BAD, 1)),
        ("personality", 135, (0xFFFFFFFF,)),
        ("fanotify_init", 300, (-1, 0)),
        ("memfd_create", 319, (BAD, 0)),
        ("memfd_secret", 447, (0,)),
        ("shmget", 29, (0, 4096, 0o1600)),
        ("semget", 64, (0, 1, 0o1600)),
        ("msgget", 68, (0, 0o1600)),
        ("mq_open", 240, (BAD, 0, 0, 0)),
        ("modify_ldt", 154, (0, BAD, 0)),
        ("process_madvise", 440, (-1, 0, 0, 0, 0)),
    ],
)
def test_system_call_is_denied(server, name, number, arguments):
    need(server, SECCOMP)
    assert server.result(f"call_denied({number}, *{arguments})")["stdout"] == "held\n"


def test_system_call_newer_than_the_list_is_missing(server):
    need(server, SECCOMP)
    assert server.result("print(syscall(467, -100, -1, 0, 0, 0))")["stdout"] == "ENOSYS\n"  # open_tree_attr


def test_call_of_the_32_bit_kind_kills(server):
    need(server, SECCOMP)
    code = """
import mmap
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, 20 (getpid); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
    assert server.result(code)["return_code"] == -31  # SIGSYS


@pytest.mark.parametrize("what", ["CapInh", "CapPrm", "CapEff", "CapAmb"])
def test_program_has_no_capability(server, what):
    need(server, PROC)
    assert server.result(f"print(*[l for l in open('/proc/self/status') if '{what}' in l])")["stdout"].split() == [
        f"{what}:",
        "0" * 16,
    ]


# --- starting


def test_layers_are_printed(server):
    """On the second line, in the words of /v1/ping."""
    assert set(server.second_line.removeprefix("sandbox layers: ").strip().split(", ")) == server.layers
    assert server.layers <= ALL_LAYERS | {"rlimits"}


def test_full_isolation_starts_only_with_all_layers(started_server):
    if missing := {"namespaces", "root", "proc", "landlock", "seccomp"} - started_server.layers:
        pytest.skip(f"off on this machine, so that --isolation full refuses to start: {', '.join(sorted(missing))}")
    server = HostileServer("--isolation", "full", "--preload", "")
    server.stop()

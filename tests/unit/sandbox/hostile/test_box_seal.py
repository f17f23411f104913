"""What an agent plants in its box: nothing of it runs or crosses over when the box is sealed."""

import asyncio
import io
import tarfile
import time

import pytest

from tests.unit.sandbox.boxes import unpacked
from tests.unit.sandbox.hostile.box_attacks import SECRET, attack
from tests.unit.sandbox.server_process import running
from verl_ext.sandbox import Box, SandboxClient


async def test_planted_programs_run_in_no_process_of_ours(boxes):
    plant = """
mkdir -p bin ~/bin ~/.local/lib/python3.11/site-packages ~/.config/git
for name in tar gzip python3 python git bash sh ls cat as-agent; do
  printf '#!/bin/sh\necho >> /app/pwned\n' > bin/$name; cp bin/$name ~/bin/$name
done
chmod +x bin/* ~/bin/*
site=~/.local/lib/python3.11/site-packages
for name in tarfile gzip sitecustomize usercustomize os json; do
  echo 'open("/app/pwned", "a").write("x")' > $name.py; cp $name.py /tmp; cp $name.py $site
done
echo 'touch /app/pwned' | tee ~/.bashrc ~/.bash_profile ~/.profile ~/.bash_logout > /app/env
export PATH=/app/bin:$HOME/bin:$PATH BASH_ENV=/app/env LD_PRELOAD=/app/lib.so PYTHONPATH=/app PYTHONSTARTUP=/app/os.py
alias tar=/app/bin/tar; echo kept > artifact
"""
    async with attack(boxes) as box:
        await box.run(plant)
        assert (await box.run("ls /app/pwned; type -p tar; echo $BASH_ENV$LD_PRELOAD$PYTHONPATH")).stdout == (
            "/usr/bin/tar\n\n"
        )
        sealed = await box.box.seal(["/app/pwned", "/app/artifact"])
        assert unpacked(sealed.archive) == {"app/artifact": b"kept\n"}
        assert sealed.dropped == {}


async def test_planted_verdicts_and_tests_are_named_and_do_not_cross(boxes):
    plant = """
mkdir -p /logs/verifier /tests/deep/er; echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh
ln -s /app /solution/link; echo mine > /tests/given; touch /tests/deep/new
"""
    async with attack(boxes, {"tests/given": "x", "tests/deep/er/known": "x", "app/a": "x"}) as box:
        await box.run(plant)
        sealed = await box.box.seal(["/app"])
    assert sealed.strays == ("/tests/test.sh", "/logs/verifier", "/solution/link", "/tests/deep/new")
    assert unpacked(sealed.archive) == {"app": None, "app/a": b"x"}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("ln -s /tests/secret out", "leaves"),
        ("ln -s /etc/passwd out", "leaves"),
        ("ln -s ../tests/secret out", "leaves"),
        ("mkdir in; ln -s in/../../tests/secret out", "leaves"),
        ("ln -s ../../../../../../tests/secret out", "leaves"),
        ("top=root; ln -s /proc/self/$top/tests/secret out", "leaves"),
        ("ln -s '' out 2>/dev/null || ln -s / out", "leaves"),
        ("mkfifo out", "FIFO"),
        ("python3 -c 'import os; os.mknod(\"out\", 0o10666)'", "FIFO"),
        ("truncate -s 90M out", "over the limit"),
        ("head -c 2000000 /dev/urandom > out", "over the limit"),
    ],
)
async def test_artifact_that_is_no_plain_file_is_dropped_and_named(boxes, make, why):
    async with attack(boxes, {"tests/secret": SECRET}) as box:
        await box.run(f"{make}; ls -l out")
        started = time.monotonic()
        sealed = await box.box.seal(["/app/out", "/app/other"], max_bytes=1 << 20)
        assert time.monotonic() - started < 10
    assert list(sealed.dropped) == ["/app/out"] and why in sealed.dropped["/app/out"]
    assert unpacked(sealed.archive) == {}


async def test_folder_above_an_artifact_that_became_a_link_is_not_followed(boxes):
    async with attack(boxes, {"tests/secret": SECRET, "app/sub/a": "x"}) as box:
        await box.run("rm -r sub; ln -s /tests sub; touch file")
        sealed = await box.box.seal(["/app/sub/secret", "/app/file/x"])
    assert unpacked(sealed.archive) == {}
    assert set(sealed.dropped) == {"/app/sub/secret", "/app/file/x"}


async def test_links_within_the_artifacts_are_kept_and_cycles_do_no_harm(boxes):
    async with attack(boxes) as box:
        await box.run(
            "mkdir d; ln -s . d/self; ln -s ../d d/up; ln -s b a; ln -s a b; ln -s /app/d abs; ln a hard 2>&1"
        )
        sealed = await box.box.seal(["/app"])
    assert sealed.dropped == {}
    links = {"app/d/self": ".", "app/d/up": "../d", "app/a": "b", "app/b": "a", "app/abs": "/app/d", "app/hard": "b"}
    assert unpacked(sealed.archive) == {"app": None, "app/d": None} | links


@pytest.mark.nightly
async def test_ten_thousand_folders_in_each_other_are_bounded(boxes):
    code = "import os\nfor i in range(10_000):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w')"
    async with attack(boxes) as box:
        assert (await box.run(f'python3 -c "{code}"', timeout_s=60)).return_code == 0
        assert (await box.run("mkdir /tests/x; echo ok > ok")).status == "ok"
        started = time.monotonic()
        sealed = await box.box.seal(["/app"])
        assert time.monotonic() - started < 10
    assert list(sealed.dropped.values()) == ["more than 64 names, or a path of more than 3500 bytes"]
    assert unpacked(sealed.archive)["app/ok"] == b"ok\n"


@pytest.mark.parametrize("mode", ["600", "400", "000", "100"])
async def test_locked_folders_are_read(boxes, mode):
    async with attack(boxes) as box:
        await box.run(f"mkdir -p d/e; echo x > d/e/f; chmod {mode} d/e; chmod {mode} d; chmod {mode} /app")
        sealed = await box.box.seal(["/app/d"])
    assert sealed.dropped == {} and not sealed.lost
    assert unpacked(sealed.archive) == {"app/d": None, "app/d/e": None, "app/d/e/f": b"x\n"}


async def test_locked_files_are_read_and_setuid_is_lost(boxes):
    async with attack(boxes) as box:
        await box.run("mkdir d; echo x > d/f; echo y > s; chmod 0 d/f; chmod 0 d; chmod 6755 s; chmod 0 /app")
        sealed = await box.box.seal(["/app"])
    assert unpacked(sealed.archive) == {"app": None, "app/d": None, "app/d/f": b"x\n", "app/s": b"y\n"}
    with tarfile.open(fileobj=io.BytesIO(sealed.archive)) as members:
        modes = {member.name: member.mode for member in members}
    assert modes == {"app": 0, "app/d": 0, "app/d/f": 0, "app/s": 0o755}


async def test_names_of_any_bytes_are_kept_and_reported_as_text(boxes):
    async with attack(boxes) as box:
        code = r"import os; open(b'\xff\xfe', 'w').close(); open('a\nb', 'w').close(); os.mkfifo(b'/tests/\xff')"
        await box.run(f'python3 -c "{code}"')
        sealed = await box.box.seal(["/app"])
    assert set(unpacked(sealed.archive)) == {"app", "app/a\nb", "app/\udcff\udcfe"}
    assert sealed.strays == ("/tests/\ufffd",)


async def test_who_writes_at_the_end_is_dead_before_anything_is_read(boxes):
    """A race of links: what is read is one of the two, and the link is not followed."""
    racer = """
(while true; do
  rm -rf out; mkdir out; echo good > out/f
  rm -rf out; ln -s /tests out
done) > /dev/null 2>&1 &
(while true; do echo line >> log; done) &
python3 -c "
import os
os.fork() or os.setsid()
while True: open('/app/late', 'a').write('x')" &
sleep 0.2
"""
    for _ in range(5):
        async with attack(boxes, {"tests/f": SECRET}) as box:
            await box.run(racer)
            again = asyncio.create_task(box.box.run("sleep 0.1", timeout_s=5))
            await again
            racers = [process for process in boxes.descendants() if process.name() == "bash"]
            sealed = await box.box.seal(["/app"])
            assert len(racers) >= 2 and not running(racers)
            assert len(boxes.descendants()) <= 5  # two zygotes, two idle workers and the box's worker
        found = unpacked(sealed.archive)
        assert SECRET.encode() not in found.values()
        assert set(found["app/log"].splitlines()) == {b"line"}


def test_sealed_box_runs_nothing_and_is_sealed_once(boxes):
    """Whatever a client says."""
    assert boxes.request("/v1/boxes/mine", b"{}")[0] == 200
    assert boxes.request("/v1/boxes/mine/seal", b'{"paths": ["/app"]}')[0] == 200
    assert boxes.request("/v1/boxes/mine/run", b'{"command": "true"}')[0] == 422
    assert boxes.request("/v1/boxes/mine/seal", b'{"paths": []}')[0] == 422
    assert boxes.request("/v1/boxes/mine", b"{}")[0] == 422
    assert boxes.request("/v1/boxes/mine", method="DELETE")[0] == 200


async def test_artifacts_open_in_another_box_as_they_were(boxes):
    async with attack(boxes) as first:
        await first.run(
            "mkdir -p a/b; echo '#!/bin/sh\necho ran' > a/run; chmod 751 a/run; ln -s run a/link; sleep 99 &"
        )
        sealed = await first.box.seal(["/app"])
    client = SandboxClient([boxes.url])
    second = Box(client)
    await second.open(sealed.archive)
    result = await second.run("a/link; stat -c %a a/run; ls a; pgrep sleep; ls /tests /logs", timeout_s=10)
    await second.close()
    await client.aclose()
    assert result.stdout == "ran\n751\nb\nlink\nrun\n/logs:\n\n/tests:\n"

"""Where a run writes, and how it signs in: its folder, temporary files and their sockets, wandb's key."""

import configparser
import netrc
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from verl_ext.doctor.finding import Finding, fail, ok
from verl_ext.doctor.run import Run

SOCKET_BYTES = 107  # of the path of a Unix socket, which the kernel keeps in 108 bytes
# Paths that are appended to the folder of temporary files.
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"  # ray/_private/node.py, 2.60
VLLM_SOCKET = "/" + 36 * "x"  # a UUID: vllm/utils/network_utils.py
PROCESS_SOCKET = "/pymp-12345678/listener-12345678"  # Python's multiprocessing
PACKAGES_OF_LOGGERS = ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")  # named as what they import
UNSIGNED = ("offline", "disabled", "dryrun")


def check_output(run: Run) -> Iterator[Finding]:
    """Check that the run's folder can be created and written to."""
    folder = run.output_folder
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if why := _why_not_writable(existing):
        yield fail(f"""trainer.default_local_dir is {folder}, which cannot be written: {why}
            -> Set it (OUTPUT_DIR of the launcher) to a folder that this user may write to.""")


def check_temporary(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the folders of temporary files exist, and have names short enough for the sockets in them."""
    of_python = environment.get("TMPDIR") or "/tmp"
    own = "ray_kwargs.ray_init._temp_dir"
    of_ray, ray_socket = run.get(own), RAY_SOCKET.removeprefix("/ray")
    if not of_ray:
        own = "RAY_TMPDIR" if environment.get("RAY_TMPDIR") else "TMPDIR"
        of_ray, ray_socket = environment.get("RAY_TMPDIR") or of_python, RAY_SOCKET
    uses = [("TMPDIR", of_python, PROCESS_SOCKET, "Python's processes")]
    if run.is_rl:
        rpc = environment.get("VLLM_RPC_BASE_PATH")
        uses = [("VLLM_RPC_BASE_PATH" if rpc else "TMPDIR", rpc or of_python, VLLM_SOCKET, "vLLM")]
        if not environment.get("RAY_ADDRESS"):  # else Ray's sockets already exist
            uses.append((own, of_ray, ray_socket, "Ray"))
    told: set[str] = set()
    for name, folder, socket, who in uses:
        length, most = len(folder.rstrip("/").encode()), SOCKET_BYTES - len(socket)
        # Ray creates its folder; Python silently uses another one, so that the setting has no effect.
        existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if os.path.exists(path))
        if folder in told:
            continue
        if why := _why_not_writable(existing if who == "Ray" and name != "TMPDIR" else Path(folder)):
            told.add(folder)
            yield fail(f"{name} is {folder}, which cannot be written: {why} -> Create the folder, or unset {name}.")
        elif length > most:
            told.add(folder)
            yield fail(f"""{name} is {folder}, a path of {length} bytes, expected at most {most}: there is no room
                for the names of the sockets (AF_UNIX) that {who} creates in it -> Set {name} to a short path, such as
                /tmp.""")
    if not told:
        yield ok(f"temporary files are in {', '.join(dict.fromkeys(folder for _, folder, *_ in uses))}")


def _why_not_writable(folder: Path) -> str:
    """Return why no file can be written, by trying an unnamed one that leaves nothing behind; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror or error}"


def check_loggers(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the loggers' packages are installed, and that wandb has a key if it needs one."""
    for name in run.listed("trainer.logger"):
        if name in PACKAGES_OF_LOGGERS and find_spec(name) is None:
            yield fail(f"""trainer.logger names {name}, whose package is not installed
                -> Run pip install {name}, or remove it from the loggers.""")
        elif name == "wandb" and not _signs_in(run.folder, environment):
            yield fail("""trainer.logger names wandb, which has no API key here and cannot ask for one in a run
                -> Set WANDB_API_KEY, run `wandb login` once, or set WANDB_MODE=offline.""")


def _signs_in(folder: Path, environment: Mapping[str, str]) -> bool:
    """Look for a key as wandb 0.31 does (sdk/lib/wbauth): in variables, its settings and the file of `wandb login`."""
    home = Path(environment.get("HOME", "~")).expanduser()
    settings = configparser.ConfigParser()
    config = Path(environment.get("WANDB_CONFIG_DIR", home / ".config" / "wandb"))
    own = Path(environment.get("WANDB_DIR", folder)) / "wandb"
    try:
        settings.read([config / "settings", own / "settings", folder / "wandb" / "settings"])
    except configparser.Error:
        return True  # wandb itself reports what is wrong
    given = settings["default"] if settings.has_section("default") else {}
    if environment.get("WANDB_MODE", given.get("mode")) in UNSIGNED or given.get("disabled") == "true":
        return True
    if any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")) or given.get("api_key"):
        return True
    base = environment.get("WANDB_BASE_URL") or given.get("base_url") or "https://api.wandb.ai"
    for file in [Path(environment["NETRC"])] if environment.get("NETRC") else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(str(file)).authenticators(urlsplit(base).hostname or base):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False

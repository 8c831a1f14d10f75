"""Fetches the real programs that tests and benchmarks hold the services against, into this checkout.

Installs nothing on the machine and needs no privileges: Debian's packages are unpacked, not installed. What cannot be
had here is named with its reason in `missing.json`; the tests that need it are then skipped with that reason, and this
script still ends well. It never stops on one tool's account.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DEBS = ("prometheus", "rsyslog", "rsyslog-relp", "librelp0", "libestr0", "libfastjson4", "liblognorm5")
LOAD_DEBS = ("nginx", "wrk", "libluajit2-5.1-2")
STATSD = "statsd@0.9.0"
FAKE_WORKER = Path(__file__).parents[2] / "benchmarks/routerbench/fakeworker.c"
LIMIT_S = 300.0
TRIES = 3


class Missing(Exception):
    """A tool cannot be had here; the text says why."""

    def __init__(self, reason: str, *, for_good: bool) -> None:
        super().__init__(reason)
        self.for_good = for_good
        """False: another try may do."""


@dataclass(frozen=True)
class Folders:
    """Where things go."""

    root: Path
    venv: Path

    @property
    def apt(self) -> Path:
        return self.root / "apt"

    @property
    def statsd(self) -> Path:
        return self.root / "statsd"


def main() -> int:
    """Fetch what is not there yet; always 0, so that what is missing stops nothing else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--venv", type=Path, required=True)
    options = parser.parse_args()
    folders = Folders(options.root.absolute(), options.venv.absolute())
    folders.root.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    makers: dict[tuple[str, ...], Callable[[Folders], None]] = {
        ("prometheus", "rsyslog"): make_apt,
        ("statsd",): make_statsd,
        ("mlflow", "tensorboard"): make_venv,
        ("nginx", "wrk"): make_load,
        ("sglang-router", "smg"): make_routers,
        ("fakeworker",): make_fake_worker,
    }
    complete = True
    for names, make in makers.items():
        try:
            _often(make, folders)
        except Missing as reason:
            print(f"{' and '.join(names)}: {reason}", file=sys.stderr)
            missing |= dict.fromkeys(names, str(reason))
            complete = complete and reason.for_good
    (folders.root / "missing.json").write_text(json.dumps(missing, indent=1) + "\n")
    if complete:
        (folders.root / ".ready").touch()
    return 0


def make_apt(folders: Folders) -> None:
    """Prometheus and rsyslog, as Debian builds them."""
    _unpack(folders, DEBS)
    _try_apt(folders, "usr/bin/prometheus", "--version")
    _try_apt(folders, "usr/sbin/rsyslogd", "-v")


def make_load(folders: Folders) -> None:
    """Nginx, which the router is held against, and wrk, which loads both."""
    _unpack(folders, LOAD_DEBS)
    _try_apt(folders, "usr/sbin/nginx", "-v")
    _try_apt(folders, "usr/bin/wrk", "-v", status=1)


def make_statsd(folders: Folders) -> None:
    """Etsy's statsd daemon."""
    if not shutil.which("npm") or not shutil.which("node"):
        raise Missing("needs node and npm", for_good=True)
    folders.statsd.mkdir(exist_ok=True)
    _run(["npm", "install", "--no-audit", "--no-fund", "--omit=optional", "--prefix", str(folders.statsd), STATSD])
    if not (folders.statsd / "node_modules/statsd/stats.js").is_file():
        raise Missing("npm did not install statsd", for_good=False)


def make_venv(folders: Folders) -> None:
    """An MLflow server and TensorBoard, in an environment of their own."""
    python = _environment(folders)
    needs = Path(__file__).with_name("requirements.txt")
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r", str(needs)])
    _run([str(python), "-c", "import mlflow.server, tensorboard.main"])


def make_routers(folders: Folders) -> None:
    """The other routers for SGLang, beside MLflow: their modules have different names."""
    python = _environment(folders)
    needs = Path(__file__).with_name("requirements-routers.txt")
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r", str(needs)])
    _run([str(python), "-m", "sglang_router.launch_router", "--help"])
    _run([str(python), "-m", "smg", "launch", "--help"])


def make_fake_worker(folders: Folders) -> None:
    """The worker that the router's benchmark puts behind all of them."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise Missing("needs a C compiler (cc, gcc or clang)", for_good=True)
    _run([compiler, "-O2", "-o", str(folders.root / "fakeworker"), str(FAKE_WORKER)])


def _unpack(folders: Folders, names: Sequence[str]) -> None:
    """Debian packages, without installing them."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Missing("needs apt-get and dpkg (Debian or Ubuntu)", for_good=True)
    debs = folders.root / "debs"
    debs.mkdir(exist_ok=True)
    try:
        _run(["apt-get", "--quiet", "download", *names], cwd=debs)
    except Missing:  # no package lists, or old ones: make some that are our own, for which no root is needed
        own = _own_lists(folders.root / "apt-lists")
        _run(["apt-get", "--quiet", *own, "update"], cwd=debs)
        _run(["apt-get", "--quiet", *own, "download", *names], cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        _run(["dpkg", "-x", str(deb), str(folders.apt)])
    shutil.rmtree(debs)


def _try_apt(folders: Folders, program: str, flag: str, *, status: int = 0) -> None:
    """Start it once. status: what it ends with, when all is well."""
    libraries = ":".join(str(path) for path in sorted(folders.apt.glob("usr/lib/*-linux-gnu*")))
    _run(["env", f"LD_LIBRARY_PATH={libraries}", str(folders.apt / program), flag], status=status)


def _environment(folders: Folders) -> Path:
    """The Python of the environment of tools, which is made if there is none."""
    python = folders.venv / "bin/python"
    if not python.is_file():
        _run([sys.executable, "-m", "venv", str(folders.venv)])
    return python


def _own_lists(folder: Path) -> list[str]:
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return ["-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"]


def _often(make: Callable[[Folders], None], folders: Folders) -> None:
    for number in range(1, TRIES + 1):
        try:
            make(folders)
            return
        except Missing as reason:
            if reason.for_good or number == TRIES:
                raise
            time.sleep(2.0 * number)


def _run(command: Sequence[str], *, cwd: Path | None = None, status: int = 0) -> None:
    """Raises Missing with the last line that the command wrote."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{command[0]}: {error}", for_good=False) from error
    if done.returncode != status:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no word why"]
        raise Missing(f"{Path(command[0]).name} {command[1]} failed: {said[-1]}", for_good=False)


if __name__ == "__main__":
    sys.exit(main())

"""The real programs of `make tools`: found where they are, and named with a reason where they are not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tools


def test_a_machine_without_apt_and_node_says_so_and_goes_on(tmp_path: Path) -> None:
    maker = str(tools.ROOT / "deploy/tools/make_tools.py")
    code = f"import sys; sys.argv = ['x', '--root', '{tmp_path}', '--venv', '{tmp_path}/venv']\n"
    code += "import importlib.util as u; spec = u.spec_from_file_location('maker', %r); m = u.module_from_spec(spec)\n"
    code += "sys.modules['maker'] = m; spec.loader.exec_module(m)\n"
    code += "m.make_venv = m.make_routers = lambda folders: None\n"
    code += "sys.exit(m.main())"
    done = subprocess.run(
        [sys.executable, "-c", code % maker], env={"PATH": ""}, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr.splitlines() == [
        "prometheus and rsyslog: needs apt-get and dpkg (Debian or Ubuntu)",
        "statsd: needs node and npm",
        "nginx and wrk: needs apt-get and dpkg (Debian or Ubuntu)",
        "fakeworker: needs a C compiler (cc, gcc or clang)",
    ]
    assert (tmp_path / ".ready").exists()  # another try would change nothing


def test_reason_of_a_missing_tool_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "TOOLS", tmp_path)
    assert tools.find("statsd") is None
    assert tools.why_missing("statsd") == "`make tools` fetches it"
    (tmp_path / "missing.json").write_text('{"statsd": "needs node and npm"}')
    with pytest.raises(pytest.skip.Exception, match="no statsd: needs node and npm"):
        tools.need("statsd")


@pytest.mark.tools
@pytest.mark.parametrize("name", ["prometheus", "rsyslog", "mlflow", "tensorboard", "nginx", "sglang-router", "smg"])
def test_tool_starts(name: str) -> None:
    tool = tools.need(name)
    flag = "-v" if name in ("rsyslog", "nginx") else "--version"
    subprocess.run([*tool.command, flag], env=tool.environment, capture_output=True, timeout=60, check=True)

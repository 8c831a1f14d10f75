"""Users' functions by dotted path."""

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from furlong.config import ConfigError
from furlong.hooks import Hook, load_hook, wrong_arguments

KEY = "rollout.custom_rm_path"
MODULE = textwrap.dedent("""
    import functools

    def fn(sample):
        return 1.0

    async def later(sample):
        return 2.0

    class Scorer:
        async def __call__(self, sample):
            return 3.0

    part = functools.partial(later, 1)
    scorer = Scorer()
    number = 7
    nothing = None
    coroutine = later(1)
    coroutine.close()
""")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a name that no other test uses, in the current folder."""
    folder = tmp_path / "hook_pkg" / "sub"
    folder.mkdir(parents=True)
    (tmp_path / "hook_pkg" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("def top(sample):\n    return 0.0\n")
    (folder / "mod.py").write_text(MODULE)
    (folder / "needs.py").write_text("import a_package_that_nobody_has\n")
    (folder / "half.py").write_text("from hook_pkg.sub.mod import missing\n")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "raises.py").write_text("raise RuntimeError('no licence')\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("hook_pkg")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    ("hook", "fits"),
    [
        (lambda args, sample: 1, True),
        (lambda args, sample, **kwargs: 1, True),
        (lambda *given: 1, True),
        (functools.partial(lambda extra, args, sample: 1, 5), True),
        (dict, True),
        (lambda sample: 1, False),
        (lambda args, sample, label: 1, False),
        (lambda args, *, sample: 1, False),
    ],
)
def test_parameters_are_compared_with_the_call(hook: Hook, fits: bool) -> None:
    problem = wrong_arguments(hook, "my.score", key=KEY)
    assert (problem is None) == fits
    assert fits or "is called as score(args, sample)" in str(problem)


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_hook(path, key=KEY)
    message = str(caught.value)
    assert KEY in message and repr(path) in message
    return message


@pytest.mark.parametrize("path", ["hook_pkg.sub.mod.fn", "hook_pkg.sub.top", "hook_pkg.sub.mod.Scorer", "math.sqrt"])
def test_a_function_of_a_nested_package_is_found(path: str) -> None:
    assert callable(load_hook(path, key=KEY))


@pytest.mark.parametrize("name", ["later", "part", "scorer"])
def test_asynchronous_callables_are_given_as_they_are(name: str) -> None:
    """Who calls a hook awaits what it gives; here nothing is called."""
    assert load_hook(f"hook_pkg.sub.mod.{name}", key=KEY) is getattr(sys.modules["hook_pkg.sub.mod"], name)


def test_a_partial_stays_one() -> None:
    assert isinstance(load_hook("hook_pkg.sub.mod.part", key=KEY), functools.partial)


def test_the_same_path_is_loaded_once() -> None:
    assert load_hook("hook_pkg.sub.mod.fn", key=KEY) is load_hook("hook_pkg.sub.mod.fn", key=KEY)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("fn", "dotted path"),
        ("", "dotted path"),
        (".fn", "dotted path"),
        ("hook_pkg.sub.mod.", "has no attribute ''"),
        ("no_such_module.fn", "module 'no_such_module' was not found"),
        ("hook_pkg.sub.nothing.fn", "module 'hook_pkg.sub.nothing' was not found"),
        ("hook_pkg.sub.mod.scorers", "Did you mean hook_pkg.sub.mod.scorer?"),
        ("hook_pkg.sub.mod.number", "must be callable, got int"),
        ("hook_pkg.sub.mod.nothing", "must be callable, got NoneType"),
        ("hook_pkg.sub.mod.coroutine", "must be callable, got coroutine"),
        (
            "hook_pkg.sub.needs.fn",
            "module 'a_package_that_nobody_has' was not found while importing hook_pkg.sub.needs",
        ),
        ("hook_pkg.sub.half.fn", "ImportError: cannot import name 'missing'"),
        ("hook_pkg.sub.broken.fn", "SyntaxError"),
        ("hook_pkg.sub.raises.fn", "RuntimeError: no licence"),
        ("hook_pkg.sub.leaves.fn", "ends the process"),
        ("..mod.fn", "importing ..mod"),
        ("hook_pkg..mod.fn", "was not found"),
        ("folder/file.py", "was not found"),
    ],
)
def test_what_cannot_be_a_hook_is_refused_with_the_reason(path: str, said: str) -> None:
    assert said in refused(path)


def test_the_error_inside_a_module_keeps_its_own_trace() -> None:
    with pytest.raises(ConfigError) as caught:
        load_hook("hook_pkg.sub.raises.fn", key=KEY)
    trace = caught.value.__cause__.__traceback__ if caught.value.__cause__ else None
    while trace and trace.tb_next:
        trace = trace.tb_next
    assert trace is not None and trace.tb_frame.f_code.co_filename.endswith("raises.py")


def test_the_current_folder_does_not_hide_installed_modules(package: Path) -> None:
    (package / "math.py").write_text("raise RuntimeError('the wrong one')\n")
    (package / "statistics.py").write_text("raise RuntimeError('the wrong one')\n")
    program = f"from furlong.hooks import load_hook; print(load_hook('statistics.mean', key='{KEY}').__module__)"
    command = [sys.executable, "-P", "-c", program]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=package, env={"PYTHONPATH": str(root)}, check=False
    )
    assert done.stdout.strip() == "statistics", done.stderr

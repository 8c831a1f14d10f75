"""A user's own functions, named by a flag as `pkg.mod.fn`: loaded once, at start, with errors that say where.

Never calls the function: who uses a hook decides on which thread, with which limit.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from furlong.config import ConfigError
from furlong.config.errors import Problem

Hook = Callable[..., Any]  # Any: a user's function
CALLED_WITH = {
    "rollout.custom_rm_path": ("args", "sample"),
    "rollout.custom_rollout_log_function_path": ("rollout_id", "args", "samples", "extra", "rollout_time"),
    "rollout.custom_eval_rollout_log_function_path": ("rollout_id", "args", "data", "extra"),
}
"""What each hook is given, in order and by position; the names are for the reader."""


def load_hook(path: str, *, key: str) -> Hook:
    """The callable at a dotted path. The current folder is importable, as with `python -m`.

    key: the configuration key that named it, for the error. Raises ConfigError: not dotted, module not found, module
    that fails while importing (with its own message), attribute missing, or not callable.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ConfigError(
            [Problem(key, path, "must be a dotted path to a function", "For example my_pkg.rewards.score.")]
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        own = module_name == missing or module_name.startswith(missing + ".")
        rule = f"module {missing!r} was not found" + ("" if own else f" while importing {module_name}")
        remedy = "Run from its folder, or put that on PYTHONPATH." if own else f"Install what {module_name} needs."
        raise ConfigError([Problem(key, path, rule, remedy)]) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything at import
        rule = f"importing {module_name} raised {type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            rule = f"importing {module_name} ends the process (sys.exit): guard it with `if __name__ == '__main__'`"
        raise ConfigError([Problem(key, path, rule, f"Try `python -c 'import {module_name}'`.")]) from error
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, dir(module), n=1)
        remedy = f"Did you mean {module_name}.{close[0]}?" if close else ""
        raise ConfigError([Problem(key, path, f"{module_name} has no attribute {attribute!r}", remedy)])
    hook = getattr(module, attribute)
    if not callable(hook):
        raise ConfigError([Problem(key, path, f"must be callable, got {type(hook).__name__}")])
    return hook


def wrong_arguments(hook: Hook, path: str, *, key: str) -> Problem | None:
    """What is wrong with the parameters of a hook, told before a run starts; None: it can be called as it will be."""
    given = CALLED_WITH[key]
    try:
        signature = inspect.signature(hook)
    except (ValueError, TypeError):  # builtins may have none
        return None
    try:
        signature.bind(*given)
    except TypeError as error:
        name = path.rpartition(".")[2]
        rule = f"is called as {name}({', '.join(given)}), but is {name}{signature}: {error}"
        return Problem(key, path, rule, "Change its parameters.")
    return None

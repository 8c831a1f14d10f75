"""Starts SGLang on a machine without a GPU: `python launch.py FLAGS`, the flags of `sglang.launch_server`.

SGLang's wheel expects packages around it that are built for GPUs. This file owns what stands in for them, in memory
only. It must never change an installed file, and never answer for a kernel: one that is called raises, so that no
number comes out of a stand-in. It runs in SGLang's own environment and imports nothing of Furlong.

The stand-ins are made when this file is imported, not in main(): SGLang starts its scheduler and detokenizer by spawn,
and each of them imports this file again, without calling main().
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Mapping, MutableSequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

ARITHMETIC: Mapping[str, Callable[..., int]] = {
    "cdiv": lambda number, by: -(number // -by),
    "next_power_of_2": lambda number: 1 << (number - 1).bit_length() if number > 0 else 1,
}
"""Functions of triton that are no kernels. SGLang calls them to size its buffers."""


class MissingKernels(ModuleType):
    """A module that any function can be imported from; calling one raises."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} has no CPU build in this environment")

        setattr(self, name, missing)
        return missing


class MissingCompiler(ModuleType):
    """A package of which everything can be imported: classes, decorators that change nothing, and more packages."""

    __path__: MutableSequence[str]

    def __getattr__(self, name: str) -> Any:  # Any: whatever the importer takes it for
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "active":  # the driver of the GPU; told so, SGLang goes on without one
            raise RuntimeError("no active driver: there is no GPU")
        value: Any
        if name in ARITHMETIC:
            value = ARITHMETIC[name]
        elif name[0].isupper():  # a class, to derive from, to compare with, or to catch
            base = Exception if name.endswith(("Error", "OutOfResources")) else object
            value = type(name, (base,), {"__init__": lambda self, *_, **__: None})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: a function, or what makes a decorator
        """As a decorator, with or without arguments: the function itself. It is no kernel, and cannot be launched."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class CompilerFinder(MetaPathFinder, Loader):
    """Answers for a package that is not installed, and for all modules in it."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._package:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MissingCompiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"


def stand_in_for_sgl_kernel() -> None:
    """SGLang's kernels are published for GPUs only, and many of its modules import their names unasked.

    Nothing is registered with torch, where SGLang looks before it takes a kernel: it takes torch's own operators. There
    are no submodules: SGLang guards their imports, and has something else for each.
    """
    if importlib.util.find_spec("sgl_kernel") is None:
        module = MissingKernels("sgl_kernel")
        module.__spec__ = ModuleSpec("sgl_kernel", None, is_package=True)
        module.__path__ = []
        module.__dict__["__version__"] = "0.0.0"
        sys.modules["sgl_kernel"] = module


def stand_in_for_triton() -> None:
    """Triton compiles for GPUs and takes 700 MB; torch's wheel for CPUs leaves it out, but SGLang decorates with it."""
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(CompilerFinder("triton"))


def declare_torchvision_operators() -> list[torch.library.Library]:
    """torchvision's wheel is linked with CUDA: beside torch's for CPUs its operators do not load.

    Yet it describes two of them to torch when it is imported, which transformers does. Declared, they can be described;
    nobody implements them. They last as long as what is returned.
    """
    if torch.version.cuda is not None:  # then its own load
        return []
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return [library]


os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # without it SGLang refuses `--device cpu`
stand_in_for_sgl_kernel()
stand_in_for_triton()
LIBRARIES = declare_torchvision_operators()


def main() -> None:
    """Become SGLang's own launcher."""
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()

"""Makes furlong/v1/ from the .proto files beside it, or checks that it is fresh.

The generator is pinned to an old one on purpose: what grpcio-tools 1.76 writes loads on protobuf 6 and on protobuf 7,
and SGLang's environment may hold either. It lives in an environment of its own (`make proto` creates it), since its
own pins do not fit the rest of the development tools.
"""

import argparse
import filecmp
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("furlong/v1")
DOCSTRING = '"""Generated from protos/furlong/v1 by `make proto`; never edited by hand."""\n'


def generate(out_dir: Path) -> None:
    """Write the generated modules and stubs under out_dir/furlong/v1."""
    out_dir.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}={out_dir}" for kind in ("python_out", "pyi_out", "grpc_python_out", "mypy_grpc_out")]
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--plugin=protoc-gen-mypy_grpc={plugin}"]
    subprocess.run([*command, "-I", str(PROTOS), *outputs, *sources], check=True, cwd=PROTOS, timeout=120)
    (out_dir / PACKAGE / "__init__.py").write_text(DOCSTRING)
    for source in sources:  # a contract without a service still gets an empty grpc module: leave it out
        stem = Path(source).stem
        if not re.search(r"^service ", (PROTOS / source).read_text(), re.MULTILINE):
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                (out_dir / PACKAGE / f"{stem}{suffix}").unlink(missing_ok=True)


def stale_files(fresh_dir: Path) -> list[str]:
    """Names of the committed files that differ from, are missing from, or are not in the fresh ones."""
    fresh = {path.name for path in (fresh_dir / PACKAGE).iterdir() if path.is_file()}
    committed = {path.name for path in (ROOT / PACKAGE).iterdir() if path.is_file()}
    differing = [
        name
        for name in fresh & committed
        if not filecmp.cmp(fresh_dir / PACKAGE / name, ROOT / PACKAGE / name, shallow=False)
    ]
    return sorted(differing + list(fresh ^ committed))


def main() -> int:
    """Generate, or with --check compare and answer 1 when the committed files are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if furlong/v1 is not fresh")
    check = parser.parse_args().check
    if not check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        stale = stale_files(Path(scratch))
    if stale:
        print(f"furlong/v1 is not what the .proto files say: {', '.join(stale)}. Run `make proto` and commit.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""How routers behave when things break, beside one another: nginx, sglang-router, smg and ours.

    python benchmarks/router_behaviour.py [--only NAME ...] [--out FILE]

Prints a row for each question. tests/router/test_behaviour.py holds our column.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.routerbench.behaviour import Row, behaviour
from benchmarks.routerbench.peers import DIRECT, OURS_2, peers
from benchmarks.routerbench.running import share_out_cpus


def main() -> None:
    """Ask and print."""
    names = [peer.name for peer in peers() if peer.name not in (DIRECT, OURS_2)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="these alone")
    parser.add_argument("--out", type=Path, help="file for the answers, as JSON")
    options = parser.parse_args()
    cpus = share_out_cpus()
    os.sched_setaffinity(0, cpus.load)
    rows: dict[str, Row] = {}
    for peer in peers():
        if peer.name not in options.only:
            continue
        if peer.missing:
            print(f"no {peer.name}: {peer.missing}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[peer.name] = behaviour(peer, cpus, Path(folder))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print("| question | " + " | ".join(rows) + " |\n|" + "---|" * (len(rows) + 1))
    for question in dict.fromkeys(key for row in rows.values() for key in row):
        print(f"| {question} | " + " | ".join(row.get(question, "") for row in rows.values()) + " |")


main()  # without the usual guard: `make bench` runs files that have it, and this measures nothing

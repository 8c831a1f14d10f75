"""What the router costs, beside the worker itself, nginx, sglang-router and smg, in one run and in rounds by turns.

    python benchmarks/router.py [--full] [--rounds N] [--only NAME ...] [--parts NAME ...] [--out FILE]

The router has one processor, the load and the workers have another, so that figures are for one core of router. They
depend on the machine, ratios to sglang-router in the same run hardly. Prints a table, then a JSON line
for each limit, and ends with 1 if one is missed. Without --full it takes about a minute.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.routerbench import verdicts
from benchmarks.routerbench.parts import PARTS, QUICK, Effort
from benchmarks.routerbench.peers import DIRECT, OURS, SGLANG, Peer, peers, routed, workers
from benchmarks.routerbench.running import Cpus, raise_file_limit, share_out_cpus
from tests import tools

QUICK_PEERS = (DIRECT, "nginx", SGLANG, OURS)
NUM_WORKERS = 2
HELPERS = {"wrk": "loads from Python instead", "fakeworker": "workers in Python instead"}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all peers, concurrencies and parts: about eight minutes")
    parser.add_argument("--rounds", type=int, default=0, help="how often each is measured; 2, or 3 with --full")
    parser.add_argument("--only", nargs="+", default=(), choices=[peer.name for peer in peers()], help="these alone")
    parser.add_argument("--parts", nargs="+", default=(), choices=list(PARTS), help="these alone")
    parser.add_argument("--out", type=Path, help="file for the figures of each round, as JSON")
    options = parser.parse_args()
    raise_file_limit()
    cpus = share_out_cpus()
    os.sched_setaffinity(0, cpus.load)
    if not cpus.apart:
        print("one processor for router, load and workers: rates say little, processor times and ratios still do")
    chosen = _choose(options.only or ([peer.name for peer in peers()] if options.full else QUICK_PEERS))
    effort = Effort() if options.full else QUICK
    parts = options.parts or [name for name in PARTS if options.full or name != "slow"]
    results = _rounds(chosen, parts, effort, options.rounds or (3 if options.full else 2), cpus)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(verdicts.table(results))
    made = verdicts.verdicts(results)
    for verdict in made:
        print(json.dumps(verdict.line()))
    if left := verdicts.not_told(results):
        print(f"{left} limits were not measured here")
    return 0 if all(verdict.held for verdict in made) else 1


def _choose(names: Sequence[str]) -> list[Peer]:
    """Those that are here; what is not is named."""
    for name, instead in HELPERS.items():
        if tools.find(name) is None:
            print(f"no {name} ({tools.why_missing(name)}): {instead}")
    wanted = [peer for peer in peers() if peer.name in names]
    for peer in wanted:
        if peer.missing:
            print(f"no {peer.name}: {peer.missing}")
    return [peer for peer in wanted if not peer.missing]


def _rounds(
    chosen: Sequence[Peer], parts: Sequence[str], effort: Effort, num_rounds: int, cpus: Cpus
) -> Mapping[str, list[dict[str, float]]]:
    """Each peer in each round, fresh, in an order that turns."""
    results: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in chosen}
    with tempfile.TemporaryDirectory() as name, workers(NUM_WORKERS, cpus.load, Path(name)) as urls:
        for number in range(num_rounds):
            turn = number % len(chosen)
            for peer in [*chosen[turn:], *chosen[:turn]]:
                with routed(peer, urls, cpus, Path(name)) as running:
                    enough = len(cpus.router | cpus.load) > 3
                    row = {"start s": running.start_s, "asked": float(effort.num_idle), "apart": float(enough)}
                    for part in parts:
                        row |= PARTS[part](running, effort)
                results[peer.name].append(row)
                print(f"round {number + 1} of {num_rounds}: {peer.name}", file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())

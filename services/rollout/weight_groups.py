"""The process group that weights travel on: when a new one is needed, and which old ones engines still have to leave.

A group is used again only for the same engine processes, trainer and master, and only if nothing went wrong in it.
"""

import contextlib
import uuid
from collections.abc import Sequence

from furlong.v1 import rollout_pb2
from services.rollout.engine_http import EngineCallFailed
from services.rollout.fleet import Fleet
from services.rollout.participants import Participant, do_on_all
from services.rollout.weight_plan import GroupKey, Member

LEAVE_LIMIT_S = 10.0


class WeightGroups:
    """The group in use, and the ones before it."""

    def __init__(self, fleet: Fleet, *, run: str) -> None:
        self._fleet = fleet
        self._run = run
        self._key: GroupKey | None = None
        self._name = ""
        self._joined: dict[Member, list[str]] = {}
        """Groups that each engine may be in."""

    async def choose(
        self, participants: Sequence[Participant], request: rollout_pb2.BeginWeightUpdateRequest, *, limit_s: float
    ) -> tuple[str, bool]:
        """The group's name, and whether it must be made; if so, the engines leave the ones before."""
        key = GroupKey(
            tuple(one.member for one in participants),
            request.trainer_incarnation,
            request.master_address,
            request.master_port,
            request.backend,
        )
        if key == self._key:
            return self._name, False
        await self._leave(participants, limit_s=min(limit_s, LEAVE_LIMIT_S))
        self._key, self._name = key, f"furlong-{self._run}-{uuid.uuid4().hex[:12]}"
        return self._name, True

    def note_joining(self, participants: Sequence[Participant]) -> None:
        """Engines are about to join: they must leave one day, also if joining goes wrong half-way."""
        alive = {Member(engine.engine_id, engine.incarnation) for engine in self._fleet.engines}
        self._joined = {member: names for member, names in self._joined.items() if member in alive}
        for participant in participants:
            self._joined.setdefault(participant.member, []).append(self._name)

    def forget(self) -> None:
        """Something went wrong in the group: it is not used again."""
        self._key = None

    async def _leave(self, participants: Sequence[Participant], *, limit_s: float) -> None:
        """A group that an engine does not have, or cannot leave, is no fault: names are never used twice."""

        async def one(participant: Participant) -> None:
            participant.engine.group_rank = None
            for name in self._joined.pop(participant.member, []):
                with contextlib.suppress(EngineCallFailed):
                    body = {"group_name": name}
                    await participant.http.post("/destroy_weights_update_group", body, timeout_s=limit_s)

        await do_on_all(self._fleet, participants, one, limit_s=limit_s)

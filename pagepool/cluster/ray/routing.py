"""Which replica a call goes to. Serve copies this module into its processes: it imports nothing of pagepool."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

__all__ = ["NamedReplicaRouter"]


class NamedReplicaRouter(RequestRouter):
    """Sends a call to the replica that the front end has chosen with its `Router`.

    The choice is made before, where the tokens are, once for each call: Serve may ask several times. A replica that is
    gone is replaced by any other one, which says in its answer who it is.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica with the name that is the first argument of the call; None stands for any."""
        name = pending_request.args[0] if pending_request is not None and pending_request.args else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]

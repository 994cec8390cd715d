"""Selects the replica of a call. Serve copies this module into its processes, so it must not import from pagepool."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

__all__ = ["NamedReplicaRouter"]


class NamedReplicaRouter(RequestRouter):
    """Sends a call to the replica that the front end has chosen with its `Router`.

    The front end chooses once for each call, because it has the tokens. Serve may ask several times. If the chosen
    replica has exited, any other replica takes the call and returns its own name in the answer.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica named by the first argument of the call, or all candidates if it is None or not found."""
        name = pending_request.args[0] if pending_request is not None and pending_request.args else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]

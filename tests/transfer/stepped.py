"""A transport whose copies a test can watch half done, hold up and cut off."""

from ctypes import memmove

from pagepool import KvLayout
from pagepool.transfer import LocalTransfer, TransferError

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")


class SteppedTransfer(LocalTransfer):
    """Copies half a descriptor at each look; or nothing, like one whose peer is stopped; or its peer is gone."""

    stopped = gone = False

    def _post(self, peer, copies):
        self._check_alive(peer)
        halves = [(to + at, fro + at, n // 2) for to, fro, n in copies.tolist() for at in (0, n // 2)]
        return halves

    def _check(self, request):
        if self.gone:
            raise TransferError("the connection is lost")
        if not self.stopped:
            memmove(*request.pop(0))
        return not request

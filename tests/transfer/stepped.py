"""A transport with copies in two steps, which a test can observe halfway, stop and abort."""

from ctypes import memmove

from pagepool import KvLayout
from pagepool.transfer import LocalTransfer, TransferError

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")


class SteppedTransfer(LocalTransfer):
    """Copies half a descriptor per poll. With `stopped` it copies nothing; with `gone` the connection is lost."""

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

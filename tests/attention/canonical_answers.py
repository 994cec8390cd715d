"""The canonical order, worked out once: every instruction set that fuses has the same bits, and is tested in a process
of its own that asks the same of plain Python. So do other builds, which may be given the same folder."""

import hashlib
import os
import pickle
from functools import wraps
from pathlib import Path

from pagepool.reference import canonical

FOLDER = "PAGEPOOL_TEST_ANSWERS"
# Answers of another text are none to a question of this one.
TEXT = b"".join(path.read_bytes() for path in sorted(Path(canonical.__file__).parent.glob("*.py")))
SALT = hashlib.sha256(TEXT).digest()


def once(function):
    """The function, whose answers are kept as files in a folder that the processes of a test run share."""

    @wraps(function)
    def answer(*given, **named):
        question = pickle.dumps((function.__name__, given, sorted(named.items())))
        file = Path(os.environ[FOLDER], hashlib.sha256(SALT + question).hexdigest())
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(function(*given, **named)))
            part.rename(file)
        return pickle.loads(file.read_bytes())

    return answer


attend = once(canonical.attend)
attend_with_scores = once(canonical.attend_with_scores)

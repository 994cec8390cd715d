"""Journal: the steps that end a transaction. Once they run, nothing needs memory and no signal comes between.

Python code does both: a loop makes an iterator, and after any call there may be a `KeyboardInterrupt`. So what is taken
is taken by a compiled call that has its place in the journal already, and the steps of an end are called from here.
"""

cimport cython

__all__ = ["Journal", "Made", "Participation", "run_all"]


cdef object call(object step):
    """Calls the step; returns what it raised, or None."""
    try:
        step()
    except BaseException as error:
        return error
    return None


def run_all(list steps not None):
    """Calls all of them, then raises what the first that failed raised.

    >>> done = []
    >>> run_all([lambda: done.append(1), lambda: done.remove(2), lambda: done.append(3)])
    Traceback (most recent call last):
    ValueError: list.remove(x): x not in list
    >>> done
    [1, 3]
    """
    cdef Py_ssize_t i
    failure = None
    for i in range(len(steps)):
        error = call(steps[i])
        if failure is None:
            failure = error
    if failure is not None:
        raise failure


@cython.final
@cython.auto_pickle(False)
cdef class Journal:
    """The steps that undo what was done since it began. Internal: see `Transaction`.

    >>> journal = Journal()
    >>> journal.add(1, lambda: print("the first"))
    >>> journal.add(2, lambda: print("the second"))
    >>> journal.undo()
    the second
    the first
    >>> journal.is_open
    False
    """

    cdef readonly bint is_open
    cdef list steps  # pairs of a time and a function, the times rising; None once it has ended

    def __cinit__(self):
        self.is_open = True
        self.steps = []

    def add(self, time, step):
        """Notes a step; `time` is later than those of all steps before."""
        self.steps.append((time, step))

    def perform(self, time, step, function, *arguments):
        """Calls the function and returns what it does. The step is noted before, and forgotten when that raises."""
        self.steps.append((time, step))
        try:
            return function(*arguments)
        except BaseException:
            self.steps.pop()
            raise

    def made(self, thing):
        """Whether it is what a step `Made` closes."""
        return any([isinstance(step, Made) and step.thing is thing for _, step in self.steps])

    def undo(self):
        """Ends it: calls its steps, the last first, all of them; then raises what the first that failed raised."""
        cdef list steps = self.steps
        cdef Py_ssize_t i
        self.is_open = False
        failure = None
        for i in range(len(steps) - 1, -1, -1):
            error = call((<tuple>steps[i])[1])
            if failure is None:
                failure = error
        self.steps = None
        if failure is not None:
            raise failure

    def keep(self, list last not None):
        """Ends it: forgets its steps and calls those of `last`, as `run_all` does."""
        self.is_open = False
        self.steps = None
        run_all(last)

    def merged(self, Journal outer not None):
        """The steps of both in the order of their times, but those of the participants of this one."""
        steps = [*outer.steps, *[pair for pair in self.steps if not isinstance(pair[1], Participation)]]
        steps.sort(key=_time_of)
        return steps

    def join(self, Journal outer not None, list merged not None, list last not None):
        """Ends it as `keep` does, when the one around it has taken its steps over."""
        outer.steps = merged
        self.keep(last)


def _time_of(pair):
    return pair[0]


@cython.final
@cython.auto_pickle(False)
cdef class Participation:
    """A step: something takes part in a transaction, once it has begun, and aborts. Internal.

    What has ended its transaction itself, as one that goes does, is left alone.
    """

    cdef readonly object participant
    cdef bint begun

    def __cinit__(self, participant):
        self.participant = participant

    def begin(self):
        """Begins, unless that raises."""
        self.participant.begin()
        self.begun = True

    def commit(self):
        """The participant's commit, once it has begun."""
        if self.begun:
            self.participant.commit()

    def __call__(self):
        if self.begun and self.participant.open_transactions:
            self.participant.abort()


@cython.final
@cython.auto_pickle(False)
cdef class Made:
    """A step: what was made within a transaction, once it is there, is closed. Internal."""

    cdef readonly object thing

    def make(self, function, *arguments):
        """Calls the function and keeps what it returns, which has a `close`; returns it."""
        self.thing = function(*arguments)
        return self.thing

    def __call__(self):
        if self.thing is not None:
            self.thing.close()

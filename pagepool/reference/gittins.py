"""The eviction policy "gittins" in plain Python. `pagepool/prefix/gittins.pyx` explains it.

A group holds the nodes of one kind that were last used by the same request, and the time of this use. Each node is a
member of one group. A member is in the list of the group, waits for its cached children, is held, or is a ghost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagepool.reference.policies import Lru, oldest

__all__ = ["AGES", "KINDS", "Gittins", "ReuseAges", "age_class", "first_age"]


KINDS, AGES = 8, 64


def age_class(age: int) -> int:
    """Return the class of an age, two classes per doubling: ages 1, 2, 3, 4-5, 6-7, 8-11, ...

    >>> [age_class(age) for age in (1, 2, 3, 4, 5, 6, 8, 12)]
    [0, 1, 2, 3, 3, 4, 5, 6]
    """
    octave = max(age, 1).bit_length() - 1
    return min(AGES - 1, 2 * octave - (age < 3 * 2**octave // 2)) if octave else 0


def first_age(number: int) -> float:
    """Return the first age of a class."""
    octave = (number + 1) // 2
    return 2.0**octave if number % 2 or not octave else 1.5 * 2.0**octave


class ReuseAges:
    """Counts of the ages at which nodes of each kind were used again or forgotten, and the values learnt from them."""

    FADE, SHARED = 0.97, 100.0

    def __init__(self) -> None:
        self.used = [[0.0] * AGES for _ in range(KINDS)]
        self.gone = [[0.0] * AGES for _ in range(KINDS)]
        self.value = [[1.0 / first_age(age) for age in range(AGES)] for _ in range(KINDS)]

    def learn(self, alive: list[list[float]]) -> None:
        """Compute the value of each age: the best ratio of hits to time over all later ages to wait for."""
        used, ended, total = [0.0] * AGES, [0.0] * AGES, 0.0
        for age in range(AGES):
            for kind in range(KINDS):
                used[age] += self.used[kind][age]
                ended[age] += self.gone[kind][age] + alive[kind][age]
            total += used[age] + ended[age]
        weight = self.SHARED / max(total, 1.0)
        for kind in range(KINDS):
            reused, waited, left = [0.0] * (AGES + 2), [0.0] * (AGES + 2), 0.0  # index: age + 1
            for age in reversed(range(AGES)):
                own_used = self.used[kind][age] + weight * used[age]
                own_ended = self.gone[kind][age] + alive[kind][age] + weight * ended[age]
                width = first_age(age + 1) - first_age(age)
                reused[age + 1] = own_used * first_age(age + 1)
                waited[age + 1] = left * width + (own_used + own_ended) * width * 0.5
                left += own_used + own_ended
            self.value[kind] = best_ratios(reused, waited)
            for age in range(AGES):
                self.used[kind][age] *= self.FADE
                self.gone[kind][age] *= self.FADE


def best_ratios(reused: list[float], waited: list[float]) -> list[float]:
    """Return the value of each age. The rate of reuse is smoothed over neighbouring ages (1/4, 1/2, 1/4)."""
    hits, time, hull, value = [0.0] * (AGES + 1), [0.0] * (AGES + 1), [AGES], [0.0] * AGES

    def slope(first: int, last: int) -> float:
        waited = time[last] - time[first]
        return (hits[last] - hits[first]) / waited if waited > 0.0 else 0.0

    for age in reversed(range(AGES)):
        rate = waited[age] + 2.0 * waited[age + 1] + waited[age + 2]
        if rate > 0.0:
            rate = (reused[age] + 2.0 * reused[age + 1] + reused[age + 2]) / (rate * first_age(age + 1))
        hits[age] = hits[age + 1] - rate * waited[age + 1]
        time[age] = time[age + 1] - waited[age + 1]
        while len(hull) > 1 and slope(age, hull[-1]) <= slope(hull[-1], hull[-2]):
            hull.pop()
        value[age] = slope(age, hull[-1])
        hull.append(age)
    return value


class ShadowLru:
    """Counts the hits that LRU would have, and decides when to follow LRU. See `pagepool/prefix/gittins.pyx`.

    `inside` holds the newest groups that fit the capacity, oldest first. They have `size` members in total.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.inside: dict[Group, None] = {}
        self.size = self.lead = self.base = self.most = self.pause = self.resume = 0
        self.hits = self.misses = self.forgotten = 0.0
        self.losing = self.idle = False
        self.followed = True

    def add(self, group: Group) -> None:
        """Add one member to a group."""
        self.size += group in self.inside
        while self.size > self.capacity:
            out: Group = oldest(self.inside)
            del self.inside[out]
            self.size -= len(out.members)

    def count(self, group: Group, here: bool) -> None:
        """Count a use of a node of the group. `here` is true if the node was cached."""
        self.lead += here - (group in self.inside)
        self.hits += group in self.inside
        self.misses += group not in self.inside

    def learn(self, fade: float) -> None:
        """Update `idle`: true if little can be gained over LRU. Assumes that a tenth of forgotten ghosts is reused."""
        self.idle = self.misses + 0.1 * self.forgotten < 0.03 * self.hits
        self.hits *= fade
        self.misses *= fade
        self.forgotten *= fade

    def follow(self, clock: int) -> bool:
        """Return true if LRU is followed in the next request. Called once per request."""
        if clock < 2 * self.capacity:
            self.base = self.most = self.lead
            return True
        if self.losing:
            if clock >= self.resume:
                self.losing = False
                self.base = self.most = self.lead
        elif not self.idle:
            self.most = max(self.most, self.lead)
            allowed = self.capacity // 10 + (self.most - self.base) // 4
            if self.most - self.lead > allowed:
                again = self.pause and self.most - self.base <= allowed
                self.pause = 2 * self.pause if again else 4 * self.capacity
                self.losing, self.resume = True, clock + self.pause
        return self.losing or self.idle


class Group:
    """`nodes` can be evicted and are ordered from head to tail of the prefix. `members` are all nodes of the group."""

    def __init__(self, kind: int, time: int) -> None:
        self.kind, self.time = kind, time
        self.nodes: dict[Any, None] = {}
        self.members: set[Any] = set()
        self.cell: tuple[int, int] | None = None


class Gittins(Lru):
    """Evicts from the tail of the group with the lowest value by kind and age. Chooses a group for 16 evictions."""

    GHOSTS, WAITING = range(2)
    BUDGET, LESSON, DOUBLINGS, CLEAR, NO_VALUE = 16, 2000, 6, 1.25, 1e-4

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 2)
        self.ages, self.shadow = ReuseAges(), ShadowLru(capacity)
        self.groups: dict[Group, None] = {}
        self.cells: dict[tuple[int, int], dict[Group, None]] = {}
        self.group: dict[Any, Group] = {}
        self.uses: dict[Any, tuple[int, bool]] = {}
        self.cached_children: dict[Any, int] = {}
        self.open: dict[int, Group] = {}
        self.last: Any = None
        self.continued = False
        self.clock, self.next_lesson, self.most_groups = 0, self.LESSON, 0
        self.victims: Group | None = None
        self.budget = 0

    def insert(self, node: Any) -> None:
        self.arrive(node)
        self.cached_children[node.parent] = self.cached_children.get(node.parent, 0) + 1
        self.link(node)

    def refuses(self, node: Any) -> bool:
        parent = node.parent
        if parent.parent is None or (parent.block is not None and self.victim() is not parent):
            return False
        self.arrive(node)
        self.into_ghosts(node)
        return True

    def touch(self, node: Any) -> None:
        self.tick(node)
        self.continued = True
        self.unlink(node)
        self.used(node, True)
        self.place_node(node)
        self.link(node)

    def victim(self) -> Any:
        while True:
            if self.victims is None or self.budget <= 0:
                self.victims, self.budget = self.choose(), self.BUDGET
                if self.victims is None:
                    return oldest(self.lists[self.WAITING]) if self.lists[self.WAITING] else None
            node = next(reversed(self.victims.nodes))
            if not self.cached_children.get(node):
                return node
            self.unlink(node)
            self.lists[self.WAITING][node] = None

    def evicted(self, node: Any) -> None:
        parent = node.parent
        self.budget -= 1
        self.unlink(node)
        self.cached_children[parent] -= 1
        if not self.cached_children[parent] and parent in self.lists[self.WAITING]:
            self.unlink(parent)
            self.link(parent)
        if self.last is node:
            self.last = None
        self.into_ghosts(node)

    def arrive(self, node: Any) -> None:
        """Make a node that was not cached a member of its group."""
        if node.parent is not self.last:
            self.continued = node.parent.block is not None
        self.tick(node)
        if node in self.lists[self.GHOSTS]:
            del self.lists[self.GHOSTS][node]
            self.used(node, False)
        else:
            self.uses[node] = 0, self.continued
        self.place_node(node)

    def into_ghosts(self, node: Any) -> None:
        """Remember a node without a block. Forgets the oldest ghost if there are too many."""
        ghosts = self.lists[self.GHOSTS]
        ghosts[node] = None
        if len(ghosts) > 4 * self.capacity:
            ghost = oldest(ghosts)
            del ghosts[ghost]
            group = self.group[ghost]
            self.ages.gone[group.kind][age_class(self.clock - group.time)] += 1.0
            self.shadow.forgotten += 1.0
            self.leave(ghost)

    def unlink(self, node: Any) -> None:
        if node in self.lists[self.WAITING]:
            del self.lists[self.WAITING][node]
            return
        group = self.group[node]
        del group.nodes[node]
        if not group.nodes:
            self.into_cell(group, None)
            if self.victims is group:
                self.victims = None

    def link(self, node: Any) -> None:
        group = self.group[node]
        if not group.nodes:
            self.into_cell(group, (group.kind, age_class(self.clock - group.time)))
        group.nodes[node] = None

    def linked(self) -> Iterable[Iterable[Any]]:
        return [self.lists[self.WAITING], *(group.nodes for group in self.groups)]

    def tick(self, node: Any) -> None:
        """Count one use. A new request begins if the parent of the node was not the node used just before."""
        self.clock += 1
        if self.clock >= self.next_lesson:
            alive = [[0.0] * AGES for _ in range(KINDS)]
            for group in self.groups:
                alive[group.kind][age_class(self.clock - group.time)] += len(group.members)
            self.ages.learn(alive)
            self.shadow.learn(self.ages.FADE)
            self.next_lesson = self.clock + max(self.LESSON, self.capacity // 8, self.most_groups // 4)
        if node.parent is not self.last:
            self.open.clear()
            followed, self.shadow.followed = self.shadow.followed, self.shadow.follow(self.clock)
            if self.shadow.followed != followed:
                self.victims = None
        self.last = node

    def place_node(self, node: Any) -> None:
        """Add the node to the group of its kind in the current request."""
        count, continued = self.uses[node]
        kind = 2 * (count - (count > 2)) + continued
        group = self.open.get(kind)
        if group is None:
            group = self.open[kind] = Group(kind, self.clock)
            self.groups[group] = self.shadow.inside[group] = None
            self.most_groups = max(self.most_groups, len(self.groups))
        group.members.add(node)
        self.shadow.add(group)
        self.group[node] = group

    def used(self, node: Any, here: bool) -> None:
        """Count another use of the node at the age of its group."""
        group = self.group[node]
        self.ages.used[group.kind][age_class(self.clock - group.time)] += 1.0
        self.shadow.count(group, here)
        count, continued = self.uses[node]
        self.uses[node] = min(4, count + 1), continued
        self.leave(node)

    def leave(self, node: Any) -> None:
        """Remove the node from its group."""
        group = self.group.pop(node)
        group.members.remove(node)
        self.shadow.size -= group in self.shadow.inside
        if not group.members:
            self.shadow.inside.pop(group, None)
            del self.groups[group]
            if self.open.get(group.kind) is group:
                del self.open[group.kind]

    def into_cell(self, group: Group, cell: tuple[int, int] | None) -> None:
        """Move a group to the end of a cell, or to its beginning if it is the oldest. None: to no cell."""
        if group.cell is not None:
            del self.cells[group.cell][group]
        group.cell = cell
        if cell is not None:
            groups = self.cells.setdefault(cell, {})
            if groups and group.time < oldest(groups).time:
                self.cells[cell] = {group: None} | groups
            else:
                groups[group] = None

    def choose(self) -> Group | None:
        """Return the longest unused group of the cell with the lowest value, or of all if LRU is followed.

        Moves groups to the cells of their present age first.
        """
        best: Group | None = None
        longest: Group | None = None
        least = longest_value = 0.0
        last = age_class(self.capacity) + 2 * self.DOUBLINGS
        for kind in range(KINDS):
            for age in range(AGES):
                while cell := self.cells.get((kind, age)):
                    first: Group = oldest(cell)
                    now = age_class(self.clock - first.time)
                    if now <= age:
                        break
                    self.into_cell(first, (kind, now))
                if not cell:
                    continue
                value = self.ages.value[kind][age]
                if value < self.NO_VALUE / max(1, self.capacity):
                    value = age - AGES if age <= last else -AGES - 1
                if longest is None or first.time < longest.time:
                    longest, longest_value = first, value
                if best is None or value < least or (value == least and first.time < best.time):
                    best, least = first, value
        return longest if self.shadow.followed or longest_value <= self.CLEAR * least else best

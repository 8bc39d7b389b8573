"""Which transfers of a compiled program could be hidden under a kernel, by what depends on what.

The program is run without numbers: loops are unrolled, and each value knows the last kernel and
all the transfers that it was made from. Kernels are counted in the order of the schedule. A
transfer can be hidden if a kernel lies strictly between the last one that its operands need and
the first one that needs its result. So the first keys that a ring sends can be, under the step with
the device's own; what the first kernel needs cannot be, nor what the last one leaves behind.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from farspan.plan.hlo import Step, is_kernel, steps
from farspan.plan.module import Computation, Instruction, Module, Visit, parse

Value = Any
"""The last kernel and the transfers (a bit each) of an array; a list of values for a tuple."""

_NOTHING = (0, 0)


@dataclasses.dataclass
class _Run:
    """One run of a transfer.

    Attributes:
      name: Its computation, and the instruction that starts it.
      after: The last kernel that its operands need; 0 if they need none.
      before: The first kernel that needs its result; None while there is none.
    """

    name: tuple[str, str]
    after: int
    before: int | None = None


def hideable_transfers(hlo: str) -> dict[tuple[str, str], int]:
    """Counts the runs of transfers that could be hidden under a kernel.

    Args:
      hlo: Text of the optimised module.

    Returns:
      By computation and name, as in `farspan.plan.hlo.Transfer`, for those that could be.
    """
    module = parse(hlo)
    flow = _Flow(module)
    (visit,) = [visit for visit in module.visits() if visit.computation is module.entry]
    flow.run(visit, [_NOTHING] * len(module.entry.instructions), _NOTHING)
    counts: dict[tuple[str, str], int] = {}
    for each in flow.runs:
        before = flow.kernels + 1 if each.before is None else each.before
        if before - each.after > 1:
            counts[each.name] = counts.get(each.name, 0) + 1
    return counts


class _Flow:
    """The run of a program, as described above."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._steps: dict[str, dict[str, list[Step]]] = {}
        self._busy: dict[str, bool] = {}
        self._open = 0  # transfers whose result no kernel has needed yet, a bit each
        self.kernels = 0
        self.runs: list[_Run] = []

    def run(self, visit: Visit, arguments: list[Value], control: Value) -> Value:
        """Runs a computation.

        Args:
          visit: The computation, and the place that calls it.
          arguments: Values of its parameters.
          control: What decides that it is run.

        Returns:
          The value of its result.
        """
        values: dict[str, Value] = {}
        begun: dict[str, int] = {}
        for found in visit.computation.instructions.values():
            operands = [values[name] for name in found.operands]
            if found.op == "parameter":
                result = arguments[found.index]
            elif found.op == "tuple":
                result = operands
            elif found.op == "get-tuple-element":
                whole = operands[0]
                result = whole[found.index] if isinstance(whole, list) else whole
            elif found.op == "while":
                result = self._loop(visit, found, operands[0], control)
            elif found.op == "conditional":
                result = self._branches(visit, found, operands, control)
            elif is_kernel(found):
                result = self._launch(_join(*operands, control))
            else:
                result = self._other(visit, found, operands, control, begun)
            values[found.name] = result
        return values[visit.computation.root.name]

    def _loop(self, visit: Visit, loop: Instruction, state: Value, control: Value) -> Value:
        (body,) = loop.called["body"]
        inside = next(
            inner for inner in self._module.called_by(visit, loop) if inner.computation.name == body
        )
        trips = inside.loops[-1]
        idle = not self._is_busy(inside.computation)
        for _ in range(1 if trips is None else trips):
            before, state = state, self.run(inside, [state], control)
            if idle and state == before:  # every further trip would leave it so
                break
        return state

    def _is_busy(self, inside: Computation) -> bool:
        """Whether a computation launches kernels or sends, itself or in what it calls."""
        if inside.name not in self._busy:
            self._busy[inside.name] = bool(self._steps_of(inside)) or any(
                is_kernel(found) or any(map(self._is_busy, self._module.callees(found)))
                for found in inside.instructions.values()
            )
        return self._busy[inside.name]

    def _branches(
        self, visit: Visit, found: Instruction, operands: list[Value], control: Value
    ) -> Value:
        """Runs each branch; the result depends on all, and on what decides between them."""
        decided = _join(operands[0], control)
        results = [
            self.run(inner, [operand], decided)
            for inner, operand in zip(
                self._module.called_by(visit, found), operands[1:], strict=True
            )
        ]
        return _join_each([*results, decided])

    def _launch(self, needs: tuple[int, int]) -> Value:
        self.kernels += 1
        ended = needs[1] & self._open
        self._open ^= ended
        while ended:
            number = ended.bit_length() - 1
            self.runs[number].before = self.kernels
            ended ^= 1 << number
        return self.kernels, needs[1]

    def _other(
        self,
        visit: Visit,
        found: Instruction,
        operands: list[Value],
        control: Value,
        begun: dict[str, int],
    ) -> Value:
        parts = self._steps_of(visit.computation).get(found.name, ()) if visit.control else ()
        for step in parts:
            needs = _join(*operands)
            if step.part in ("sync", "start"):
                begun[found.name] = len(self.runs)
                bit = 1 << len(self.runs)
                self.runs.append(_Run((visit.computation.name, found.name), needs[0]))
                self._open |= bit
                return needs[0], needs[1] | bit
            if found.op != "fusion":  # an update may bring the operands
                if step.part == "middle" and step.start in begun:
                    run = self.runs[begun[step.start]]
                    run.after = max(run.after, needs[0])
                return needs
        if found.op in ("fusion", "call"):
            (inner,) = self._module.called_by(visit, found)
            return self.run(inner, operands, control)
        return _join(*operands)

    def _steps_of(self, inside: Computation) -> dict[str, list[Step]]:
        """What the instructions of a schedule do for collectives, by name."""
        if inside.name not in self._steps:
            self._steps[inside.name] = {}
            for step in steps(self._module, inside):
                self._steps[inside.name].setdefault(step.instruction.name, []).append(step)
        return self._steps[inside.name]


def _join(*values: Value) -> tuple[int, int]:
    """What depends on all of these."""
    kernel, transfers = 0, 0
    for value in values:
        other = _join(*value) if isinstance(value, list) else value
        kernel, transfers = max(kernel, other[0]), transfers | other[1]
    return kernel, transfers


def _join_each(values: list[Value]) -> Value:
    """Joins values element by element; an array stands for every element of a tuple."""
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        return _join(*values)
    return [
        _join_each([value[n] if isinstance(value, list) else value for value in values])
        for n in range(len(lists[0]))
    ]

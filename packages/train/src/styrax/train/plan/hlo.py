"""Reads the text of a compiled program: computations, instructions, how often each is run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_SIZES = {"pred": 1, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name.
        shape: Text of its shape.
        opcode: What it does.
        operands: Names of what it reads; of a constant, its literal.
        rest: The attributes, as text.
        root: Whether it is what the computation returns.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def called(self, what: str) -> list[str]:
        """Names of the computations that an attribute names."""
        return [name for key, value in _CALLED.findall(self.rest) if key == what for name in _NAME.findall(value)]


@dataclass(frozen=True)
class Computation:
    """A named list of instructions.

    Attributes:
        name: Its name.
        instructions: By name, in order.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction | None:
        """What it returns."""
        return next((each for each in self.instructions.values() if each.root), None)

    def parameter(self, number: int) -> Instruction | None:
        """The parameter of that number."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter" and i.operands == (str(number),))
        return next(found, None)


@dataclass(frozen=True)
class Module:
    """A whole program.

    Attributes:
        computations: By name.
        entry: Name of the first one.
    """

    computations: dict[str, Computation]
    entry: str

    def runs(self) -> Iterator[Run]:
        """Give each computation that is run, once for each place that it is run from.

        What is inside a fusion counts as run as often as the fusion; the branches of a condition as run once each.
        """
        todo = [Run(self.entry, 1, None, None)]
        while todo:
            run = todo.pop()
            computation = self.computations.get(run.name)
            if computation is None:
                continue
            yield run
            for each in computation.instructions.values():
                if each.opcode == "while":
                    trips = trip_count(self, computation, each)
                    inner = None if run.times is None or trips is None else run.times * trips
                    todo += [Run(body, inner, None, None) for body in each.called("body")]
                elif each.opcode in _CALLERS:
                    names = [
                        n for key in ("calls", "branch_computations", "called_computations") for n in each.called(key)
                    ]
                    names += each.called("to_apply") if each.opcode.startswith("call") else []
                    todo += [Run(called, run.times, computation, each) for called in names]


@dataclass(frozen=True)
class Run:
    """A computation in a place that it is run from.

    Attributes:
        name: Of the computation.
        times: How often; None if a loop around it has no known end.
        outer: The computation that calls it, if it is no body of a loop.
        site: The instruction there.
    """

    name: str
    times: int | None
    outer: Computation | None
    site: Instruction | None


_CALLERS = ("fusion", "call", "call-start", "async-start", "fusion-start", "conditional", "custom-call")


def parse(text: str) -> Module:
    """Read a program.

    Args:
        text: Of ``compiled.as_text()``.

    >>> module = parse('''HloModule m
    ...
    ... ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %add = f32[4]{0} add(%p, %p)
    ... }
    ... ''')
    >>> module.entry, module.computations["main"].instructions["add"].operands
    ('main', ('p', 'p'))
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head and line.rstrip().endswith("{"):
                current = computations[head[2]] = Computation(head[2])
                entry = head[2] if head[1] else entry
            continue
        # What a kernel is compiled from may stand in several lines of its own, which also begin with braces.
        if line.rstrip() == "}" or line.startswith("}, execution_thread="):
            current = None
            continue
        found = _instruction(line)
        if found is not None:
            current.instructions[found.name] = found
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    body = line[start.end() :]
    shape, after = _split_shape(body)
    opcode, paren, _ = after.partition("(")
    if not paren:
        return None
    inside, rest = _balanced(after[len(opcode) :])
    names = tuple(_NAME.findall(inside)) if "%" in inside else tuple(p.strip() for p in inside.split(",") if p.strip())
    return Instruction(start[2], shape, opcode.strip(), names, rest, bool(start[1]))


def _split_shape(text: str) -> tuple[str, str]:
    if text.startswith("("):
        inside, rest = _balanced(text)
        return f"({inside})", rest.lstrip()
    shape, _, rest = text.partition(" ")
    return shape, rest.lstrip()


def _balanced(text: str) -> tuple[str, str]:
    """Cut text that begins with a parenthesis after the one that closes it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[1:place], text[place + 1 :]
    return text[1:], ""


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all of a tuple, without padding.

    >>> shape_bytes("(bf16[2,8]{1,0:T(8,128)(2,1)}, f32[]{:T(128)}, pred[3]{0}, s4[4]{0})")
    41
    """
    total = 0.0
    for kind, dims in _ARRAY.findall(shape):
        if kind in _SIZES:
            size = float(_SIZES[kind])
        else:
            bits = re.match(r"[a-z]+(\d+)", kind)
            if bits is None:
                continue
            size = int(bits[1]) / 8
        total += size * math.prod(int(n.lstrip("<=")) for n in dims.split(",") if n)
    return math.ceil(total)


def trip_count(module: Module, outer: Computation, loop: Instruction) -> int | None:
    """How often the body of a loop is run: as the compiler notes it, or as a counter is compared with a constant.

    None for a loop of another form, such as one that ends when something has converged.
    """
    if noted := _TRIPS.search(loop.rest):
        return int(noted[1])
    names = loop.called("condition")
    condition = module.computations.get(names[0]) if names else None
    root = condition.root if condition else None
    if condition is None or root is None:
        return None
    if root.opcode == "fusion" and len(root.called("calls")) == 1:  # a fused comparison of two of its operands
        inner = module.computations.get(root.called("calls")[0])
        compare = inner.root if inner else None
        if inner is None or compare is None or compare.opcode != "compare":
            return None
        numbers = [_parameter_number(inner, name) for name in compare.operands]
        sides = [None if number is None else root.operands[number] for number in numbers]
        rest = compare.rest
    elif root.opcode == "compare":
        sides, rest = list(root.operands), root.rest
    else:
        return None
    if "direction=LT" not in rest or len(sides) != 2 or None in sides:
        return None
    values = [_value(module, condition, str(side), outer, loop) for side in sides]
    begin, end = values
    if end is None:
        return None
    return max(0, end - (begin or 0))


def _parameter_number(computation: Computation, name: str) -> int | None:
    each = computation.instructions.get(name)
    return int(each.operands[0]) if each and each.opcode == "parameter" else None


def _value(
    module: Module, here: Computation, name: str, outer: Computation | None, loop: Instruction | None
) -> int | None:
    """The integer that an instruction has when the loop begins, if that is a constant."""
    each = here.instructions.get(name)
    if each is None:
        return None
    if each.opcode == "constant":
        return int(each.operands[0]) if re.fullmatch(r"-?\d+", each.operands[0]) else None
    if each.opcode in ("copy", "bitcast", "convert", "reshape") and len(each.operands) == 1:
        return _value(module, here, each.operands[0], outer, loop)
    if each.opcode == "get-tuple-element" and outer is not None and loop is not None:
        index = re.search(r"index=(\d+)", each.rest)
        source = here.instructions.get(each.operands[0])
        state = outer.instructions.get(loop.operands[0])
        if index and source and source.opcode == "parameter" and state and state.opcode == "tuple":
            return _value(module, outer, state.operands[int(index[1])], None, None)
    return None


def resolve(
    computation: Computation, name: str, through: Mapping[str, int] | None = None
) -> tuple[Instruction | None, int | None]:
    """Follow copies and parts of tuples back to what made an array.

    Returns:
        ``(instruction, index of the part of its result or None)``.
    """
    index = None
    for _ in range(64):
        each = computation.instructions.get(name)
        if each is None:
            return None, None
        if each.opcode in ("copy", "bitcast", "copy-done", "copy-start", "convert", "reshape", "transpose"):
            name = each.operands[0]
        elif each.opcode == "get-tuple-element" and index is None:
            found = re.search(r"index=(\d+)", each.rest)
            index, name = (int(found[1]) if found else None), each.operands[0]
            source = computation.instructions.get(name)
            if source is not None and source.opcode == "tuple" and index is not None:
                name, index = source.operands[index], None
        else:
            return each, index
    return None, None

"""What a pickle claims, a state dict or published data, found without unpickling anything.

``torch.load(weights_only=True)`` runs no foreign code, yet it allocates what a file asks for: a
kilobyte can name ``bytearray(10**12)``, a storage of a terabyte, a tensor of 10^9 elements over one,
or a dict key that overflows the stack when hashed. :class:`Machine` runs the same instructions over
inert values, knows only the few words that a state dict needs, and refuses everything else, so that
the real loader sees only files whose claims were checked. A subclass knows other words.

Work is counted: 1 for an instruction, ``CALL_WORK`` more for a call, and 1 for each entry that a call
or a ``BUILD`` copies. A file may ask for ``WORK_PER_BYTE`` per byte (those of torch.save ask for less
than 1) and for ``MAX_WORK`` in all: some 7500 tensors, two seconds and 100 MB, here and in torch.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NoReturn

import torch

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.records.inputs import is_size

MAX_PICKLE_BYTES = 4 << 20  # of a state dict without its numbers
MAX_WORK, WORK_PER_BYTE, CALL_WORK = 500_000, 2, 8  # as said above
FAR = 100  # bytes of an entry of a dict
TEXTS = {"SHORT_BINUNICODE": 1, "BINUNICODE": 4, "BINUNICODE8": 8}  # bytes of their length
OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
MAX_WIDE, WIDE = 1 << 20, re.compile(rb"[\xc4-\xff]")
MAX_DIMENSIONS, MAX_KEY = 16, 1000  # of a tensor; characters of a storage's name
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # begins the files that torch.save wrote before it used zip
EXPORT = (
    "Export the weights alone: torch.save(model.state_dict(), path), or "
    "safetensors.torch.save_file(model.state_dict(), path)."
)

KINDS = {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16}
KINDS |= {"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32}
KINDS |= {"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool}
KINDS |= {"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
STORAGES = {f"torch.{name}Storage": kind.itemsize for name, kind in KINDS.items()}
MALFORMED = (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error)
DTYPES = {f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64", "int64")}
UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without data (meta device)",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_tensor_v3": "a tensor of an unusual dtype",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass",
    "torch._tensor._rebuild_from_type_v2": "a tensor subclass",
    **dict.fromkeys(("torch.qint8", "torch.quint8", "torch.qint32"), "a quantized tensor"),
    **dict.fromkeys(("torch.QInt8Storage", "torch.QUInt8Storage"), "a quantized tensor"),
    **dict.fromkeys(("torch.per_tensor_affine", "torch.per_channel_affine"), "a quantized tensor"),
}


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of numbers that a pickle refers to by key; kind: of number, where it is of interest."""

    key: str
    numel: int
    itemsize: int
    kind: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that the block takes."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a pickle describes it: a window on a storage, checked to lie inside it."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        """The last element reached by sizes and strides must lie inside the storage, and sizes must not
        repeat it.

        Stride 0 would make a tensor of any size from one number: ``count > held`` refuses that too.
        """
        numbers = (self.offset, *self.size, *self.stride)
        if len(self.size) != len(self.stride) or not all(is_size(n) for n in numbers):
            raise ValueError("a tensor needs as many strides as sizes, none negative")
        if len(self.size) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has at most {MAX_DIMENSIONS} dimensions")
        count, held = math.prod(self.size), self.storage.numel
        steps = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((n - 1) * step for n, step in steps)
        if count > held or (count and last >= held):
            raise UnsafeFileError(
                f"A tensor must lie within its storage; one of shape {list(self.size)} claims "
                f"{max(count, last + 1)} elements and the file holds {held}.",
                "Save a full copy: {name: t.clone() for name, t in state.items()}.",
            )


@dataclass(frozen=True, slots=True)
class Word:
    """A global that a pickle names; nothing is imported.

    kind: HARMLESS, KNOWN, FOREIGN or UNLISTED (:mod:`.pickle_names`), if the reader judges names.
    """

    name: str
    kind: str = ""


class Machine:
    """Runs the instructions of a pickle over inert values and collects the storages it names.

    size: bytes of the pickles it will run, together; work: what they asked for so far.
    steps: the known instructions.
    calls: words that may be called, and what stands for each.
    words: those only named.
    kept: bytes that an instruction leaves in memory, where they are counted.
    """

    steps: ClassVar[Mapping[str, Callable[[Any, Any], None]]]
    calls: ClassVar[Mapping[str, Callable[..., Any]]]
    words: ClassVar[Collection[str]] = {*STORAGES, *DTYPES}
    kept: ClassVar[Mapping[str, int]] = {}

    def __init__(self, size: int) -> None:
        self.storages: dict[str, Storage] = {}
        self.work = 0
        self._allowed = min(MAX_WORK, WORK_PER_BYTE * size)
        self._forget()

    def _forget(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        # 8 bytes for each that is numbered in turn, as all usual ones are.
        self._memo: list[Any] = []
        self._far: dict[int, Any] = {}

    def run(self, stream: BinaryIO) -> Any:
        """The value that one pickle of ``stream`` describes; the stream is left behind it."""
        try:
            for name, argument in _instructions(stream):
                self.charge(1, self.kept.get(name, 0))
                if name == "STOP":
                    return self.stack.pop()
                if (step := self.steps.get(name)) is None:
                    self.refuse(f"the instruction {name}")
                step(self, argument)
        except MALFORMED as problem:
            raise CheckpointError(
                f"The file must hold a complete pickle of weights; it is damaged "
                f"({type(problem).__name__}: {str(problem)[:100]}).",
                "Copy or save the file again.",
            ) from problem
        finally:
            self._forget()
        raise CheckpointError("The pickle has no end; the file is truncated.", "Copy it again.")

    def charge(self, work: int, kept: int = 0) -> None:
        """Count work before it is done; this reader bounds memory by it as well."""
        self.work += work
        if self.work > self._allowed:
            raise UnsafeFileError(
                f"A pickle may ask for {WORK_PER_BYTE} steps of work per byte and {MAX_WORK} in all, "
                f"copies counted; this one asks for more than {self._allowed}.",
                EXPORT,
            )

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def _mark(self, _: None) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _above_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def _last(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def _put(self, index: int) -> None:
        if index == len(self._memo):
            self._memo.append(self.stack[-1])
        elif 0 <= index < len(self._memo):
            self._memo[index] = self.stack[-1]
        else:
            self.charge(0, FAR)
            self._far[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        near = 0 <= index < len(self._memo)
        self.push(self._memo[index] if near else self._far[index])

    def _append(self, items: list[Any]) -> None:
        expect(self.stack[-1], list).extend(items)

    def _set(self, items: list[Any]) -> None:
        target = expect(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def _word(self, argument: str) -> None:
        """A name that the pickle asks for: known words become stand-ins, any other is refused before it is
        used.
        """
        name = argument.replace(" ", ".")
        if name in UNSUPPORTED:
            raise CheckpointError(
                f"Weights must be dense tensors of real numbers; the file holds {UNSUPPORTED[name]}.",
                "Convert it before saving, e.g. with .to_dense() or .dequantize().",
            )
        if name not in self.calls and name not in self.words:
            self.refuse(name)
        self.push(Word(name))

    def _call(self, _: None) -> None:
        word, arguments = self._last(2)
        expect(word, Word)
        if word.name not in self.calls:
            self.refuse(f"a call of {word.name}")
        copied = [a for a in expect(arguments, tuple) if type(a) in (dict, list, tuple)]
        self.charge(CALL_WORK + len(arguments) + sum(map(len, copied)))
        self.push(self.calls[word.name](*arguments))

    def _build(self, _: None) -> None:
        """Attributes of an ordered dict, such as a state dict's versions; they are dropped."""
        self.charge(CALL_WORK + len(expect(self.stack.pop(), dict)))
        expect(self.stack[-1], dict)

    def refuse(self, what: str) -> NoReturn:
        """Say what the pickle needs that it may not have."""
        raise CheckpointError(
            f"A checkpoint may hold only tensors and plain values; this one needs {what[:200]!r}, "
            "which residuum does not read.",
            EXPORT,
        )

    def _persistent(self, _: None) -> None:
        claim = expect(self.stack.pop(), tuple)
        self.charge(CALL_WORK + len(claim))
        kind, word, key, _location, numel, *views = claim
        if kind != "storage" or not is_size(numel) or any(v is not None for v in views):
            raise ValueError("a storage reads ('storage', type, key, location, size)")
        storage = Storage(expect(_key(key), str), numel, STORAGES[expect(word, Word).name])
        if self.storages.setdefault(storage.key, storage) != storage:
            raise UnsafeFileError(
                f"A storage has one size; {key!r} is claimed with two.", "Save the weights again."
            )
        self.push(storage)


def _instructions(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Names and arguments, as ``pickletools.genops``, which would decode any text without a bound."""
    while code := stream.read(1):
        opcode = OPCODES[code.decode("latin-1")]
        if opcode.name in TEXTS:
            yield opcode.name, _text(stream, TEXTS[opcode.name])
        else:
            yield opcode.name, None if opcode.arg is None else opcode.arg.reader(stream)


def _text(stream: BinaryIO, width: int) -> str:
    """One letter beyond Latin-1 makes Python take two or four bytes for each: none in a long text."""
    count = int.from_bytes(stream.read(width), "little")
    raw = stream.read(count)
    if len(raw) < count:
        raise ValueError("it ends within a text")
    if len(raw) > MAX_WIDE and WIDE.search(raw):
        raise ValueError(f"a text of more than {MAX_WIDE} bytes is of Latin letters")
    return str(raw, "utf-8", "surrogatepass")


def _rebuild_tensor(
    storage: Storage, offset: int, size: Any, stride: Any, grad: bool, hooks: Any, extra: Any = None
) -> View:
    if hooks or extra:
        raise ValueError("hooks and conjugate views cannot be read")
    expect(grad, bool)
    expect(storage, Storage)
    return View(storage, offset, expect(size, tuple), expect(stride, tuple))


def _rebuild_parameter(data: View, grad: bool, hooks: Any) -> View:
    if hooks:
        raise ValueError("hooks cannot be read")
    expect(grad, bool)
    return expect(data, View)


def _size(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(expect(numbers, tuple, list)) > MAX_DIMENSIONS or not all(map(is_size, numbers)):
        raise ValueError(f"a size has at most {MAX_DIMENSIONS} numbers, none negative")
    return tuple(numbers)


def _key(value: Any) -> str | int:
    """A short text or a number of one word, so that hashing and comparing it takes no time.

    Nested tuples overflow the stack, multiples of 2^61 - 1 have one hash, long texts that are equal
    are compared in full.
    """
    if type(value) is str and len(value) <= MAX_KEY:
        return value
    if type(value) is int and abs(value) < 2**60:
        return value
    raise ValueError(f"a key is a number below 2^60 or a text of at most {MAX_KEY} characters")


def expect(value: Any, *kinds: type) -> Any:
    """The value, of one of these very classes."""
    if type(value) not in kinds:
        raise ValueError(f"{type(value).__name__} where {kinds[0].__name__} belongs")
    return value


Machine.steps = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "NONE"), Machine.push),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "MARK": Machine._mark,
    "TUPLE": lambda machine, _: machine.push(tuple(machine._above_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine._last(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine._last(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine._last(3))),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Machine._put),
    "MEMOIZE": lambda machine, _: machine._put(len(machine._memo) + len(machine._far)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Machine._get),
    "APPEND": lambda machine, _: machine._append(machine._last(1)),
    "APPENDS": lambda machine, _: machine._append(machine._above_mark()),
    "SETITEM": lambda machine, _: machine._set(machine._last(2)),
    "SETITEMS": lambda machine, _: machine._set(machine._above_mark()),
    # By name: another reader does these otherwise.
    "GLOBAL": lambda machine, argument: machine._word(argument),
    "STACK_GLOBAL": lambda m, _: m._word(" ".join(expect(part, str) for part in m._last(2))),
    "REDUCE": lambda machine, _: machine._call(None),
    "BUILD": lambda machine, _: machine._build(None),
    "BINPERSID": lambda machine, _: machine._persistent(None),
}
Machine.calls = {
    "collections.OrderedDict": lambda: {},
    "collections.Counter": lambda counts: dict(expect(counts, dict)),
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch.Size": _size,
    "torch.device": lambda kind, index=0: (expect(kind, str), expect(index, int)),
}

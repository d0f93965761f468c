"""Read any pickle as a tree of inert values (:mod:`.inert`).

``torch.save``, ``pickle.dump`` and ``joblib.dump`` write the same language: words (classes and
functions), calls of them, and values between. :class:`PickleReader` runs it with a stand-in for each word.
So a release can be looked through without trusting it.

The reader counts work and memory before it uses them. A file may ask for ``MAX_WORK`` steps: 1 for an
instruction, more for a call, and 1 for each entry that is copied. Its small objects may take
``MAX_OBJECT_BYTES`` and the size of the file. A scan thus needs at most 50 MB plus twice the unpacked size.

The reader also collects what loading the file with ``pickle`` would do beyond making values.
``PickleReader.unsafe`` lists calls of functions that are not known to be harmless (:mod:`.pickle_names`).
``PickleReader.foreign`` lists classes and functions of other packages that the file names.

Why not ``pickle.Unpickler`` with inert classes, in a child process with a memory limit? We built it and
measured it. It shows calls but not plain instructions. Dict keys that hash forever and containers without
end can then only be stopped by time and memory limits, which differ between machines and are missing on
Windows and macOS. joblib loads with another unpickler, which runs code behind an instruction that the C
unpickler refuses. Sending the tree back breaks the memory bound above. Each file costs 25 ms instead of 0.4.
Three tests of hostile files fail.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.inert import (
    KINDS,
    STORAGES,
    Block,
    GlobalName,
    InertObject,
    Opaque,
    Storage,
    View,
    expect_type,
    make_key,
)
from residuum.io.numpy_arrays import NumpyDtype, read_array, read_dtype, read_scalar
from residuum.io.pickle_names import (
    BASES,
    CONTAINERS,
    FOREIGN,
    HARMLESS,
    MAKE_ARRAY,
    MAKE_INSTANCE,
    STORAGE,
    UNLISTED,
    classify_name,
    is_trusted,
    modernize_module,
)
from residuum.records.inputs import is_size

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # begins the files that torch.save wrote before it used zip
MAX_WORK, MAX_OBJECT_BYTES = 1_000_000, 48 << 20  # instructions, and bytes of small objects
# Bytes of Python's objects: a list or tuple with its place among those seen; a dict; an entry of it; a
# bytes besides themselves; a number; a word; what a call leaves, such as a tensor with its view.
HOLDER, DICT, ENTRY, BYTES, NUMBER, NAMED, CALLED = 160, 260, 64, 64, 32, 300, 500
MAX_BITS = 1000  # of a whole number: longer ones cannot be printed
MAX_INSIDE = 8  # pickles inside of arrays inside of pickles
REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"  # calls its first argument with the third
# Attributes that ``pickle`` looks up on an object and calls.
HOOKS = {"__setstate__", "append", "extend", "add"}
# The text that scipy.stats runs when it loads a distribution, as scipy writes it.
SLOT = r"[\w=, ]*"
TEMPLATE = re.compile(
    rf"\s*def _parse_args\(self, {SLOT}\):\n    return \({SLOT}\), {SLOT}\n\n"
    rf"def _parse_args_rvs\(self, {SLOT}\):\n    return self\._argcheck_rvs\({SLOT}\)\n\n"
    rf"def _parse_args_stats\(self, {SLOT}moments='mv'\):\n    return \({SLOT}\), {SLOT}\n?"
)
SPARSE_MEMO_BYTES = 100  # bytes of an entry of a dict
TEXTS = {"SHORT_BINUNICODE": 1, "BINUNICODE": 4, "BINUNICODE8": 8}  # bytes of their length
OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
MAX_WIDE_TEXT, NON_LATIN = 1 << 20, re.compile(rb"[\xc4-\xff]")
MALFORMED = (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error)


def make_unsafe_error(unsafe: Iterable[str]) -> UnsafeFileError:
    """Return the error for a file that would run code, by ``PickleReader.unsafe``."""
    deeds = list(unsafe)
    more = f" and {len(deeds) - 3} more" if len(deeds) > 3 else ""
    return UnsafeFileError(
        "Loading a model may only call known constructors; loading this file would "
        f"{', '.join(deeds[:3])}{more}.",
        "Do not load it. Ask its author for the weights as safetensors.",
    )


class PickleReader:
    """Run the instructions of a pickle over inert values.

    Args:
        read_storage: Returns the bytes of a storage of torch.
        joblib: Whether the numbers of joblib's arrays follow in the stream, as ``joblib.load`` reads it.

    Attributes:
        storages: The storages of torch that the pickle names, by key.
        unsafe: What loading the file would do, such as "call os.system", in order.
        foreign: Names in packages that are neither Python's own nor listed.
        has_joblib_arrays: Whether an array of joblib was read.
        work: Instructions so far, copies counted.
        held: Bytes of small objects so far.
    """

    steps: ClassVar[Mapping[str, Callable[[Any, Any], None]]]  # by the name of the instruction
    calls: ClassVar[
        Mapping[str, Callable[..., Any]]
    ]  # stand-ins of the functions that may be called
    kept: ClassVar[Mapping[str, int]]  # bytes that an instruction leaves in memory

    def __init__(
        self, read_storage: Callable[[Storage], bytearray] | None = None, *, joblib: bool = True
    ) -> None:
        self.joblib, self.has_joblib_arrays = joblib, False
        self.storages: dict[str, Storage] = {}
        self.unsafe: dict[str, None] = {}
        self.foreign: dict[str, None] = {}
        self.work = self.held = 0
        self._read_storage = read_storage
        self._hooked: dict[int, Any] = {}
        self._embedded: dict[str, memoryview] = {}
        self._stream: BinaryIO | None = None
        self._inside = 0
        self._named: dict[str, GlobalName] = {}
        self._encoded = 0
        self._forget()

    def _forget(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        # 8 bytes for each that is numbered in turn, as all usual ones are.
        self._memo: list[Any] = []
        self._far: dict[int, Any] = {}

    def run(self, stream: BinaryIO) -> Any:
        """Return the tree of one pickle. The stream is left behind it.

        Raises:
            CheckpointError: If the pickle is damaged.
            UnsafeFileError: If it asks for too much, or if it is damaged behind a call of an unknown
                function.
        """
        outer, self._stream = self._stream, stream
        try:
            return self._run(stream)
        except CheckpointError as problem:
            if not self.unsafe:
                raise
            raise make_unsafe_error(self.unsafe) from problem
        finally:
            self._stream = outer

    def _run(self, stream: BinaryIO) -> Any:
        try:
            for name, argument in _read_instructions(stream):
                self.charge(1, self.kept.get(name, 0))
                if name == "STOP":
                    return self.stack.pop()
                if (step := self.steps.get(name)) is None:
                    raise ValueError(f"the instruction {name} is not known")
                step(self, argument)
        except MALFORMED as problem:
            raise CheckpointError(
                f"The file must hold a complete pickle; it is damaged "
                f"({type(problem).__name__}: {str(problem)[:100]}).",
                "Copy or save the file again.",
            ) from problem
        finally:
            self._forget()
        raise CheckpointError("The pickle has no end; the file is truncated.", "Copy it again.")

    def charge(self, work: int, kept: int = 0) -> None:
        """Count work and memory before they are taken."""
        self.work += work
        self.held += kept
        if self.work > MAX_WORK or self.held > MAX_OBJECT_BYTES + getattr(self._stream, "taken", 0):
            raise UnsafeFileError(
                f"A pickle may ask for {MAX_WORK} steps of work, copies counted, and "
                f"{MAX_OBJECT_BYTES >> 20} MB of small objects; this one asks for more.",
                "Scan a smaller model, or the parts of this one.",
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
            self.charge(0, SPARSE_MEMO_BYTES)
            self._far[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        near = 0 <= index < len(self._memo)
        self.push(self._memo[index] if near else self._far[index])

    def _text(self, value: str) -> None:
        """Letters beyond Latin-1 take two or four bytes each, of which the file has at least one."""
        self.charge(0, sys.getsizeof(value) - len(value))
        self.push(value)

    def _whole_number(self, value: int) -> None:
        self.push(value if value.bit_length() <= MAX_BITS else Opaque())

    def _dict(self, items: list[Any]) -> None:
        self.push({})
        self._set(items)

    def _word(self, argument: str) -> None:
        self.push(self._judged(*argument.partition(" ")[::2]))

    def _judged(self, module: str, attribute: str) -> GlobalName:
        """Return the stand-in of a name, and note what the name tells."""
        module = modernize_module(module)
        name = f"{module}.{attribute}"
        if not module or not attribute or len(name) > 300:
            raise ValueError("a word has at most 300 characters")
        if (word := self._named.get(name)) is None:
            self.charge(0, 2 * NAMED)
            word = self._named[name] = GlobalName(name, classify_name(module, attribute))
            if word.kind == UNLISTED:
                self.unsafe[f"use {name}"] = None
            elif word.kind == FOREIGN:
                self.foreign[name] = None
        return word

    def _flag(self, deed: str) -> None:
        """Note what loading the file would do."""
        self.charge(0, NAMED)
        self.unsafe[deed[:200]] = None
        if deed.startswith("call "):  # it need not be said that the name is used as well
            self.unsafe.pop(f"use {deed.removeprefix('call ')}", None)

    def _flag_call(self, called: Any) -> None:
        self._flag(
            f"call {called.name if isinstance(called, GlobalName) else 'what another call returned'}"
        )

    def _call(self, _: None) -> None:
        word, arguments = self._last(2)
        self.push(self._made(word, expect_type(arguments, tuple)))

    def _new(self, _: None) -> None:
        word, arguments = self._last(2)
        self.push(self._instance(word, expect_type(arguments, tuple)))

    def _new_with_names(self, _: None) -> None:
        word, arguments, named = self._last(3)
        instance = self._instance(word, expect_type(arguments, tuple))
        if isinstance(instance, InertObject):
            instance.entries = expect_type(named, dict)
        self.push(instance)

    def _inst(self, argument: str) -> None:
        arguments = tuple(self._above_mark())
        self.push(self._made(self._judged(*argument.partition(" ")[::2]), arguments))

    def _obj(self, _: None) -> None:
        word, *arguments = self._above_mark()
        self.push(self._made(word, tuple(arguments)))

    def _instance(self, word: Any, arguments: tuple[Any, ...] = ()) -> Any:
        """Return the stand-in of an object that is made without a call of its class."""
        if not isinstance(word, GlobalName) or word.kind == HARMLESS:
            return self._made(word, arguments)
        self.charge(8, CALLED)
        # numpy.memmap and others of numpy open a file when their __new__ is given arguments.
        if word.kind == UNLISTED or (arguments and word.name.startswith("numpy.")):
            self._flag_call(word)
        return InertObject(word.name, arguments)

    def _made(self, word: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what a call would return. A call of an unknown function is noted."""
        self.charge(8, CALLED)
        if not isinstance(word, GlobalName) or word.kind != HARMLESS:
            self._flag_call(word)
            return InertObject(word.name if isinstance(word, GlobalName) else "?", arguments)
        name = word.name
        if name in MAKE_INSTANCE:
            return self._made_of_class(name, *arguments)
        if name == "builtins.getattr":
            return self._attribute(*arguments)
        if name == REBUILD_FROM_TYPE:
            if isinstance(arguments[0], GlobalName) and arguments[0].name == REBUILD_FROM_TYPE:
                raise ValueError("a tensor is rebuilt from its type once")
            return self._made(arguments[0], expect_type(arguments[2], tuple))
        self._check_arguments(word, arguments)
        if name == "torch._utils._rebuild_parameter_with_state":
            return arguments[0]
        if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            return self._tensor(*arguments[:4])
        if name == "torch.storage._load_from_bytes":
            return self._embedded_storage(*arguments)
        is_text = bool(arguments) and type(arguments[0]) is str
        if name == "_codecs.encode" or (name == "builtins.bytearray" and is_text):
            return self._bytes(*arguments)
        if (stand_in := self.calls.get(name)) is None:
            return InertObject(name, arguments)
        copied = sum(len(a) for a in arguments if type(a) in (list, tuple, dict))
        self.charge(copied, ENTRY * copied)
        result = stand_in(*arguments)
        self.charge(len(result) // 64 if type(result) is str else 0)
        return result

    def _check_arguments(self, word: GlobalName, arguments: tuple[Any, ...]) -> None:
        """Note arguments that a harmless function would run: it may call or iterate over them."""
        for argument in arguments:
            if isinstance(argument, GlobalName) and word.name not in MAKE_ARRAY:
                if argument.kind in (FOREIGN, UNLISTED):
                    self._flag_call(argument)
            elif isinstance(argument, InertObject):
                if word.name in CONTAINERS or not is_trusted(argument.name):
                    self._flag(f"call {word.name} with a {argument.name}")
            elif word.name in CONTAINERS and type(argument) in (list, tuple):
                self.charge(len(argument))
                if word.name in PAIRS and any(isinstance(part, InertObject) for part in argument):
                    self._flag(f"call {word.name} with an object")
        is_bytes = word.name in ("builtins.bytes", "builtins.bytearray") and bool(arguments)
        if is_bytes and type(arguments[0]) not in (bytes, bytearray, str):
            self._flag_call(word)  # a number of bytes, which would be allocated

    def _made_of_class(self, name: str, cls: Any, *others: Any) -> Any:
        """Return an instance that a function such as ``copyreg._reconstructor`` makes of a class."""
        if isinstance(cls, GlobalName) and cls.name in MAKE_INSTANCE:
            raise ValueError("an instance is made of a class")
        if name == "copyreg.__newobj__":
            return self._instance(cls, others)
        if name != "copyreg._reconstructor":
            instance = self._instance(cls)
            if isinstance(instance, InertObject):
                instance.arguments = others
            return instance
        base, *state = others
        if not isinstance(base, GlobalName) or base.name not in BASES:
            self._flag_call(base)  # its __init__ is called
        return self._instance(cls, tuple(part for part in state if part is not None))

    def _attribute(self, owner: Any, name: Any, *_: Any) -> Any:
        """Return the name of an attribute of a class or a module, or a stand-in of an object's method."""
        if not isinstance(owner, GlobalName):
            is_known = isinstance(owner, InertObject) and is_trusted(owner.name)
            if not is_known or expect_type(name, str).startswith("__"):
                self._flag("call builtins.getattr")
            return InertObject("?", (owner, name))
        module, attribute = owner.name.rpartition(".")[::2]
        return self._judged(module, f"{attribute}.{expect_type(name, str)}")

    def _inner(self) -> PickleReader:
        """Return a reader for a pickle inside of this one, which shares what was counted and noted."""
        inner = type(self)(joblib=self.joblib)
        inner.work, inner.held, inner._inside = self.work, self.held, self._inside + 1
        inner.unsafe, inner.foreign, inner._named = self.unsafe, self.foreign, self._named
        if inner._inside > MAX_INSIDE:
            raise ValueError("pickles lie inside of each other")
        return inner

    def _embedded_storage(self, raw: Any) -> Any:
        """A storage as ``pickle.dump`` writes it: a file of torch's legacy format in bytes."""
        inner, stream = self._inner(), io.BytesIO(expect_type(raw, bytes))
        if not raw.startswith(b"\x80") or inner.run(stream) != LEGACY_MAGIC:
            self._flag("call torch.load")
            return InertObject("torch.storage.UntypedStorage")
        for _ in range(2):  # the protocol, and what the writing machine was like
            inner.run(stream)
        storage, keys = inner.run(stream), inner.run(stream)
        self.work, self.held = inner.work, inner.held
        if expect_type(storage, Storage).key not in expect_type(keys, list) or len(keys) != 1:
            raise ValueError("a storage lists its own key")
        start = stream.tell() + 8  # behind the number of elements
        numbers = memoryview(raw)[start : start + storage.nbytes]  # no copy: calls can be many
        if len(numbers) != storage.nbytes:
            raise ValueError("a storage must be in the file in full")
        key = f"{storage.key} of {len(self._embedded)}"
        self._embedded[key] = numbers
        return Storage(key, storage.numel, storage.itemsize, storage.kind)

    def _bytes_of(self, storage: Storage) -> bytearray | memoryview:
        if storage.key in self._embedded:
            return self._embedded[storage.key]
        if self._read_storage is None:
            raise ValueError("a storage must be in the file")
        return self._read_storage(storage)

    def _bytes(self, text: Any, encoding: Any = "latin1") -> bytes:
        """How protocol 2 writes bytes; the copy is as long as the text was in the file."""
        if encoding not in ("latin1", "latin-1"):
            self._flag("call _codecs.encode with another encoding than latin1")
        self._encoded += len(expect_type(text, str))
        if self._encoded > getattr(self._stream, "taken", 0):
            raise UnsafeFileError("A pickle may write each of its bytes once.", "Save it again.")
        return text.encode("latin1")

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Block:
        """A tensor as a block: its shape is known at once, its numbers are read when somebody asks.

        The view is checked to lie inside its storage before anything of its size is made.
        """
        view = View(expect_type(storage, Storage), offset, tuple(size), tuple(stride))
        kind, bytes_of = KINDS.get(storage.kind), self._bytes_of
        read: Callable[[], Tensor] | None = None
        if kind is not None:
            dtype = kind

            def numbers() -> Tensor:
                if not view.storage.numel:
                    return torch.zeros(view.size, dtype=dtype)
                raw = bytes_of(view.storage)
                owned = raw if isinstance(raw, bytearray) else bytearray(raw)
                whole = torch.frombuffer(owned, dtype=dtype)
                return whole.as_strided(view.size, view.stride, view.offset).clone()

            read = numbers
        named = str(kind).removeprefix("torch.") if kind else storage.kind
        return Block(view.size, named, read, name=storage.key)

    def _persistent(self, _: None) -> None:
        """A storage, claimed by key and size; the same key with another size is refused.

        Its numbers lie elsewhere in the file: here only the claim is kept, and the file is later held
        to it.
        """
        claim = expect_type(self.stack.pop(), tuple)
        self.charge(8)
        if claim[0] == "module" and len(claim) == 4:  # a class, with its source for a comparison
            self.push(expect_type(claim[1], GlobalName))
            return
        _kind, word, key, _location, numel = claim[:5]
        name = expect_type(word, GlobalName).name.rpartition(".")[2].removesuffix("Storage")
        itemsize = STORAGES.get(f"torch.{name}Storage", 1)
        is_storage = STORAGE.fullmatch(word.name)
        if not is_storage or not is_size(numel) or len(expect_type(key, str)) > 1000:
            raise ValueError("a storage reads ('storage', type, key, location, size)")
        storage = Storage(key, numel, itemsize, name)
        if self.storages.setdefault(key, storage) != storage:
            raise UnsafeFileError(
                f"A storage has one size; {key[:80]!r} is claimed with two.", "Save it again."
            )
        self.push(storage)

    def _build(self, _: None) -> None:
        """State given to a stand-in: numpy's kinds and arrays are understood, everything else is kept as
        it came.

        Nothing is called. Arrays of joblib follow their pickle in the stream and are read from there.
        """
        state, target = self.stack.pop(), self.stack[-1]
        self._check_hooks(target)
        self._find_hooks(target, state if isinstance(state, tuple) else (state,))
        if isinstance(target, NumpyDtype):
            parts = expect_type(state, tuple)
            if len(parts) > 3 and parts[3] is not None:
                self.stack[-1] = target  # a structured kind: only its size is known
                target.code = f"V{parts[5]}" if is_size(parts[5]) else target.code
            target.order = parts[1] if parts[1] in ("<", ">") else "<"
        elif isinstance(target, Block):
            _version, shape, kind, fortran, raw = expect_type(state, tuple)
            read_array(raw, kind, shape, bool(fortran), target)
        elif isinstance(target, InertObject):
            target.state = state
            if target.name.startswith("scipy.stats."):
                text = target.attributes.get("_parse_arg_template", "")
                if text and not (isinstance(text, str) and TEMPLATE.fullmatch(text)):
                    self._flag(f"run a text as code, through {target.name}")
            if (
                target.class_name == "NumpyArrayWrapper"
                and self.joblib
                and ".joblib" in f".{target.name}"
            ):
                self.stack[-1] = self._joblib_array(target.attributes)
            elif target.class_name in ("NDArrayWrapper", "ZNDArrayWrapper"):
                raise CheckpointError(
                    "A file of joblib must hold its arrays; this one is from a version before 0.10, "
                    "which wrote them into other files.",
                    "Load it with the joblib that wrote it, and save it again.",
                )

    def _joblib_array(self, said: dict[str, Any]) -> Block:
        """The numbers follow in the stream, after a few bytes of padding."""
        stream, shape, kind = self._stream, said.get("shape"), said.get("dtype")
        assert stream is not None
        self.has_joblib_arrays = True
        if isinstance(kind, NumpyDtype) and kind.code[0] == "O":
            inner = self._inner()
            array = inner.run(stream)
            self.work, self.held = inner.work, inner.held
            return expect_type(array, Block)
        if said.get("numpy_array_alignment_bytes") is not None:
            stream.read(stream.read(1)[0])
        if not isinstance(kind, NumpyDtype):
            raise ValueError("an array of joblib needs a plain kind")
        if not all(map(is_size, expect_type(shape, tuple))):
            raise ValueError("no size of an array is negative")
        raw = stream.read(math.prod(shape) * kind.itemsize)  # type: ignore[arg-type]
        return read_array(raw, kind, shape, said.get("order") == "F")

    def _append(self, items: list[Any]) -> None:
        self.charge(0, 9 * len(items))  # lists grow by an eighth more than they need
        target = self.stack[-1]
        self._check_hooks(target)
        (target.items if isinstance(target, InertObject) else expect_type(target, list)).extend(
            items
        )

    def _set(self, items: list[Any]) -> None:
        self.charge(0, ENTRY * (len(items) // 2))
        target = self.stack[-1]
        self._check_hooks(target)
        entries = target.entries if isinstance(target, InertObject) else expect_type(target, dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            entries[make_key(key)] = value
        if isinstance(target, InertObject):  # some dicts have their entries as attributes
            self._find_hooks(target, (target.entries,))

    def _find_hooks(self, target: Any, states: tuple[Any, ...]) -> None:
        """Remember objects with attributes that a later instruction would call."""
        if any(isinstance(state, dict) and any(h in state for h in HOOKS) for state in states):
            self.charge(0, ENTRY)
            self._hooked[id(target)] = target

    def _check_hooks(self, target: Any) -> None:
        """Note a change of a class or module, and calls of attributes that the file has set."""
        if isinstance(target, GlobalName):
            self._flag(f"change {target.name}")
        elif id(target) in self._hooked:
            self._flag("call an attribute that the file sets")

    def _pop(self, _: None) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._above_mark()

    def _no_more(self, _: Any) -> None:
        raise CheckpointError(
            "A pickle must be whole; this one refers to buffers or objects outside of it.",
            "Save it again with pickle.dump(model, file).",
        )


def _read_instructions(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Names and arguments, as ``pickletools.genops``, which would decode any text without a bound."""
    while code := stream.read(1):
        opcode = OPCODES[code.decode("latin-1")]
        if opcode.name in TEXTS:
            yield opcode.name, _read_text(stream, TEXTS[opcode.name])
        else:
            yield opcode.name, None if opcode.arg is None else opcode.arg.reader(stream)


def _read_text(stream: BinaryIO, width: int) -> str:
    """One letter beyond Latin-1 makes Python take two or four bytes for each: none in a long text."""
    count = int.from_bytes(stream.read(width), "little")
    raw = stream.read(count)
    if len(raw) < count:
        raise ValueError("it ends within a text")
    if len(raw) > MAX_WIDE_TEXT and NON_LATIN.search(raw):
        raise ValueError(f"a text of more than {MAX_WIDE_TEXT} bytes is of Latin letters")
    return str(raw, "utf-8", "surrogatepass")


def _read_pairs(pairs: Any = (), *_: Any) -> dict[Any, Any]:
    """``OrderedDict([[key, value], ...])``, or of nothing."""
    if isinstance(pairs, dict):
        return pairs
    found: dict[Any, Any] = {}
    for pair in pairs if isinstance(pairs, list | tuple) else ():
        if isinstance(pair, list | tuple) and len(pair) == 2:
            found[make_key(pair[0])] = pair[1]
    return found


def _plain_list(*arguments: Any) -> Any:
    first = arguments[0] if arguments else []
    return first if isinstance(first, list | tuple) else list(arguments)


BYTE_STRINGS = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
TEXT_STRINGS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", *TEXTS)
PAIRS = ("builtins.dict", "collections.OrderedDict", "collections.Counter")
PATHS = ("PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath", "Path")
PickleReader.steps = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda reader, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), PickleReader.push),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "NONE"), PickleReader.push
    ),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "MARK": PickleReader._mark,
    "TUPLE": lambda reader, _: reader.push(tuple(reader._above_mark())),
    "TUPLE1": lambda reader, _: reader.push(tuple(reader._last(1))),
    "TUPLE2": lambda reader, _: reader.push(tuple(reader._last(2))),
    "TUPLE3": lambda reader, _: reader.push(tuple(reader._last(3))),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), PickleReader._put),
    "MEMOIZE": lambda reader, _: reader._put(len(reader._memo) + len(reader._far)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), PickleReader._get),
    "APPEND": lambda reader, _: reader._append(reader._last(1)),
    "APPENDS": lambda reader, _: reader._append(reader._above_mark()),
    "SETITEM": lambda reader, _: reader._set(reader._last(2)),
    "SETITEMS": lambda reader, _: reader._set(reader._above_mark()),
    "GLOBAL": lambda reader, argument: reader._word(argument),
    "STACK_GLOBAL": lambda m, _: m._word(" ".join(expect_type(part, str) for part in m._last(2))),
    "REDUCE": lambda reader, _: reader._call(None),
    "BUILD": lambda reader, _: reader._build(None),
    "BINPERSID": lambda reader, _: reader._persistent(None),
    **dict.fromkeys(("FLOAT", *BYTE_STRINGS), PickleReader.push),
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4"), PickleReader._whole_number),
    **dict.fromkeys(TEXT_STRINGS, PickleReader._text),
    "DUP": lambda reader, _: reader.push(reader.stack[-1]),
    "POP": PickleReader._pop,
    "POP_MARK": lambda reader, _: reader._above_mark() and None,
    "DICT": lambda reader, _: reader._dict(reader._above_mark()),
    "LIST": lambda reader, _: reader.push(reader._above_mark()),
    "EMPTY_SET": lambda reader, _: reader.push([]),
    "ADDITEMS": lambda reader, _: reader._append(reader._above_mark()),
    "FROZENSET": lambda reader, _: reader.push(reader._above_mark()),
    "PUT": PickleReader._put,
    "GET": PickleReader._get,
    "NEWOBJ": PickleReader._new,
    "NEWOBJ_EX": PickleReader._new_with_names,
    "INST": PickleReader._inst,
    "OBJ": PickleReader._obj,
    **dict.fromkeys(
        ("PERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"), PickleReader._no_more
    ),
}
PickleReader.kept = {
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET", "LIST", "FROZENSET"), HOLDER),
    **dict.fromkeys(("EMPTY_DICT", "DICT"), DICT),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MARK"), HOLDER),
    **dict.fromkeys(TEXT_STRINGS, 16),
    **dict.fromkeys(BYTE_STRINGS, BYTES),
    **dict.fromkeys(("BININT", "BININT2", "BINFLOAT", "FLOAT", "INT", "LONG", "LONG1"), NUMBER),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), 9),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "BININT1", "DUP"), 9),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), 9),
}
PickleReader.calls = {
    **dict.fromkeys(PAIRS, _read_pairs),
    "collections.defaultdict": lambda *_: {},
    **{f"builtins.{name}": _plain_list for name in ("list", "tuple", "set", "frozenset")},
    "collections.deque": lambda items=(), *_: [*items] if isinstance(items, list | tuple) else [],
    **dict.fromkeys(("builtins.bytes", "builtins.bytearray"), lambda raw=b"", *_: raw),
    **dict.fromkeys(
        (f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in PATHS),
        lambda *parts: "/".join(str(part)[:1000] for part in parts).replace("//", "/"),
    ),
    **dict.fromkeys(
        (f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        lambda *_: Block(kind="empty"),
    ),
    **dict.fromkeys((f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")), read_scalar),
    **dict.fromkeys(
        (f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        lambda raw, kind, shape, order="C": read_array(raw, kind, shape, order == "F"),
    ),
    "numpy.dtype": read_dtype,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.Size": lambda sizes=(): tuple(sizes) if isinstance(sizes, list | tuple) else (),
    "torch.device": lambda *of: ":".join(str(part)[:20] for part in of[:2]),
}

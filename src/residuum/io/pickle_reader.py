"""Read any pickle as a tree of inert values (plain objects that describe the content, :mod:`.inert`).

``torch.save``, ``pickle.dump`` and ``joblib.dump`` write the same language: names of classes and functions,
calls of these names, and plain values. :class:`PickleReader` runs this language with a stand-in for each
name. So we can read a release without trusting the release.

The reader counts work and memory before it uses them. A file may ask for ``MAX_WORK`` steps: 1 for an
instruction, more for a call, and 1 for each entry that is copied. The memory of small objects may be
``MAX_OBJECT_BYTES`` plus the size of the file. A scan thus needs at most 50 MB plus twice the unpacked size.

The reader also collects what loading the file with ``pickle`` would do besides making values.
``PickleReader.unsafe`` lists calls of functions that are not known to be harmless (:mod:`.pickle_names`).
``PickleReader.foreign`` lists classes and functions of other packages that the file names.

The alternative is ``pickle.Unpickler`` with inert classes, in a child process with a memory limit. We built
and measured this alternative, which has these problems:

- An unpickler shows calls but not plain instructions. Only time and memory limits can then stop dict keys
  that hash forever and endless containers. These limits differ between machines and are missing on Windows
  and macOS.
- joblib loads with another unpickler, which runs code after an instruction that the C unpickler refuses.
- Sending the tree to the parent process breaks the memory bound above.
- Each file costs 25 ms instead of 0.4 ms, and three tests of hostile files fail.
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
    NumberReader,
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

# The first number in a file that torch.save wrote before it used zip archives.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# Largest number of steps (instructions, calls and copied entries) for a pickle, and largest estimated memory
# of its Python objects in bytes, in addition to the size of the file.
MAX_WORK, MAX_OBJECT_BYTES = 1_000_000, 48 << 20
# The next constants estimate the memory of Python objects in bytes.
# Bytes of an empty list or tuple, and of its entry in the set of visited objects.
SEQUENCE_BYTES = 160
DICT_BYTES, ENTRY_BYTES = 260, 64  # bytes of an empty dict, and of each entry of a dict
BYTES_OVERHEAD = 64  # bytes that a bytes object takes in addition to its content
NUMBER_BYTES = 32  # bytes of a number
NAME_BYTES = 300  # bytes of the name of a class or function
CALL_BYTES = 500  # bytes of the result of a call, such as a tensor with its view
# Largest number of bits of an integer. Python refuses to print very long integers.
MAX_BITS = 1000
MAX_NESTING = 8  # largest nesting depth of pickles that are stored inside of other pickles
# This function of torch calls the function in its first argument with the arguments in its third argument.
REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
# Names of methods that ``pickle.load`` calls on an object. A hostile file can set these attributes itself.
HOOKS = {"__setstate__", "append", "extend", "add"}
# scipy.stats runs a text in the file as code when it loads a distribution. TEMPLATE matches only the texts
# that scipy itself writes. SLOT matches a list of parameters, such as "self, a, b", in such a text.
SLOT = r"[\w=, ]*"
TEMPLATE = re.compile(
    rf"\s*def _parse_args\(self, {SLOT}\):\n    return \({SLOT}\), {SLOT}\n\n"
    rf"def _parse_args_rvs\(self, {SLOT}\):\n    return self\._argcheck_rvs\({SLOT}\)\n\n"
    rf"def _parse_args_stats\(self, {SLOT}moments='mv'\):\n    return \({SLOT}\), {SLOT}\n?"
)
# The memo holds objects that later instructions refer to by number. An entry takes this many bytes if its
# number does not follow the number of the previous entry.
SPARSE_MEMO_BYTES = 100
# Pickle instructions that put a text on the stack. The text begins with its length, in this many bytes.
TEXTS = {"SHORT_BINUNICODE": 1, "BINUNICODE": 4, "BINUNICODE8": 8}
OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
# A text of more than MAX_WIDE_TEXT bytes may hold only characters of Latin-1. The regular expression
# NON_LATIN finds the first bytes of all other characters in UTF-8.
MAX_WIDE_TEXT, NON_LATIN = 1 << 20, re.compile(rb"[\xc4-\xff]")
MALFORMED = (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error)


def describe_unsafe(unsafe: Iterable[str]) -> tuple[str, str]:
    """Return the error message and the advice for a file that would call the functions ``unsafe``."""
    actions = list(unsafe)
    omitted_note = f" and {len(actions) - 3} more" if len(actions) > 3 else ""
    return (
        "Loading a model may only call known constructors; loading this file would "
        f"{', '.join(actions[:3])}{omitted_note}.",
        "Do not load this file. Ask the author for the weights as safetensors.",
    )


class StoredTensor:
    """Reads the numbers of a tensor in a pickle. A call returns all numbers.

    A pickle can hold very many tensors, so this object is small and makes other readers on demand.
    """

    __slots__ = ("dtype", "pickle", "view")

    def __init__(self, pickle: PickleReader, view: View, dtype: torch.dtype) -> None:
        self.pickle, self.view, self.dtype = pickle, view, dtype

    def __call__(self) -> Tensor:
        """Return all numbers of the tensor."""
        view = self.view
        if not view.storage.numel:
            return torch.zeros(view.size, dtype=self.dtype)
        storage_bytes = self.pickle.get_storage_bytes(view.storage)
        buffer = storage_bytes if isinstance(storage_bytes, bytearray) else bytearray(storage_bytes)
        numbers = torch.frombuffer(buffer, dtype=self.dtype)
        return numbers.as_strided(view.size, view.stride, view.offset).clone()

    def make_part_reader(self) -> NumberReader | None:
        """Return a reader of parts of the tensor, or None if its numbers cannot be read in parts."""
        view, dtype = self.view, self.dtype
        stored_size, read_bytes = view.stored_size, self.pickle.read_part
        if stored_size is None or read_bytes is None or self.pickle.is_embedded(view.storage):
            return None

        def read_part(first: int, last: int) -> Tensor:
            first_byte = (view.offset + first) * dtype.itemsize
            part_bytes = read_bytes(view.storage, first_byte, (last - first) * dtype.itemsize)
            return (
                torch.frombuffer(part_bytes, dtype=dtype)
                if part_bytes
                else torch.zeros(0, dtype=dtype)
            )

        return NumberReader(stored_size, read_part)


class PickleReader:
    """Read the instructions of a pickle and describe its objects, without making them or running their code.

    Args:
        read_storage: Returns the bytes of a torch storage.
        read_part: Returns a part of the bytes of a torch storage, from the position of the first byte and the
            number of bytes. None if storages can only be read at once.
        joblib: Whether to read the numbers of joblib's arrays from the stream, as ``joblib.load`` does.

    Attributes:
        handlers: The methods that run instructions, by the name of the instruction.
        stand_ins: The functions that replace functions of the pickle, by the name of the replaced function.
        memory_costs: Bytes of memory that instructions use, by the name of the instruction.
        storages: The torch storages that the pickle names, by key.
        unsafe: Actions that loading the file would run, such as "call os.system": an ordered set, stored
            as the keys of a dict.
        foreign: Names in packages that are neither part of Python nor in ``COMMON``, also an ordered set.
        has_joblib_arrays: Whether an array of joblib was read.
        work: Number of steps so far: instructions, calls and copied entries.
        memory: Bytes of small objects so far.
    """

    handlers: ClassVar[Mapping[str, Callable[[Any, Any], None]]]
    stand_ins: ClassVar[Mapping[str, Callable[..., Any]]]
    memory_costs: ClassVar[Mapping[str, int]]

    def __init__(
        self,
        read_storage: Callable[[Storage], bytearray] | None = None,
        *,
        joblib: bool = True,
        read_part: Callable[[Storage, int, int], bytearray] | None = None,
    ) -> None:
        self.joblib, self.has_joblib_arrays = joblib, False
        self.storages: dict[str, Storage] = {}
        self.unsafe: dict[str, None] = {}
        self.foreign: dict[str, None] = {}
        self.work = self.memory = 0
        self._read_storage, self.read_part = read_storage, read_part
        self._hooked: dict[int, Any] = {}
        self._embedded: dict[str, memoryview] = {}
        self._stream: BinaryIO | None = None
        self._depth = 0
        self._globals: dict[str, GlobalName] = {}
        self._encoded_length = 0
        self._reset()

    def _reset(self) -> None:
        self.stack: list[Any] = []
        self._stacks_below: list[list[Any]] = []
        # The memo holds objects that later instructions refer to by number.
        # Picklers number these objects consecutively, so a list is enough and takes 8 bytes per object.
        self._memo: list[Any] = []
        self._sparse_memo: dict[int, Any] = {}

    def run(self, stream: BinaryIO) -> Any:
        """Read one pickle, and return plain descriptions of its objects. Later pickles stay unread."""
        outer, self._stream = self._stream, stream
        try:
            return self._run_instructions(stream)
        except CheckpointError as problem:
            if not self.unsafe:
                raise
            raise UnsafeFileError(*describe_unsafe(self.unsafe)) from problem
        finally:
            self._stream = outer

    def _run_instructions(self, stream: BinaryIO) -> Any:
        try:
            for name, argument in _read_instructions(stream):
                self.charge(1, self.memory_costs.get(name, 0))
                if name == "STOP":
                    return self.stack.pop()
                if (step := self.handlers.get(name)) is None:
                    raise ValueError(f"the instruction {name} is not known")
                step(self, argument)
        except MALFORMED as problem:
            raise CheckpointError(
                "The file must hold a complete pickle; the pickle is damaged "
                f"({type(problem).__name__}: {str(problem)[:100]}).",
                "Copy or save the file again.",
            ) from problem
        finally:
            self._reset()
        raise CheckpointError(
            "A pickle must end with the instruction STOP; the file ends before this instruction.",
            "Copy the file again.",
        )

    def charge(self, work: int, memory: int = 0) -> None:
        """Count steps and memory before the reader uses them, and stop at the limits.

        Args:
            work: Number of steps.
            memory: Bytes of small objects.

        Raises:
            UnsafeFileError: If the pickle needs too many steps or too much memory.
        """
        self.work += work
        self.memory += memory
        max_memory = MAX_OBJECT_BYTES + getattr(self._stream, "requested", 0)
        if self.work > MAX_WORK or self.memory > max_memory:
            raise UnsafeFileError(
                f"Reading a pickle may take at most {MAX_WORK} steps (instructions and copied entries), "
                f"and {MAX_OBJECT_BYTES >> 20} MB of memory in addition to the size of the file; this "
                "pickle takes more.",
                "Scan a smaller model, or save this model in several files.",
            )

    def push(self, value: Any) -> None:
        """Put a value on the stack, from which later instructions of the pickle take their arguments."""
        self.stack.append(value)

    def _push_mark(self, _: None) -> None:
        self._stacks_below.append(self.stack)
        self.stack = []

    def _pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._stacks_below.pop()
        return items

    def _pop_last(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def _store_memo(self, index: int) -> None:
        if index == len(self._memo):
            self._memo.append(self.stack[-1])
        elif 0 <= index < len(self._memo):
            self._memo[index] = self.stack[-1]
        else:
            self.charge(0, SPARSE_MEMO_BYTES)
            self._sparse_memo[index] = self.stack[-1]

    def _push_memo(self, index: int) -> None:
        is_consecutive = 0 <= index < len(self._memo)
        self.push(self._memo[index] if is_consecutive else self._sparse_memo[index])

    def _push_text(self, text: str) -> None:
        """Put a text on the stack, and count the memory that Python needs in addition to its characters."""
        self.charge(0, sys.getsizeof(text) - len(text))
        self.push(text)

    def _push_integer(self, value: int) -> None:
        self.push(value if value.bit_length() <= MAX_BITS else Opaque())

    def _push_dict(self, items: list[Any]) -> None:
        self.push({})
        self._set_items(items)

    def _push_global(self, argument: str) -> None:
        self.push(self._resolve_global(*argument.partition(" ")[::2]))

    def _resolve_global(self, module: str, attribute: str) -> GlobalName:
        """Return a description of a class or function, and record unsafe and foreign names."""
        module = modernize_module(module)
        full_name = f"{module}.{attribute}"
        if not module or not attribute or len(full_name) > 300:
            raise ValueError("the name of a class or function must have 1 to 300 characters")
        if (global_name := self._globals.get(full_name)) is None:
            self.charge(0, 2 * NAME_BYTES)
            global_name = self._globals[full_name] = GlobalName(
                full_name, classify_name(module, attribute)
            )
            if global_name.kind == UNLISTED:
                self.unsafe[f"use {full_name}"] = None
            elif global_name.kind == FOREIGN:
                self.foreign[full_name] = None
        return global_name

    def _flag(self, action: str) -> None:
        """Add an action that loading the file would run, such as "call os.system", to ``unsafe``."""
        self.charge(0, NAME_BYTES)
        self.unsafe[action[:200]] = None
        # A name is recorded as used before it is called. Replace "use os.system" by "call os.system".
        if action.startswith("call "):
            self.unsafe.pop(f"use {action.removeprefix('call ')}", None)

    def _flag_call(self, callee: Any) -> None:
        self._flag(
            f"call {callee.name if isinstance(callee, GlobalName) else 'what another call returned'}"
        )

    def _push_call(self, _: None) -> None:
        callee, arguments = self._pop_last(2)
        self.push(self._make_result(callee, expect_type(arguments, tuple)))

    def _push_new(self, _: None) -> None:
        cls, arguments = self._pop_last(2)
        self.push(self._make_instance(cls, expect_type(arguments, tuple)))

    def _push_new_with_keywords(self, _: None) -> None:
        cls, arguments, keywords = self._pop_last(3)
        instance = self._make_instance(cls, expect_type(arguments, tuple))
        if isinstance(instance, InertObject):
            instance.entries = expect_type(keywords, dict)
        self.push(instance)

    def _push_inst(self, argument: str) -> None:
        arguments = tuple(self._pop_to_mark())
        self.push(self._make_result(self._resolve_global(*argument.partition(" ")[::2]), arguments))

    def _push_obj(self, _: None) -> None:
        cls, *arguments = self._pop_to_mark()
        self.push(self._make_result(cls, tuple(arguments)))

    def _make_instance(self, cls: Any, arguments: tuple[Any, ...] = ()) -> Any:
        """Return a description of an instance that a pickle makes without calling the class."""
        if not isinstance(cls, GlobalName) or cls.kind == HARMLESS:
            return self._make_result(cls, arguments)
        self.charge(8, CALL_BYTES)
        # numpy.memmap and other classes of numpy open a file if their __new__ receives arguments.
        if cls.kind == UNLISTED or (arguments and cls.name.startswith("numpy.")):
            self._flag_call(cls)
        return InertObject(cls.name, arguments)

    def _make_result(self, callee: Any, arguments: tuple[Any, ...]) -> Any:
        """Return a description of the result of a call in a pickle, and record calls of unknown functions."""
        self.charge(8, CALL_BYTES)
        if not isinstance(callee, GlobalName) or callee.kind != HARMLESS:
            self._flag_call(callee)
            return InertObject(callee.name if isinstance(callee, GlobalName) else "?", arguments)
        name = callee.name
        if name in MAKE_INSTANCE:
            return self._construct(name, *arguments)
        if name == "builtins.getattr":
            return self._get_attribute(*arguments)
        if name == REBUILD_FROM_TYPE:
            if isinstance(arguments[0], GlobalName) and arguments[0].name == REBUILD_FROM_TYPE:
                raise ValueError("a tensor may be rebuilt from its type only once")
            return self._make_result(arguments[0], expect_type(arguments[2], tuple))
        self._check_arguments(callee, arguments)
        if name == "torch._utils._rebuild_parameter_with_state":
            return arguments[0]
        if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            return self._make_tensor(*arguments[:4])
        if name == "torch.storage._load_from_bytes":
            return self._read_embedded_storage(*arguments)
        is_text = bool(arguments) and type(arguments[0]) is str
        if name == "_codecs.encode" or (name == "builtins.bytearray" and is_text):
            return self._encode_text(*arguments)
        if (stand_in := self.stand_ins.get(name)) is None:
            return InertObject(name, arguments)
        copied_entries = sum(len(a) for a in arguments if type(a) in (list, tuple, dict))
        self.charge(copied_entries, ENTRY_BYTES * copied_entries)
        result = stand_in(*arguments)
        self.charge(len(result) // 64 if type(result) is str else 0)
        return result

    def _check_arguments(self, callee: GlobalName, arguments: tuple[Any, ...]) -> None:
        """Record a harmless function as unsafe if it would call its argument or iterate over an object."""
        for argument in arguments:
            if isinstance(argument, GlobalName) and callee.name not in MAKE_ARRAY:
                if argument.kind in (FOREIGN, UNLISTED):
                    self._flag_call(argument)
            elif isinstance(argument, InertObject):
                if callee.name in CONTAINERS or not is_trusted(argument.name):
                    self._flag(f"call {callee.name} with a {argument.name}")
            elif callee.name in CONTAINERS and type(argument) in (list, tuple):
                self.charge(len(argument))
                if callee.name in PAIRS and any(isinstance(a, InertObject) for a in argument):
                    self._flag(f"call {callee.name} with an object")
        is_bytes = callee.name in ("builtins.bytes", "builtins.bytearray") and bool(arguments)
        if is_bytes and type(arguments[0]) not in (bytes, bytearray, str):
            self._flag_call(
                callee
            )  # for example, a call of bytes with a large number exhausts memory

    def _construct(self, name: str, cls: Any, *arguments: Any) -> Any:
        """Return a description of the instance of ``cls`` that a call in a pickle makes."""
        if isinstance(cls, GlobalName) and cls.name in MAKE_INSTANCE:
            raise ValueError("an instance must be made of a class")
        if name == "copyreg.__newobj__":
            return self._make_instance(cls, arguments)
        if name != "copyreg._reconstructor":
            instance = self._make_instance(cls)
            if isinstance(instance, InertObject):
                instance.arguments = arguments
            return instance
        base, *states = arguments
        if not isinstance(base, GlobalName) or base.name not in BASES:
            self._flag_call(base)  # copyreg._reconstructor calls the __init__ of this base class
        return self._make_instance(cls, tuple(state for state in states if state is not None))

    def _get_attribute(self, owner: Any, name: Any, *_: Any) -> Any:
        """Return a description of an attribute of a class or module, or of a method of an object."""
        if not isinstance(owner, GlobalName):
            is_trusted_object = isinstance(owner, InertObject) and is_trusted(owner.name)
            if not is_trusted_object or expect_type(name, str).startswith("__"):
                self._flag("call builtins.getattr")
            return InertObject("?", (owner, name))
        module, attribute = owner.name.rpartition(".")[::2]
        return self._resolve_global(module, f"{attribute}.{expect_type(name, str)}")

    def _make_inner_reader(self) -> PickleReader:
        """Return a reader for a pickle inside of this pickle, which continues the counts and findings."""
        inner_reader = type(self)(joblib=self.joblib)
        inner_reader.work, inner_reader.memory, inner_reader._depth = (
            self.work,
            self.memory,
            self._depth + 1,
        )
        inner_reader.unsafe, inner_reader.foreign, inner_reader._globals = (
            self.unsafe,
            self.foreign,
            self._globals,
        )
        if inner_reader._depth > MAX_NESTING:
            raise ValueError("pickles are nested too deeply")
        return inner_reader

    def _read_embedded_storage(self, raw: Any) -> Any:
        """Return a torch storage (array of numbers) from an old ``torch.save`` file inside of the pickle."""
        inner_reader, stream = self._make_inner_reader(), io.BytesIO(expect_type(raw, bytes))
        if not raw.startswith(b"\x80") or inner_reader.run(stream) != LEGACY_MAGIC:
            self._flag("call torch.load")
            return InertObject("torch.storage.UntypedStorage")
        # Skip the second and third pickle of the legacy file: the protocol, and a description of the machine.
        for _ in range(2):
            inner_reader.run(stream)
        storage, keys = inner_reader.run(stream), inner_reader.run(stream)
        self.work, self.memory = inner_reader.work, inner_reader.memory
        if expect_type(storage, Storage).key not in expect_type(keys, list) or len(keys) != 1:
            raise ValueError("a storage must list its own key")
        numbers_start = stream.tell() + 8  # the first 8 bytes hold the number of elements
        # We take a view of the bytes instead of a copy, because a pickle can make many such calls.
        storage_bytes = memoryview(raw)[numbers_start : numbers_start + storage.nbytes]
        if len(storage_bytes) != storage.nbytes:
            raise ValueError("a storage is not complete")
        key = f"{storage.key} of {len(self._embedded)}"
        self._embedded[key] = storage_bytes
        return Storage(key, storage.numel, storage.itemsize, storage.kind)

    def is_embedded(self, storage: Storage) -> bool:
        """Return True if the pickle itself contains the numbers of a storage."""
        return storage.key in self._embedded

    def get_storage_bytes(self, storage: Storage) -> bytearray | memoryview:
        """Return the bytes of a storage (an array of numbers that tensors share)."""
        if storage.key in self._embedded:
            return self._embedded[storage.key]
        if self._read_storage is None:
            raise ValueError("a storage is not in the file")
        return self._read_storage(storage)

    def _encode_text(self, text: Any, encoding: Any = "latin1") -> bytes:
        """Return the bytes that pickle protocol 2 stores as a text of Latin-1 characters."""
        if encoding not in ("latin1", "latin-1"):
            self._flag("call _codecs.encode with another encoding than latin1")
        self._encoded_length += len(expect_type(text, str))
        if self._encoded_length > getattr(self._stream, "requested", 0):
            raise UnsafeFileError(
                "In all, the texts that a pickle converts to bytes may not be longer than the pickle "
                "itself; in this file, the texts are longer.",
                "Save the model again.",
            )
        return text.encode("latin1")

    def _make_tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Block:
        """Return a tensor as a ``Block`` (an array whose numbers are read on demand)."""
        # The class View checks that the tensor lies inside its storage before any memory is allocated.
        view = View(expect_type(storage, Storage), offset, tuple(size), tuple(stride))
        kind = KINDS.get(storage.kind)
        read_function = None if kind is None else StoredTensor(self, view, kind)
        dtype_name = str(kind).removeprefix("torch.") if kind else storage.kind
        return Block(view.size, dtype_name, read_function, name=storage.key)

    def _push_storage(self, _: None) -> None:
        """Put a torch storage (array of numbers) on the stack. Its size must not change in the pickle."""
        # The pickle states only the key and the size of a storage. Its numbers are elsewhere in the file.
        persistent_id = expect_type(self.stack.pop(), tuple)
        self.charge(8)
        # In old files, the entry "module" holds the class of a module and its source code.
        if persistent_id[0] == "module" and len(persistent_id) == 4:
            self.push(expect_type(persistent_id[1], GlobalName))
            return
        _kind, storage_type, key, _location, numel = persistent_id[:5]
        element_type = (
            expect_type(storage_type, GlobalName).name.rpartition(".")[2].removesuffix("Storage")
        )
        itemsize = STORAGES.get(f"torch.{element_type}Storage", 1)
        is_storage = STORAGE.fullmatch(storage_type.name)
        if not is_storage or not is_size(numel) or len(expect_type(key, str)) > 1000:
            raise ValueError("a storage must be ('storage', type, key, location, size)")
        storage = Storage(key, numel, itemsize, element_type)
        if self.storages.setdefault(key, storage) != storage:
            raise UnsafeFileError(
                "A tensor storage (array of numbers) must have one size; this file states two sizes of "
                f"the storage {key[:80]!r}.",
                "Save the model again.",
            )
        self.push(storage)

    def _set_state(self, _: None) -> None:
        """Store the state of an object in its description on top of the stack, without calling a method."""
        # The state of a numpy dtype or array sets its byte order, shape and bytes.
        # The state of any other object is stored without changes.
        state, target = self.stack.pop(), self.stack[-1]
        self._check_hooks(target)
        self._find_hooks(target, state if isinstance(state, tuple) else (state,))
        if isinstance(target, NumpyDtype):
            dtype_state = expect_type(state, tuple)
            if len(dtype_state) > 3 and dtype_state[3] is not None:
                # For a structured dtype (with fields), we read only the number of bytes of an entry.
                self.stack[-1] = target
                target.code = f"V{dtype_state[5]}" if is_size(dtype_state[5]) else target.code
            target.order = dtype_state[1] if dtype_state[1] in ("<", ">") else "<"
        elif isinstance(target, Block):
            _version, shape, kind, fortran, raw = expect_type(state, tuple)
            read_array(raw, kind, shape, bool(fortran), target)
        elif isinstance(target, InertObject):
            target.state = state
            if target.name.startswith("scipy.stats."):
                template = target.attributes.get("_parse_arg_template", "")
                if template and not (isinstance(template, str) and TEMPLATE.fullmatch(template)):
                    self._flag(f"run a text as code, through {target.name}")
            if (
                target.class_name == "NumpyArrayWrapper"
                and self.joblib
                and ".joblib" in f".{target.name}"
            ):
                self.stack[-1] = self._read_joblib_array(target.attributes)
            elif target.class_name in ("NDArrayWrapper", "ZNDArrayWrapper"):
                raise CheckpointError(
                    "A joblib file must contain its arrays; this file is from a version of joblib before "
                    "0.10, which wrote the arrays to separate files.",
                    "Load the model with the old version of joblib, and save it with a newer version.",
                )

    def _read_joblib_array(self, attributes: dict[str, Any]) -> Block:
        """Read an array of joblib, whose numbers follow the current instruction in the stream."""
        stream, shape, kind = self._stream, attributes.get("shape"), attributes.get("dtype")
        assert stream is not None
        self.has_joblib_arrays = True
        if isinstance(kind, NumpyDtype) and kind.code[0] == "O":
            inner_reader = self._make_inner_reader()
            array = inner_reader.run(stream)
            self.work, self.memory = inner_reader.work, inner_reader.memory
            return expect_type(array, Block)
        if attributes.get("numpy_array_alignment_bytes") is not None:
            stream.read(stream.read(1)[0])
        if not isinstance(kind, NumpyDtype):
            raise ValueError("an array of joblib needs a plain dtype")
        if not all(map(is_size, expect_type(shape, tuple))):
            raise ValueError("an array has a negative size")
        array_bytes = stream.read(math.prod(shape) * kind.itemsize)  # type: ignore[arg-type]
        return read_array(array_bytes, kind, shape, attributes.get("order") == "F")

    def _append_items(self, items: list[Any]) -> None:
        # A list entry takes 8 bytes, and Python allocates an eighth more entries than a list has.
        self.charge(0, 9 * len(items))
        target = self.stack[-1]
        self._check_hooks(target)
        (target.items if isinstance(target, InertObject) else expect_type(target, list)).extend(
            items
        )

    def _set_items(self, items: list[Any]) -> None:
        self.charge(0, ENTRY_BYTES * (len(items) // 2))
        target = self.stack[-1]
        self._check_hooks(target)
        entries = target.entries if isinstance(target, InertObject) else expect_type(target, dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            entries[make_key(key)] = value
        # Some subclasses of dict store their entries as attributes.
        if isinstance(target, InertObject):
            self._find_hooks(target, (target.entries,))

    def _find_hooks(self, target: Any, states: tuple[Any, ...]) -> None:
        """Remember an object whose state replaces a method that ``pickle.load`` would call."""
        if any(isinstance(state, dict) and any(h in state for h in HOOKS) for state in states):
            self.charge(0, ENTRY_BYTES)
            self._hooked[id(target)] = target

    def _check_hooks(self, target: Any) -> None:
        """Record an unsafe action if the pickle changes a class, or calls an attribute that it has set."""
        if isinstance(target, GlobalName):
            self._flag(f"change {target.name}")
        elif id(target) in self._hooked:
            self._flag("call an attribute that the file sets")

    def _pop_or_unmark(self, _: None) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._pop_to_mark()

    def _refuse_external(self, _: Any) -> None:
        raise CheckpointError(
            "A pickle must contain all of its data; this pickle refers to data outside of the file.",
            "Save the model again with pickle.dump(model, file).",
        )


def _read_instructions(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the name and the argument of each instruction of a pickle."""
    while code := stream.read(1):
        opcode = OPCODES[code.decode("latin-1")]
        if opcode.name in TEXTS:
            yield opcode.name, _read_text(stream, TEXTS[opcode.name])
        else:
            yield opcode.name, None if opcode.arg is None else opcode.arg.reader(stream)


def _read_text(stream: BinaryIO, width: int) -> str:
    """Return a text of the stream. Raise an error for a long text with characters outside of Latin-1."""
    # If one character of a text is outside of Latin-1, Python stores every character in two or four bytes.
    byte_count = int.from_bytes(stream.read(width), "little")
    text_bytes = stream.read(byte_count)
    if len(text_bytes) < byte_count:
        raise ValueError("the pickle ends within a text")
    if len(text_bytes) > MAX_WIDE_TEXT and NON_LATIN.search(text_bytes):
        raise ValueError(f"a text of more than {MAX_WIDE_TEXT} bytes must be Latin-1")
    return str(text_bytes, "utf-8", "surrogatepass")


def _read_pairs(pairs: Any = (), *_: Any) -> dict[Any, Any]:
    """Return the dict that a call such as ``OrderedDict([[key, value], ...])`` in a pickle would make."""
    if isinstance(pairs, dict):
        return pairs
    entries: dict[Any, Any] = {}
    for pair in pairs if isinstance(pairs, list | tuple) else ():
        if isinstance(pair, list | tuple) and len(pair) == 2:
            entries[make_key(pair[0])] = pair[1]
    return entries


def _make_list(*arguments: Any) -> Any:
    first_argument = arguments[0] if arguments else []
    return first_argument if isinstance(first_argument, list | tuple) else list(arguments)


BYTE_STRINGS = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
TEXT_STRINGS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", *TEXTS)
PAIRS = ("builtins.dict", "collections.OrderedDict", "collections.Counter")
PATHS = ("PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath", "Path")
PickleReader.handlers = {
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
    "MARK": PickleReader._push_mark,
    "TUPLE": lambda reader, _: reader.push(tuple(reader._pop_to_mark())),
    "TUPLE1": lambda reader, _: reader.push(tuple(reader._pop_last(1))),
    "TUPLE2": lambda reader, _: reader.push(tuple(reader._pop_last(2))),
    "TUPLE3": lambda reader, _: reader.push(tuple(reader._pop_last(3))),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), PickleReader._store_memo),
    "MEMOIZE": lambda reader, _: reader._store_memo(len(reader._memo) + len(reader._sparse_memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), PickleReader._push_memo),
    "APPEND": lambda reader, _: reader._append_items(reader._pop_last(1)),
    "APPENDS": lambda reader, _: reader._append_items(reader._pop_to_mark()),
    "SETITEM": lambda reader, _: reader._set_items(reader._pop_last(2)),
    "SETITEMS": lambda reader, _: reader._set_items(reader._pop_to_mark()),
    "GLOBAL": lambda reader, argument: reader._push_global(argument),
    "STACK_GLOBAL": lambda reader, _: reader._push_global(
        " ".join(expect_type(name, str) for name in reader._pop_last(2))
    ),
    "REDUCE": lambda reader, _: reader._push_call(None),
    "BUILD": lambda reader, _: reader._set_state(None),
    "BINPERSID": lambda reader, _: reader._push_storage(None),
    **dict.fromkeys(("FLOAT", *BYTE_STRINGS), PickleReader.push),
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4"), PickleReader._push_integer),
    **dict.fromkeys(TEXT_STRINGS, PickleReader._push_text),
    "DUP": lambda reader, _: reader.push(reader.stack[-1]),
    "POP": PickleReader._pop_or_unmark,
    "POP_MARK": lambda reader, _: reader._pop_to_mark() and None,
    "DICT": lambda reader, _: reader._push_dict(reader._pop_to_mark()),
    "LIST": lambda reader, _: reader.push(reader._pop_to_mark()),
    "EMPTY_SET": lambda reader, _: reader.push([]),
    "ADDITEMS": lambda reader, _: reader._append_items(reader._pop_to_mark()),
    "FROZENSET": lambda reader, _: reader.push(reader._pop_to_mark()),
    "PUT": PickleReader._store_memo,
    "GET": PickleReader._push_memo,
    "NEWOBJ": PickleReader._push_new,
    "NEWOBJ_EX": PickleReader._push_new_with_keywords,
    "INST": PickleReader._push_inst,
    "OBJ": PickleReader._push_obj,
    **dict.fromkeys(
        ("PERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"),
        PickleReader._refuse_external,
    ),
}
PickleReader.memory_costs = {
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET", "LIST", "FROZENSET"), SEQUENCE_BYTES),
    **dict.fromkeys(("EMPTY_DICT", "DICT"), DICT_BYTES),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MARK"), SEQUENCE_BYTES),
    **dict.fromkeys(TEXT_STRINGS, 16),
    **dict.fromkeys(BYTE_STRINGS, BYTES_OVERHEAD),
    **dict.fromkeys(
        ("BININT", "BININT2", "BINFLOAT", "FLOAT", "INT", "LONG", "LONG1"), NUMBER_BYTES
    ),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), 9),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "BININT1", "DUP"), 9),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), 9),
}
PickleReader.stand_ins = {
    **dict.fromkeys(PAIRS, _read_pairs),
    "collections.defaultdict": lambda *_: {},
    **{f"builtins.{name}": _make_list for name in ("list", "tuple", "set", "frozenset")},
    "collections.deque": lambda items=(), *_: [*items] if isinstance(items, list | tuple) else [],
    **dict.fromkeys(("builtins.bytes", "builtins.bytearray"), lambda raw=b"", *_: raw),
    **dict.fromkeys(
        (f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in PATHS),
        lambda *names: "/".join(str(name)[:1000] for name in names).replace("//", "/"),
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
    "torch.device": lambda *args: ":".join(str(arg)[:20] for arg in args[:2]),
}

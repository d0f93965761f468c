"""Names of classes and functions that a pickle may use, because they are known to be harmless.

A pickle can call every function of every installed package. A list of dangerous functions is never
complete, so this file lists harmless functions. :func:`classify_name` sorts each name into one of four kinds:

========== ==================================================== ========================================
kind       what a pickle may do with the name                   examples
========== ==================================================== ========================================
HARMLESS   call the class or function                           ``numpy.dtype``, ``torch.Size``
KNOWN      name the class, or make an instance without a call   ``sklearn.svm._classes.SVC``
FOREIGN    the same as KNOWN, but the scan reports the name     ``mypackage.Net``
UNLISTED   nothing: the name is a finding of the kind `code`    ``os.system``
========== ==================================================== ========================================

Names in the standard library and in the packages of ``COMMON`` are never FOREIGN. These packages are
installed almost everywhere, so an attacker can rely on them.
"""

from __future__ import annotations

import re
import sys

HARMLESS, KNOWN, FOREIGN, UNLISTED = "harmless", "known", "foreign", "unlisted"

# Packages that are installed on nearly every machine that loads models. An attacker can call their functions.
COMMON = {
    "numpy", "scipy", "pandas", "sklearn", "torch", "torchvision", "joblib", "PIL", "matplotlib",
    "setuptools", "pkg_resources", "pip", "distutils", "cloudpickle", "dill", "six",
    # Modules of Python 2, which the pickles of old files name. In Python 3, these modules have other names.
    "commands", "exceptions", "cPickle", "__builtin__", "copy_reg", "nt", "dumbdbm",
}  # fmt: skip


def _join(module: str, names: str) -> set[str]:
    return {f"{module}.{name}" for name in names.split()}


# Functions that make an instance of the class in their first argument, without calling ``__init__``.
# ``copyreg._reconstructor`` also calls the ``__init__`` of its second argument, which the reader checks.
MAKE_INSTANCE = (
    _join("copyreg", "_reconstructor __newobj__")
    | {"array._array_reconstructor"}
    | _join("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence")
    | {f"sklearn.metrics.{module}.newObj" for module in ("_dist_metrics", "dist_metrics")}
    | {
        f"sklearn.neighbors.{module}.newObj"
        for module in ("_kd_tree", "_ball_tree", "_dist_metrics", "kd_tree", "ball_tree", "dist_metrics")
    }
    | _join("sklearn._loss._loss", "__pyx_unpickle_CyHalfMultinomialLoss")
    | _join("sklearn.linear_model._sgd_fast", "__pyx_unpickle_Classification __pyx_unpickle_Regression")
    | _join("sklearn.utils._fast_dict", "__pyx_unpickle_IntFloatDict")
    | {"pandas._libs.arrays.__pyx_unpickle_NDArrayBacked"}
    | {"pandas._libs.interval.__pyx_unpickle_IntervalMixin"}
    | {"pandas.core.indexes.base._new_Index", "pandas.core.indexes.datetimes._new_DatetimeIndex"}
)  # fmt: skip
# Functions that make an array of numpy without calling its class.
MAKE_ARRAY = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
MAKE_ARRAY |= {"numpy.ma.core._mareconstruct"}

# Container types. The reader allows only plain values as arguments of their constructors. A constructor
# iterates over its argument, and the iterator of an unusual object could run any code.
CONTAINERS = _join("builtins", "list tuple set frozenset dict bytes bytearray")
CONTAINERS |= _join("collections", "OrderedDict Counter deque")
# Harmless base classes of Python. A pickle may call them, and may make instances of their subclasses.
BASES = CONTAINERS | _join("builtins", "object int float complex str") | {"collections.defaultdict"}

CALLS = (
    MAKE_INSTANCE
    | MAKE_ARRAY
    | BASES
    # Types of plain values of Python. Making such a value has no other effect.
    | _join("builtins", "bool slice range xrange long")
    | _join("datetime", "date datetime time timedelta timezone")
    | {"decimal.Decimal", "fractions.Fraction", "types.SimpleNamespace", "random.Random"}
    | {"logging.getLogger"}  # returns the logger with a given name, and has no other effect
    | {"zoneinfo.ZoneInfo._unpickle", "array.array", "re._compile", "re.RegexFlag"}
    | {"_codecs.encode"}  # makes bytes in pickle protocol 2; the reader allows only the encoding Latin-1
    # Pickle protocols below 4 name a nested class by a call of getattr for the outer class.
    # The reader classifies the name of the attribute, and reports other uses of getattr as unsafe.
    | {"builtins.getattr"}
    # Paths, which are texts with slashes. Making a path does not access the disk.
    | {
        f"{module}.{name}"
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    }
    # Functions of numpy that make arrays, scalars, dtypes and random generators from bytes.
    | {f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")}
    | {f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")}
    | {f"numpy.{core}._internal._convert_to_stringdtype_kwargs" for core in ("core", "_core")}
    | {"numpy.dtype", "numpy.random.__RandomState_ctor"}
    | _join("numpy.random._pickle", "__bit_generator_ctor __generator_ctor __randomstate_ctor")
    # Functions of torch that make tensors from numbers in the file, or small values such as a device.
    | _join(
        "torch._utils",
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
        "_rebuild_parameter_with_state _rebuild_sparse_tensor _rebuild_sparse_csr_tensor "
        "_rebuild_qtensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage "
        "_rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy "
        "_rebuild_device_tensor_from_cpu_tensor",
    )
    | {"torch._tensor._rebuild_from_type_v2"}  # calls its first argument, which the reader checks
    | {"torch.storage._load_from_bytes"}  # loads a torch file inside of a pickle, which the reader checks
    | _join("torch", "Size device Generator _C.Generator serialization._get_layout")
    | _join("torch.nn.parameter", "UninitializedParameter UninitializedBuffer")
    # Functions of TorchScript that return their argument.
    | _join(
        "torch.jit._pickle",
        "build_boollist build_doublelist build_intlist build_tensorlist build_tensor_from_id "
        "restore_type_tag",
    )
    # Classes of scikit-learn that are compiled with Cython: trees, losses and criteria.
    | {"sklearn.tree._tree.Tree", "sklearn.neighbors._quad_tree._QuadTree"}
    | _join("sklearn.tree._criterion", "ClassificationCriterion Entropy Gini MAE MSE Poisson FriedmanMSE")
    | _join("sklearn.tree._splitter", "BestSplitter BestSparseSplitter RandomSplitter RandomSparseSplitter")
    | _join(
        "sklearn._loss._loss",
        "CyAbsoluteError CyExponentialLoss CyHalfBinomialLoss CyHalfGammaLoss CyHalfMultinomialLoss "
        "CyHalfPoissonLoss CyHalfSquaredError CyHalfTweedieLoss CyHalfTweedieLossIdentity CyHuberLoss "
        "CyPinballLoss",
    )
    | {
        f"sklearn.linear_model.{module}.{loss}"
        for module in ("_sgd_fast", "sgd_fast")
        for loss in (
            "Hinge", "SquaredHinge", "Log", "ModifiedHuber", "SquaredLoss", "Huber",
            "EpsilonInsensitive", "SquaredEpsilonInsensitive",
        )
    }
    # Classes and functions of pandas for indexes, blocks, dtypes and points in time.
    | {"pandas.core.internals.managers.BlockManager", "pandas.core.internals.managers.SingleBlockManager"}
    | {"pandas._libs.internals._unpickle_block", "pandas.core.indexes.frozen.FrozenList"}
    | _join("pandas._libs.tslibs", "nattype._nat_unpickle timedeltas._timedelta_unpickle")
    | _join("pandas._libs.tslibs.timestamps", "_unpickle_timestamp")
    | _join("pandas._libs.tslibs.offsets", "Day Hour Minute Second MonthEnd MonthBegin BusinessDay YearEnd")
    | _join("pandas._libs.tslibs.period", "Period")
    | _join("pandas._libs.interval", "Interval")
    | _join("pandas._libs.sparse", "IntIndex BlockIndex")
    | _join("pandas", "Interval Period PeriodDtype StringDtype DatetimeTZDtype IntervalDtype")
    | _join("pandas.core.dtypes.dtypes", "PeriodDtype DatetimeTZDtype IntervalDtype")
    | {"pandas.core.arrays.string_.StringDtype"}
    # Functions of pyarrow that make the columns of pandas 3 and later.
    | _join(
        "pyarrow.lib",
        "_restore_array _reconstruct_table chunked_array py_buffer type_for_alias schema field",
    )
    # Enumerations of transformers in training_args.bin. A call looks up a member by its value.
    | _join("transformers.training_args", "OptimizerNames ParallelMode")
    | _join(
        "transformers.trainer_utils",
        "IntervalStrategy SchedulerType HubStrategy SaveStrategy EvaluationStrategy FSDPOption",
    )
    | _join("accelerate.utils.dataclasses", "DistributedType DynamoBackend SaveStrategy")
)  # fmt: skip

# Classes and functions of the kind KNOWN. A pickle may name them, and may make instances of the classes
# without a call. It may not call them. The functions only compute a value.
NAMES = (
    _join("builtins", "NotImplemented Ellipsis NoneType abs len max min round sum sorted")
    | {"argparse.Namespace", "uuid.UUID", "uuid.SafeUUID", "collections.UserDict", "collections.ChainMap"}
    | {"zoneinfo.ZoneInfo", "datetime.tzinfo", "torch.utils.hooks.RemovableHandle"}
    | _join("typing", "Any Union Optional Dict List Tuple Set Sequence Mapping")
    | _join(
        "numpy",
        "ndarray matrix memmap recarray record rec.recarray rec.record ma.MaskedArray "
        "ma.core.MaskedArray ma.core.MaskedConstant ma.core.mvoid char.chararray poly1d "
        "void scalar generic number "
        "float16 float32 float64 longdouble float128 int8 int16 int32 int64 intp intc longlong "
        "uint8 uint16 uint32 uint64 uintp uintc ulonglong bool bool_ complex64 complex128 clongdouble "
        "str_ bytes_ object_ datetime64 timedelta64 "
        "absolute abs exp expm1 exp2 log log1p log2 log10 sqrt cbrt square negative reciprocal sign sin "
        "cos tan tanh arctan arcsinh sinh cosh clip add subtract multiply divide power maximum minimum "
        "sum mean median std var max min amax amin prod ravel reshape squeeze isnan nan_to_num",
    )
    | _join(
        "numpy.random",
        "_mt19937.MT19937 _pcg64.PCG64 _pcg64.PCG64DXSM _philox.Philox _sfc64.SFC64 "
        "mtrand.RandomState _generator.Generator bit_generator.SeedSequence",
    )
    | _join(
        "torch",
        "Tensor relu sigmoid tanh softmax log_softmax gelu sin cos exp strided sparse_coo sparse_csr "
        "contiguous_format preserve_format per_tensor_affine per_channel_affine "
        "per_tensor_symmetric per_channel_symmetric per_channel_affine_float_qparams "
        "float16 bfloat16 float32 float64 half float double float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
        "float8_e5m2fnuz float8_e8m0fnu uint8 uint16 uint32 uint64 int8 int16 int32 int64 short int long "
        "bool complex32 complex64 complex128 qint8 quint8 qint32 quint4x2 quint2x4",
    )
    | {"torch._C._VariableFunctionsClass", "scipy._lib.array_api_compat.numpy._aliases.asarray"}
    | _join("torch._C._VariableFunctionsClass", "relu sigmoid tanh softmax log_softmax sin cos exp")
    | {"joblib.numpy_pickle.NumpyArrayWrapper", "sklearn.externals.joblib.numpy_pickle.NumpyArrayWrapper"}
    # Array wrappers of joblib before version 0.10, whose arrays are in other files. The reader refuses them.
    | _join("joblib.numpy_pickle", "NDArrayWrapper ZNDArrayWrapper")
    | {"torch.utils.data.dataloader.DataLoader", "torch.utils.data._utils.collate.default_collate"}
)  # fmt: skip

# Packages and modules whose classes and functions are KNOWN. When a pickle sets the state of these classes,
# they do not run content of the file as code. scipy.stats runs a text as code, but the reader allows only the
# text that scipy writes.
MODULES = (
    "sklearn.",
    "scipy.sparse.", "scipy.stats.", "scipy.interpolate.", "scipy.spatial.", "scipy.special.",
    "numpy.polynomial.",
    "pandas.core.", "pandas.arrays.", "pandas._libs.",
    "torch.nn.modules.", "torch.nn.functional.", "torch.nn.init.", "torch.nn.parameter.",
    "torch.nn.utils.weight_norm.", "torch.nn.utils.spectral_norm.", "torch._C._nn.", "torch.optim.",
    "torch.ao.nn.", "torch.nn.quantized.", "torch.nn.intrinsic.",
    "torch.utils.data.dataset.", "torch.utils.data.sampler.", "torch.distributions.",
    "torch.amp.grad_scaler.", "torch.cuda.amp.grad_scaler.",
    "torchvision.models.", "torchvision.ops.misc.", "torchvision.transforms.",
    "PIL.Image.",
    "xgboost.", "lightgbm.", "catboost.",  # packages that parse the bytes of a model without running code
    "__torch__.",  # classes of TorchScript, which exist only inside of TorchScript files
)  # fmt: skip
# Modules that a pickle may not name, because they download files, open ports or contain other packages.
EXCLUDED = re.compile(
    r"sklearn\.(externals|callback|datasets|utils\._testing|utils\._mocking|utils\._test_common|conftest)\b|"
    r"torchvision\.models\._api\b|pandas\.core\.computation\b|scipy\.special\._(testutils|precompute)\b"
)
STORAGE = re.compile(r"torch\.(storage\.|cuda\.)?\w*Storage")
PANDAS_CLASS = re.compile(r"pandas\.[A-Z]\w*")
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def modernize_module(module: str) -> str:
    """Return the name of a module in Python 3. A pickle may contain the name of the module in Python 2."""
    return PYTHON_2.get(module, module)


def classify_name(module: str, attribute: str) -> str:
    """Return whether a pickle may use a name: HARMLESS, KNOWN, FOREIGN or UNLISTED.

    An attribute with a dot can reach everything that a module has imported. For example, a pickle can use the
    attribute ``os.system`` of a module that imports ``os``. So we accept an attribute with a dot only if the
    exact name is listed.

    Args:
        module: The module, such as "torch.nn.modules.linear".
        attribute: The name in the module, such as "Linear".

    Returns:
        One of the four kinds HARMLESS, KNOWN, FOREIGN and UNLISTED.
    """
    name = f"{module}.{attribute}"
    if name in CALLS:
        return HARMLESS
    if name in NAMES or STORAGE.fullmatch(name) or PANDAS_CLASS.fullmatch(name):
        return KNOWN
    if "." not in attribute and name.startswith(MODULES) and not EXCLUDED.match(name):
        return KNOWN
    package = module.partition(".")[0]
    is_common = package in COMMON or package in sys.stdlib_module_names
    return UNLISTED if is_common else FOREIGN


def is_trusted(name: str) -> bool:
    """Return True if a pickle may use a dotted name, such as "torch.Size", without a finding."""
    module, _, attribute = name.rpartition(".")
    return classify_name(module, attribute) in (HARMLESS, KNOWN)

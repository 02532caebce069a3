import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

class DType(enum.Enum):
    f32 = 0
    f16 = 1
    bf16 = 2
    e4m3 = 3
    i32 = 4
    i64 = 5
    s8 = 6

class DeviceKind(enum.Enum):
    cpu = 0
    cuda = 1

class Precision(enum.Enum):
    exact = 0
    fp8 = 1
    int8 = 2

class Granularity(enum.Enum):
    tensor = 0
    head = 1
    block = 2
    row = 3

class Tensor:
    def __init__(
        self,
        data: int,
        dtype: DType,
        shape: Sequence[int],
        strides: Sequence[int],
        device_kind: DeviceKind = ...,
        device_index: int = 0,
    ) -> None: ...

def view(array: object) -> Tensor | None:
    """The view of a plain PyTorch tensor; None of anything else."""

class Functions:
    def __init__(
        self, score: str | None, mask: str | None, captured: Sequence[Tensor], differentiated: Sequence[int]
    ) -> None: ...

class Options:
    def __init__(self, values: tuple[Any, ...]) -> None: ...
    def set_captured_gradients(self, gradients: Sequence[Tensor | None]) -> None: ...
    def set_accumulate(self, dq: bool, dk_dv: bool) -> None: ...
    def set_dropout_places(self, places: Tensor) -> None: ...
    @property
    def threads(self) -> int: ...
    functions: Functions

#: The names of what Options takes, in order.
OPTIONS: tuple[str, ...]

class CpuInfo(TypedDict):
    target: str
    targets: list[str]

class Gpu(TypedDict):
    name: str
    capability: str
    multiprocessors: int
    clock_mhz: int
    memory_gib: float
    supported: bool
    kernels: str
    portable: str

class GpuInfo(TypedDict):
    driver: str
    devices: list[Gpu]
    compiler: str
    kernel_cache: str
    kernel_cache_refusal: str
    shipped_kernels: int

class CallStats(TypedDict):
    operation: str
    backend: str
    family: str
    kernel: str
    calls: int
    nanoseconds: int
    bytes: int
    operations: int
    workspace_peak: int

class KernelStats(TypedDict):
    origin: str
    kernels: int
    nanoseconds: int

class ErrorStats(TypedDict):
    status: str
    rule: str
    errors: int

class Stats(TypedDict):
    calls: list[CallStats]
    kernels: list[KernelStats]
    errors: list[ErrorStats]

class Peak(TypedDict):
    threads: int
    f32_gflops: float
    bf16_gflops: float
    f32_instructions: str

#: The names of a call's arrays, in the order in which the functions below take them; None where not given.
FORWARD: tuple[str, ...]
BACKWARD: tuple[str, ...]

def know_torch(
    types: tuple[type, ...],
    strided: object,
    dtypes: Mapping[Any, DType],
    exchange: object | None,
) -> None: ...
def know_options(call: type, defaults: tuple[Any, ...], in_operators: list[bool]) -> None: ...
def know_states(
    idle: tuple[tuple[Callable[[], object], object], ...],
    forward_ad: object,
    profiled: Callable[[], bool],
    recording: Callable[[], bool],
    deterministic: Callable[[], bool],
) -> None: ...
def know_record(
    apply: Callable[..., Any], in_full: Callable[..., Any], apply_gated: Callable[..., Any]
) -> None: ...
def is_followed() -> bool: ...

#: The quick ways of tensors; None where one of them, or PyTorch, wants the long way.
def operator_kernel(
    backward: bool, for_autograd: bool, long_way: Callable[..., object], defaults: tuple[Any, ...]
) -> Callable[..., object]: ...
def attend(call: object, q: object, k: object, v: object, sink: object, return_lse: object) -> Any: ...
def record(ctx: Any, call: object, output: tuple[Any, Any, Any, bool], *tensors: object) -> Any: ...

apply_backward: Callable[..., tuple[Any, ...]]

def forward_tensors(
    inputs: tuple[Any, ...], options: Options, return_lse: bool
) -> tuple[Any, Any, Any] | None: ...
def backward_tensors(
    arrays: tuple[Any, ...], options: Options, needed: tuple[bool, ...]
) -> tuple[Any, ...] | None: ...
def forward(arrays: tuple[Any, ...], options: Options, stream: int = 0) -> None: ...
def backward(arrays: tuple[Any, ...], options: Options, stream: int = 0) -> None: ...
def explain(arrays: tuple[Any, ...], options: Options, backward: bool) -> str: ...
def workspace_bytes(arrays: tuple[Any, ...], options: Options, backward: bool) -> int: ...
def end_calls() -> None: ...
def jax_handlers() -> dict[tuple[str, str], object]: ...
def quantize(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    mean: Tensor | None,
    granularity: Granularity,
    hadamard: bool,
    threads: int,
    stream: int = 0,
) -> None: ...

#: The names of the arrays that append_kv takes, in order; None where not given.
APPEND_INPUTS: tuple[str, ...]
APPEND_OUTPUTS: tuple[str, ...]

def append_kv(
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    interleaved: bool,
    check: bool,
    threads: int,
    stream: int = 0,
) -> None: ...
def merge(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    threads: int,
    stream: int = 0,
) -> None: ...
def set_log(level: int, write: Callable[[int, str], None]) -> None: ...
def set_events(every: int, write: Callable[[str, str, str, str, str, str, int], None] | None) -> None: ...
def stats() -> Stats: ...
def stats_text() -> str: ...
def version() -> str: ...
def cpu_info() -> CpuInfo: ...
def gpu_info() -> GpuInfo: ...
def described_devices() -> dict[str, int]: ...
def energy_meter(device: int) -> tuple[str, Callable[[], float] | None]: ...
def measure_peak(threads: int, seconds: float = 0.2) -> Peak: ...

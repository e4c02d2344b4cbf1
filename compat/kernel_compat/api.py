"""The public functions: installing the library, and registering attention names, in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypedDict

from .attention import defaults
from .attention.defaults import checked
from .attention.names import AttentionName, ForwardSpec
from .attention.protocols import AttentionForward, MaskFunction
from .attention.unsupported import refusal, refusing, unsupported_because
from .environment import Environment, torch_flash_backend
from .errors import RenamedWarning, UnprotectedWarning
from .gates import in_order
from .kernels import Features, ForwardOnly, Kernel, LayeredKernel, as_kernel
from .patching import report

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from .attention.parallel.sharding import ContextParallel

__all__ = [
    "Report",
    "attention_function",
    "install",
    "installed",
    "mask_function",
    "register_attention",
    "registered_attention",
    "status",
    "uninstall",
    "unregister_attention",
]

#: The entry points of other distributions' attention names.
ENTRY_POINT_GROUP = "kernel_compat.attention"


@dataclass(frozen=True)
class Report(report.InstallationReport):
    """What `install()` did, or would do.

    Attributes:
        environment: the environment that it was decided for.
        installed: whether `install()` is in force.
        shims: one entry a shim.
        left_alone: after `uninstall()`, the values that other code has overwritten, which stay theirs.
        attention: state by registered attention name: ``"available"``, ``"pending"``, or why transformers doesn't have it.
        chosen: by attention name that was registered with several kernels, the kernel of each kind of call so far.
        torch_flash_backend: the FlashAttention behind torch's own attention in this process (``"FA3"``, ``"FA4"``), None for
            the FlashAttention-2 it is built with.
    """

    attention: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, dict[str, str]] = field(default_factory=dict)
    torch_flash_backend: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing failed: no shim, and no registered attention name."""
        return super().ok and all(state in ("available", "pending") for state in self.attention.values())


def install(
    *,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    unproven: str | None = None,
    broken: str = "refuse",
) -> Report:
    """Apply every shim this environment needs and make the registered attention names known to transformers.

    Imports the upstream modules whose seams it replaces. Each shim is applied whole or not at all: one that finds
    a seam missing or changed is reported as failed with an `UnprotectedWarning`, and the others still apply. Calling it again
    is cheap and applies the shims that have become applicable since.

    Examples:
        >>> import kernel_compat
        >>> report = kernel_compat.install()
        >>> report.installed, kernel_compat.uninstall().installed
        (True, False)

    Args:
        skip: names of shims to leave out, as `status()` lists them. One that an earlier call applied is undone.
        only: names of the shims to apply, instead of all.
        unproven: the reaction to a model that is loaded under a registered name and whose type can't be proven to compute
            the same as with eager attention: ``"warn"``, ``"refuse"`` or ``"allow"``. Types that the library was tested on are
            in its table; others are proven at load on a tiny model of their own class, once, which takes some seconds and is
            kept in the user's cache. ``"allow"`` leaves that out. By default the value of an earlier call, or else the
            environment variable ``KERNEL_COMPAT_UNPROVEN``, or else ``"warn"``.
        broken: the reaction to calls that a failed shim protects, as `ShimReport.protects` says: ``"refuse"`` raises an
            `UnprotectedError` in them, ``"allow"`` runs them as they are, perhaps silently wrong.

    Raises:
        ValueError: `skip` or `only` names a shim that doesn't exist, or `unproven` or `broken` is not one of the values above.
        TypeError: `skip` or `only` is a single string.
    """
    unproven = checked(unproven)
    _register_entry_points()
    result = defaults.installation.install(skip=skip, only=only, broken=broken)
    defaults.registry.unproven = unproven or defaults.registry.unproven
    _warn_of_failures(result)
    return _with_attention(result)


def uninstall() -> Report:
    """Restore the very objects that were there before `install()`, and withdraw the registered attention names.

    An attribute that other code has overwritten since stays theirs; the report's `left_alone` names it.
    """
    return _with_attention(defaults.installation.uninstall())


def status() -> Report:
    """The report of `install()` as of now; changes nothing and imports no framework."""
    return _with_attention(defaults.installation.status())


def _warn_of_failures(result: report.InstallationReport) -> None:
    """Warn the caller of the caller of each reason why shims have failed."""
    failed: dict[str, list[str]] = {}
    for shim in result.shims:
        if shim.state == "failed":
            then = f". Refused without it: {shim.protects}" if shim.protects else ""
            failed.setdefault(f"{shim.reason}{then}", []).append(shim.name)
    for reason, names in failed.items():
        which = f"the shim {names[0]} is" if len(names) == 1 else f"the shims {', '.join(names)} are"
        warnings.warn(f"{which} not applied: {reason}", UnprotectedWarning, stacklevel=3)


@contextmanager
def installed(
    *,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    unproven: str | None = None,
    broken: str = "refuse",
) -> Iterator[Report]:
    """`install()` for the length of a ``with`` block; of several that overlap, in one thread or many, the last uninstalls.

    Inside another installation it changes nothing on leaving.
    """
    unproven = checked(unproven)
    _register_entry_points()
    with defaults.installation.installed(skip=skip, only=only, broken=broken) as result:
        _warn_of_failures(result)
        block = None if unproven is None else defaults.registry.unproven_in(unproven)
        try:
            yield _with_attention(result)
        finally:
            if block is not None:
                defaults.registry.leave_unproven(block)


class _Deprecated(TypedDict, total=False):
    """Keywords of `register_attention` that are attributes of `ForwardSpec` now."""

    features: Features | Collection[str] | None
    handles_context_parallel: bool


def register_attention(
    name: str,
    kernel: str | Kernel | Sequence[Any] | Any | None = None,
    forward: AttentionForward | ForwardSpec | None = None,
    mask: MaskFunction | None = None,
    *,
    sequence_parallel: ProcessGroup | DeviceMesh | Callable[[], Any] | bool | None = False,
    context_parallel: ContextParallel | None = None,
    padding_free: bool = False,
    override: bool = False,
    **deprecated: Unpack[_Deprecated],
) -> None:
    """Make `name` usable as ``attn_implementation=name`` once `install()` is called, or at once where it is.

    The kernel need not be usable here: a model with the name fails when it is loaded, with a
    `KernelUnavailableError`.

    Examples:
        >>> register_attention("my_flash_attention", kernel="flash_attention_2")
        >>> list(registered_attention())
        ['my_flash_attention']
        >>> unregister_attention("my_flash_attention")

    Args:
        name: any string but a hub kernel's (``org/repo``). One that has no ``flash`` in it warns, because from
            transformers 5.0 on models choose their flash code path by that substring; with `forward` and `mask` it doesn't: that is
            attention of another kind.
        kernel: a kernel's name (a key of `known_kernels()`), a `Kernel`, or any object with a ``flash_attn_varlen_func`` that
            takes FA2's keywords, such as a module. It has the features whose keywords are named parameters, or those of its
            attribute `features`, a `Features`. A list of these, or ``"auto"`` for all of the library's, gives each call to the
            first kernel that computes exactly what it asks for; `Report.chosen` shows which. None for a `forward` that needs none
            of them.
        forward: replaces the library's attention function: an `AttentionForward`, or a `ForwardSpec`, which also declares what
            the function can do. It may call transformers' ``_flash_attention_forward`` with
            ``attn_implementation=name`` and gets this kernel on every release.
        mask: replaces the library's mask function: a `MaskFunction`.
        sequence_parallel: the ``torch.distributed`` group whose ranks each hold a slice of the tokens, a function that returns it
            at each call, or True for the default group, which need not be there yet: `ulysses` is put around the forward, and the
            library's mask function gathers the slices of a padding mask. One of your own must make masks of the full sequence.
            Where the function returns None, the call isn't spread. False for none.
        context_parallel: the ranks that sequences are spread over, each with the keys that its queries see: for any number of ranks,
            also more than there are heads. The batch is split by its `ContextParallel.shard`. None for none.
        padding_free: models under the name compute padded batches without their padding, as by
            `kernel_compat.models.padding_free`; with `context_parallel`, its `shard` leaves the padding out. A model for which that
            is wrong is refused when it is loaded.
        override: allow a name that transformers owns, or that is registered already.
        deprecated: ``features=`` and ``handles_context_parallel=``, which are now those of a `ForwardSpec`.
            ``sequence_parallel=None`` is deprecated, too: it is True until 1.0, and False from then on.

    Raises:
        TypeError: `name` is not a string, `forward` or `mask` is not callable, `kernel` is no kernel, there is neither a
            kernel nor a forward, or `sequence_parallel` is no group that this rank is in.
        ValueError: `name` is empty, malformed, taken, or `kernel` is an unknown name; `forward` has features of unknown names, or
            without a function; or `padding_free` or `context_parallel` beside `forward` or `sequence_parallel`.
    """
    spec = _with_deprecated(name, forward, dict(deprecated))
    if kernel is None and spec.function is None:
        raise TypeError("register_attention takes a kernel, a forward or both")
    if spec.features is not None and spec.function is None:
        raise ValueError("features are those of a forward; a kernel's are known, or an attribute of its object")
    if sequence_parallel is None:
        message = (
            f"register_attention({name!r}, sequence_parallel=None) is now sequence_parallel=True; None will be False"
        )
        warnings.warn(message, RenamedWarning, stacklevel=2)
        sequence_parallel = True
    if context_parallel is not None and (sequence_parallel is not False or spec.function is not None):
        raise ValueError("context_parallel is that of a kernel, beside neither a forward nor sequence_parallel")
    features = None if spec.features is None else Features.of(spec.features)
    entry = AttentionName(
        name,
        ForwardOnly(name, features or Features.of(())) if kernel is None else as_kernel(kernel),
        spec.function,
        mask,
        override,
        handles_context_parallel=spec.handles_context_parallel,
        padding_free=padding_free,
        features=features,
        spread_over=context_parallel if sequence_parallel is False else sequence_parallel,
    )
    defaults.registry.register(entry)


def _with_deprecated(
    name: str, forward: AttentionForward | ForwardSpec | None, deprecated: dict[str, Any]
) -> ForwardSpec:
    """The forward with what it can do, also from the keywords of `register_attention` of releases before 0.3."""
    if unknown := deprecated.keys() - {"features", "handles_context_parallel"}:
        raise TypeError(f"register_attention() got an unexpected keyword argument {min(unknown)!r}")
    if isinstance(forward, ForwardSpec):
        if deprecated:
            raise TypeError(f"{' and '.join(deprecated)} beside a ForwardSpec, which has them as attributes")
        return forward
    if deprecated:
        values = ", ".join(["" if forward is None else "forward", *(f"{argument}=..." for argument in deprecated)])
        new = f"forward=ForwardSpec({values.removeprefix(', ')})"
        warnings.warn(
            f"register_attention({name!r}, {'=, '.join(deprecated)}=) is now {new}", RenamedWarning, stacklevel=3
        )
    return ForwardSpec(forward, **deprecated)


def unregister_attention(name: str) -> None:
    """Forget a registered name, also in transformers.

    Raises:
        ValueError: the name is not registered, or the library's own.
    """
    _register_entry_points()
    defaults.registry.unregister(name)


def registered_attention() -> dict[str, AttentionName]:
    """The registered names in the order of registration; while installed, those of the library included.

    Also those of other distributions' entry points.
    """
    _register_entry_points()
    return defaults.registry.names()


def attention_function(name: str) -> AttentionForward:
    """The attention function of a kernel or a registered name, for a wrapper that is registered as another name's `forward`.

    Examples:
        >>> inner = attention_function("flash_attention_2")
        >>> def forward(module, query, key, value, attention_mask, **kwargs):
        ...     return inner(module, query, key, value, attention_mask, **kwargs)
        >>> register_attention("my_flash_attention", kernel="flash_attention_2", forward=forward)
        >>> unregister_attention("my_flash_attention")

    Returns:
        A function called as transformers calls its own. Nothing needs to be installed. It takes a
        padding mask (batch, kv_length), any 4D mask that its kernel takes, or None for no padding. With a transformers or torch
        that isn't supported it raises a `KernelUnavailableError`.

    Raises:
        ValueError: `name` is neither a kernel nor registered.
    """
    from .attention.tables import forward_of

    entry = _entry_of(name)
    if reason := unsupported_because(Environment.detect()):
        return refusing(partial(refusal, name, reason))
    return forward_of(entry)


def mask_function(name: str) -> MaskFunction:
    """The mask function that belongs to `attention_function`: called as those of ``ALL_MASK_ATTENTION_FUNCTIONS``.

    Raises:
        ValueError: `name` is neither a kernel nor registered.
    """
    from .attention.tables import mask_function_of

    entry = _entry_of(name)
    if reason := unsupported_because(Environment.detect()):
        return refusing(partial(refusal, name, reason))
    return mask_function_of(entry)


def _entry_of(name: str) -> AttentionName:
    """A registered name, or a kernel as the name it would be."""
    entry = registered_attention().get(name)
    return entry if entry is not None else AttentionName(name, as_kernel(name))


def _register_entry_points() -> dict[str, str]:
    """Register the attention names of other distributions' entry points, once a process.

    Returns:
        The error by name of each entry point that could not be registered.
    """
    if getattr(defaults.registry.reading, "active", False):  # by an entry point's own code, as by `attention_function`
        return {}
    defaults.registry.reading.active = True
    try:
        return _from_entry_points()
    finally:
        defaults.registry.reading.active = False


@cache
def _from_entry_points() -> dict[str, str]:
    broken = {}
    for point in in_order(entry_points(group=ENTRY_POINT_GROUP)):
        if point.name in defaults.registry.names():  # the program's own registration
            continue
        try:
            declared = point.load()
            arguments = declared() if callable(declared) else declared
            with defaults.registry.declaring:  # not while it is imported
                if point.name not in defaults.registry.names():
                    register_attention(point.name, **arguments)
                    defaults.registry.declared.add(point.name)
        except Exception as error:  # another project's package; ours must go on
            broken[point.name] = (
                f"its entry point {point.value} could not be registered: {type(error).__name__}: {error}"
            )
    return broken


def _with_attention(result: report.InstallationReport) -> Report:
    broken = _register_entry_points()  # before the names are read
    chosen = {
        name: {str(needs): member.name for needs, member in entry.kernel.chosen.items()}
        for name, entry in defaults.registry.names().items()
        if isinstance(entry.kernel, LayeredKernel)
    }
    states = {**broken, **defaults.registry.states()}
    if reason := unsupported_because(result.environment):
        states = dict.fromkeys(states, f"can't be used: {reason}")
    return Report(**vars(result), attention=states, chosen=chosen, torch_flash_backend=torch_flash_backend())

"""Every error that reblock raises for something its caller can act on.

    ReblockError                        exit code 1
    |-- UsageError (ValueError)         2, what was asked makes no sense
    |   |-- InvalidBudget                  a memory budget that cannot be read
    |   |-- InvalidBlockCount              a block count that is no whole number in range
    |   |-- InvalidOption                  an unknown or unsupported option, or a bad value of one
    |   |   `-- UnknownDevice              a device name that is in no table
    |   |-- NoPreviousCount                going back where no change is recorded
    |   |-- ModuleNeeded                   no module, or an unknown one, of an artifact of several
    |   `-- InvalidDestination             a destination that is the source or lies inside it
    |-- DoesNotFit (ValueError)         3, what was asked makes sense but there is no room for it
    |   |-- BudgetAboveDevice              a budget above what the device has
    |   |-- BudgetTooSmall                 a budget that does not hold even the smallest cache
    |   |-- BelowMinimum                   fewer blocks than programs or live requests need
    |   `-- RequestTooLarge                a generation request that could never be served
    |-- BadArtifact                     4, the artifact on disk is not as it must be
    |   |-- NotAnArtifact                  not a directory, or one without rbln_config.json
    |   |-- CorruptArtifact                a file is missing, cut off or not valid
    |   |-- UnknownFormat                  written in a format that this version does not know
    |   |-- ArtifactMismatch               files of one artifact contradict each other
    |   |-- HostMismatch                   compiled for another processor or another torch
    |   `-- NotResizable (ValueError)      no cache in it can change its size
    |-- InvalidLogits (RuntimeError)    4, no token can be chosen from what the programs computed
    |-- UnsupportedModel                1, a model that cannot be compiled
    |-- MissingDependency               1, a package that the command needs is not installed
    |-- CompilerTooOld (RuntimeError)   1, the installed compiler lacks a method
    |-- DestinationExists               1, the destination is there and is not empty
    |-- EditFailed                      1, the system refused a write; the artifact is unchanged
    |-- ArtifactBusy                    1, another command edits the artifact
    `-- CompileFailed                   1, the compiler gave up

A class stands for one decision that a caller can take and carries, as attributes, the data to
take it with. Messages stand where they are raised. They say what was asked, what the limit is,
what would fit and which option to change.

The module imports nothing, because `reblock get` has to start about as fast as Python does.
"""

# ruff: noqa: N818 - a name says what is wrong (`BudgetTooSmall`); "Error" would add nothing


class ReblockError(Exception):
    """Base of all errors of reblock; `exit_code` is what the command line exits with."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders when programs are compiled side by side. The default way
        # would call the class with the message alone and fail on its keyword arguments.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    cls: type[ReblockError], args: tuple[object, ...], state: dict[str, object]
) -> ReblockError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def shown(value: object) -> str:
    """Return `repr(value)` for a message, cut off where it is long.

    >>> shown(10**5000)
    'a value of very many digits'
    """
    try:
        text = repr(value)
    except ValueError:  # what Python raises for more than 4,300 digits
        return "a value of very many digits"
    return text if len(text) <= 60 else f"{text[:60]}..."


class UsageError(ReblockError, ValueError):
    """What was asked makes no sense, whatever the artifact or the device."""

    exit_code = 2


class InvalidBudget(UsageError):
    """A memory budget that cannot be read; `budget` is the value as it was given."""

    def __init__(self, message: str, *, budget: object) -> None:
        super().__init__(message)
        self.budget = budget


class InvalidBlockCount(UsageError):
    """A block count that is no whole number in range; `num_blocks` is the value as given."""

    def __init__(self, message: str, *, num_blocks: object) -> None:
        super().__init__(message)
        self.num_blocks = num_blocks


class InvalidOption(UsageError):
    """An option that is unknown or unsupported, or whose value is not accepted.

    `option` is its name as given; `nearest` is the known name most like it, or None.
    """

    def __init__(self, message: str, *, option: str, nearest: str | None = None) -> None:
        super().__init__(message)
        self.option = option
        self.nearest = nearest


class UnknownDevice(InvalidOption):
    """A device name that is in no table; `device` is the name, `known` are the known ones."""

    def __init__(self, message: str, *, device: str, known: tuple[str, ...]) -> None:
        super().__init__(message, option="npu")
        self.device = device
        self.known = known


class NoPreviousCount(UsageError):
    """The count before the last change is asked for, but the artifact `path` records none."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class ModuleNeeded(UsageError):
    """No module, or an unknown one, of an artifact of several; `modules` are those with a cache."""

    def __init__(self, message: str, *, modules: tuple[str, ...]) -> None:
        super().__init__(message)
        self.modules = modules


class InvalidDestination(UsageError):
    """A destination that is the source itself or lies inside it; `path` is the destination."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class DoesNotFit(ReblockError, ValueError):
    """What was asked makes sense, but there is no room for it."""

    exit_code = 3


class BudgetAboveDevice(DoesNotFit):
    """A budget above the memory that one device has available, both in bytes."""

    def __init__(self, message: str, *, budget_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.available_bytes = available_bytes


class BudgetTooSmall(DoesNotFit):
    """A budget that does not hold even the smallest cache the compiled programs can run with.

    `needed_bytes` is what the tightest chiplet would have to hold and `tightest` says which one
    that is, as (node, chiplet). `budget_bytes`, `available_bytes` and `smallest_budget_bytes`
    are of a whole device; where the last is above `available_bytes`, no budget works.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int,
        tightest: tuple[int, int],
        budget_bytes: int,
        available_bytes: int,
        smallest_budget_bytes: int,
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.tightest = tightest
        self.budget_bytes = budget_bytes
        self.available_bytes = available_bytes
        self.smallest_budget_bytes = smallest_budget_bytes


class BelowMinimum(DoesNotFit):
    """Fewer blocks than are needed: `num_blocks` is below `num_min_blocks`.

    The compiled programs need so many, or a request that an engine has accepted already.
    """

    def __init__(self, message: str, *, num_blocks: int, num_min_blocks: int) -> None:
        super().__init__(message)
        self.num_blocks = num_blocks
        self.num_min_blocks = num_min_blocks


class RequestTooLarge(DoesNotFit):
    """A request of `num_tokens` (prompt and answer) where at most `max_tokens` can be served."""

    def __init__(self, message: str, *, num_tokens: int, max_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class BadArtifact(ReblockError):
    """Something on disk is not as it must be; `path` is the file or directory at fault.

    The path is put in front of the message, so that no message can forget it.
    """

    exit_code = 4

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class NotAnArtifact(BadArtifact):
    """The path is not a directory, or a directory without `rbln_config.json`."""


class CorruptArtifact(BadArtifact):
    """A file of the artifact is missing, cut off or not valid."""


class UnknownFormat(BadArtifact):
    """The artifact is written in a format that this version of reblock does not know."""


class ArtifactMismatch(BadArtifact):
    """Files of one artifact contradict each other."""


class HostMismatch(BadArtifact):
    """The artifact was compiled for another processor or another version of torch."""


class NotResizable(BadArtifact, ValueError):
    """No cache of the artifact can change its size."""


class InvalidLogits(ReblockError, RuntimeError):
    """Logits that no token can be chosen from, as they are not a number or infinite."""

    exit_code = 4


class UnsupportedModel(ReblockError):
    """A model that cannot be compiled; `model` is its id or path as given."""

    def __init__(self, message: str, *, model: str) -> None:
        super().__init__(message)
        self.model = model


class MissingDependency(ReblockError):
    """A package that is not installed; `install` is the command line that installs it."""

    def __init__(self, message: str, *, package: str, install: str) -> None:
        super().__init__(message)
        self.package = package
        self.install = install


class CompilerTooOld(ReblockError, RuntimeError):
    """The installed compiler lacks `method`; a newer one has it."""

    def __init__(self, message: str, *, method: str) -> None:
        super().__init__(message)
        self.method = method


class DestinationExists(ReblockError):
    """The destination `path` is there already and is not an empty directory."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class EditFailed(ReblockError):
    """The system refused a write at `path`; the artifact itself is unchanged."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class ArtifactBusy(ReblockError):
    """Another command edits the artifact `path`; `holder` says which, as far as it is known."""

    def __init__(self, message: str, *, path: str, holder: str) -> None:
        super().__init__(message)
        self.path = path
        self.holder = holder


class CompileFailed(ReblockError):
    """The compiler gave up on a program."""

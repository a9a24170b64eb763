"""Every error this project raises on purpose.

::

    T5TrainError
    ├── SpecError                RunChanged
    ├── InputError               DigestMismatch, UnlistedFile
    ├── RecordError
    ├── UnknownVersion
    ├── StorageError             Unreadable
    ├── RunLocked                RunOwned
    ├── AcceleratorBusy
    ├── WorkerLost
    ├── HostError                HostUnreachable (HostMisconfigured), HostKeyMismatch, HostTimeout, NotGathered,
    │                            ProtocolMismatch, RemoteFailed
    ├── BadMessage
    ├── PreflightError
    ├── TestClusterError
    ├── LaunchError              OutOfMemory, CollectiveTimeout, RankKilled, RankStopped, HostLost, Preempted, DiskFull,
    │                            DiskFailed, HostReplaced, RepeatedFailure
    ├── TrainingError            NonFiniteLoss, TooManySkippedSteps, DuplicateBatch, WeightsDidNotMove, RanksDisagree
    ├── ConsolidationError       IncompleteCheckpoint (NothingVerifies), UnknownLayout
    ├── CertificationError
    ├── PublicationError         StoreError
    └── RegressionError          RegressionUsage, RegressionRunning

A message names the value, the constraint it breaks and the remedy. ``retryable`` says whether retrying can
help; an error in a spec or an input stays an error.
"""

from collections.abc import Iterable
from typing import ClassVar


def encodable(text: str) -> str:
    r"""Return a text with bytes that are not UTF-8, as in names of files, shown as escapes such as ``\udce9``.

    Otherwise Prefect, JSON and files in UTF-8 refuse the whole text.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(name: str) -> str:
    r"""Return the name of a file in one line, with escapes for control characters and bytes that are not UTF-8."""
    return "".join(each if each.isprintable() else _escape(each) for each in name)


def _escape(character: str) -> str:
    code = ord(character)
    is_byte = 0xDC80 <= code <= 0xDCFF  # that is how Python holds bytes of names that are not UTF-8
    return f"\\x{code - 0xDC00:02x}" if is_byte else character.encode("unicode_escape").decode()


class T5TrainError(Exception):
    """Base class of all deliberate errors; the message can be shown to a user unchanged."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 70
    """Exit code of the command that ends with this error. Never 1, which says that a check found something."""

    def __init__(self, message: str, hosts: Iterable[str] = ()) -> None:
        """``hosts`` are the hosts that the error is about, if they are known."""
        super().__init__(encodable(message))
        self.hosts = tuple(hosts)


class SpecError(T5TrainError):
    """A setting is unknown, of the wrong type, or contradicts another."""

    exit_code = 2


class RunChanged(SpecError):
    """A run of this name exists on disk with another spec."""


class InputError(T5TrainError):
    """A file, folder or URL from the user cannot be used."""

    exit_code = 4


class DigestMismatch(InputError):
    """A file's size or sha256 differs from the recorded one."""


class UnlistedFile(InputError):
    """A checkpoint holds a file that no rank recorded and that DeepSpeed would unpickle."""


class RecordError(T5TrainError):
    """A manifest is missing, damaged or of another kind."""

    exit_code = 4


class UnknownVersion(T5TrainError):
    """A file is intact, but has a schema version or a field that this version of the project does not know."""

    exit_code = 4


class StorageError(T5TrainError):
    """A folder is not writable, or has too little disk space for what is to be written."""

    exit_code = 5


class Unreadable(StorageError):
    """The operating system cannot read a file or folder at the moment, so nothing is known about its content.

    So the file or folder must not be removed, made again or replaced by an older one.
    """

    retryable = True


class RunLocked(T5TrainError):
    """Another live process is working on this run."""

    exit_code = 6


class RunOwned(RunLocked):
    """The files of this run on its hosts belong to another head, or to a run of another root."""


class AcceleratorBusy(T5TrainError):
    """Another live run of this user is using an accelerator."""

    exit_code = 6


class WorkerLost(T5TrainError):
    """A worker process of a stage was killed or failed."""

    exit_code = 8
    retryable = True


class HostError(T5TrainError):
    """A host did not do what it was asked to do."""

    exit_code = 7

    @property
    def is_transient(self) -> bool:
        """Whether the host may do it later, as nothing is wrong with its settings, or with those of this machine."""
        return bool(self.hosts) and self.retryable and not isinstance(self, HostMisconfigured)


class HostUnreachable(HostError):
    """A connection to a host could not be made, or was lost."""

    retryable = True


class HostMisconfigured(HostUnreachable):
    """A host's configuration is wrong: its name, who may log in there, or how ssh connects to it."""


class HostKeyMismatch(HostError):
    """A host's ssh key differs from its known key, or is not known at all."""


class HostTimeout(HostError):
    """A host did not finish in time."""

    retryable = True


class NotGathered(HostError):
    """Training is done, but a host was lost before the head had gathered the whole result."""

    exit_code = 3


class ProtocolMismatch(HostError):
    """A host and the head do not understand each other's messages: they run different versions of this project."""


class RemoteFailed(HostError):
    """A command that ran on a host failed. If an error of this project made it fail, that error is the cause."""

    def __init__(self, message: str, hosts: Iterable[str] = (), stderr: bytes = b"") -> None:
        """``stderr`` is what the command wrote to standard error."""
        super().__init__(message, hosts)
        self.stderr = stderr


class BadMessage(T5TrainError):
    """A message from another machine is not one that is expected here: its fields differ, or it is not a message."""

    exit_code = 7


class PreflightError(T5TrainError):
    """The hosts of a run cannot train together as they are."""

    exit_code = 7


class TestClusterError(T5TrainError):
    """Hosts of the test cluster cannot be created on this machine, or do not exist."""

    exit_code = 7
    __test__ = False  # keeps pytest from collecting this class


class LaunchError(T5TrainError):
    """Ranks could not be started, or ended before their work was done."""

    exit_code = 8
    retryable = True


class OutOfMemory(LaunchError):
    """A rank asked for more memory than its accelerator or its host has."""

    retryable = False


class CollectiveTimeout(LaunchError):
    """Ranks timed out waiting for each other."""


class RankKilled(LaunchError):
    """A signal ended a rank."""


class RankStopped(LaunchError):
    """A rank sent no heartbeat, or a phase of its work exceeded its deadline."""


class HostLost(LaunchError):
    """A host, or the connection to it, was lost while its ranks were running."""


class Preempted(LaunchError):
    """The ranks were asked to stop, and saved a checkpoint if there was time; the run resumes from it."""


class DiskFull(LaunchError):
    """A rank could not write: its disk is full."""

    retryable = False


class DiskFailed(LaunchError):
    """A rank's disk returned an error, or its file system became read-only."""


class HostReplaced(LaunchError):
    """A host failed repeatedly with an error that is not retried on the same host; a spare replaces it."""


class RepeatedFailure(LaunchError):
    """Every retry ended with the same failure."""

    retryable = False


class TrainingError(T5TrainError):
    """Training ran, but did not make real progress."""

    exit_code = 9


class NonFiniteLoss(TrainingError):
    """The loss is NaN or infinite."""


class TooManySkippedSteps(TrainingError):
    """The loss scaler skipped too many optimizer steps."""


class DuplicateBatch(TrainingError):
    """Two ranks were given the same samples."""


class WeightsDidNotMove(TrainingError):
    """Optimizer steps were reported, but the fp32 weights did not change."""


class RanksDisagree(TrainingError):
    """Ranks resumed from different steps, tags or runs."""


class ConsolidationError(T5TrainError):
    """A checkpoint cannot be turned into fp32 weights."""

    exit_code = 10


class IncompleteCheckpoint(ConsolidationError):
    """A checkpoint lacks files, or its files are not of one run, step and layout."""


class NothingVerifies(IncompleteCheckpoint):
    """A run has checkpoints, but none is complete and intact, so it neither resumes nor restarts by itself."""


class UnknownLayout(ConsolidationError):
    """A checkpoint has a structure that this project does not support."""


class CertificationError(T5TrainError):
    """The exported model differs from what training recorded of it: weights, logits, tokenizer or configuration."""

    exit_code = 11


class PublicationError(T5TrainError):
    """A published folder is incomplete, damaged, or holds something else."""

    exit_code = 12


class StoreError(PublicationError):
    """An object store refused a request, or did not answer."""

    def __init__(self, message: str, hosts: Iterable[str] = (), code: str = "") -> None:
        """``code`` is the store's own code for the error, such as ``NoSuchKey``, or the name of the client's error."""
        super().__init__(message, hosts)
        self.code = code


class RegressionError(T5TrainError):
    """A night of the regression cannot be run, there is none to show or accept, or its files are damaged."""

    exit_code = 4


class RegressionUsage(RegressionError):
    """A case, a night or another argument of the regression is not valid."""

    exit_code = 2


class RegressionRunning(RegressionError):
    """Another night is running under the same root."""

    exit_code = 6


def error_of(name: str, message: str) -> T5TrainError:
    """Return the error that another process reported by class name; a T5TrainError if there is no such class."""
    kind = globals().get(name)
    return (kind if isinstance(kind, type) and issubclass(kind, T5TrainError) else T5TrainError)(message)

"""Every error this project raises on purpose.

::

    T5TrainError
    ├── SpecError                a setting is unknown, of the wrong type, or contradicts another
    │   └── RunChanged           a run of this name exists with another spec
    ├── InputError               what the user handed in cannot be used
    │   ├── DigestMismatch       a file is not the one that was recorded
    │   └── UnlistedFile         a checkpoint holds a file that no rank recorded
    ├── RecordError              a manifest is absent, damaged or of another kind
    ├── UnknownVersion           an intact file was written by a version of this project that has other fields
    ├── StorageError             a folder cannot be written, or is too small for what is to come
    │   └── Unreadable           the operating system cannot read a file or folder at the moment
    ├── RunLocked                another process is working on this run
    │   └── RunOwned             its files on the hosts belong to another head
    ├── AcceleratorBusy          another run is using an accelerator
    ├── WorkerLost               a process that shared a stage's work was killed or failed
    ├── HostError                a host does not answer as it should
    │   ├── HostUnreachable
    │   │   └── HostMisconfigured  not for want of an answer, but by what is set
    │   ├── HostKeyMismatch
    │   ├── HostTimeout          not done in time
    │   ├── NotGathered          training is done; what a host has of its result is still there alone
    │   └── RemoteFailed         a command failed there
    ├── PreflightError           hosts that cannot train together
    ├── TestClusterError         hosts of the test cluster cannot be made here, or are not there
    ├── LaunchError              ranks could not be started, or ended before their work was done
    │   ├── OutOfMemory          of the accelerator or the host
    │   ├── CollectiveTimeout    ranks waited for each other in vain
    │   ├── RankKilled           by a signal
    │   ├── RankStopped          no sign of life, or a phase took longer than its deadline
    │   ├── HostLost             a host, or the way to it
    │   ├── Preempted            told to end, with time to save
    │   ├── DiskFull
    │   ├── DiskFailed           or was mounted read-only
    │   ├── HostReplaced         by a spare, after it has failed repeatedly
    │   └── RepeatedFailure      the same, again and again
    ├── TrainingError            training went on, but not honestly
    │   ├── NonFiniteLoss
    │   ├── TooManySkippedSteps
    │   ├── DuplicateBatch
    │   ├── WeightsDidNotMove
    │   └── RanksDisagree
    ├── ConsolidationError       a checkpoint cannot be turned into weights
    │   ├── IncompleteCheckpoint
    │   │   └── NothingVerifies  a run has checkpoints, and none of them is complete and intact
    │   └── UnknownLayout
    ├── CertificationError       the exported model is not the one that was trained
    └── PublicationError         a published folder is incomplete, damaged or in the way

A message names the value, the constraint it breaks and the remedy. ``retryable`` says whether trying the
same thing again can help; what is wrong in a spec or an input stays wrong.
"""

from collections.abc import Iterable
from typing import ClassVar


class T5TrainError(Exception):
    """Base of all deliberate errors; its text is fit to show to a user as it is."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    """Of the command that it ends."""

    def __init__(self, message: str, hosts: Iterable[str] = ()) -> None:
        """``hosts`` are those that it is about, where it is known which."""
        super().__init__(message)
        self.hosts = tuple(hosts)


class SpecError(T5TrainError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class RunChanged(SpecError):
    """A run of this name exists on disk with another spec."""


class InputError(T5TrainError):
    """A file, folder or URL handed in cannot be used."""


class DigestMismatch(InputError):
    """A file's size or sha256 is not the recorded one."""


class UnlistedFile(InputError):
    """A checkpoint holds a file that no rank recorded, and that DeepSpeed would unpickle."""


class RecordError(T5TrainError):
    """A manifest is absent, damaged or of another kind."""


class UnknownVersion(T5TrainError):
    """A file is intact, but has a schema version or a field that this version of the project does not know."""


class StorageError(T5TrainError):
    """A folder cannot be written, or is too small for what is to come."""


class Unreadable(StorageError):
    """The operating system cannot read a file or folder at the moment, so nothing is known about its content.

    That is never a reason to remove it, to make it again, or to use something older in its place.
    """

    retryable = True


class RunLocked(T5TrainError):
    """Another live process is working on this run."""


class RunOwned(RunLocked):
    """The files of this run on its hosts belong to a run of another root."""


class AcceleratorBusy(T5TrainError):
    """Another live run of this user is using an accelerator."""


class WorkerLost(T5TrainError):
    """A process that shared a stage's work was killed or failed."""

    retryable = True


class HostError(T5TrainError):
    """A host does not answer as it should."""


class HostUnreachable(HostError):
    """No connection to a host came about, or it broke off."""

    retryable = True


class HostMisconfigured(HostUnreachable):
    """What is set about a host is wrong: its name, who may log in there, or how ssh is to."""


class HostKeyMismatch(HostError):
    """A host shows another key than the one that is known of it, or one that nobody knows."""


class HostTimeout(HostError):
    """A host did not do in time what it was asked to do."""

    retryable = True


class NotGathered(HostError):
    """Training is done, but a host was lost before the head had all of the result."""

    exit_code = 3


class RemoteFailed(HostError):
    """A command ran on a host, and failed there."""


class PreflightError(T5TrainError):
    """The hosts of a run cannot train together as they are."""


class TestClusterError(T5TrainError):
    """Hosts of the test cluster cannot be made on this machine, or are not there."""

    __test__ = False  # pytest takes every class named Test* for one of tests


class LaunchError(T5TrainError):
    """Ranks could not be started, or ended before their work was done."""

    retryable = True


class OutOfMemory(LaunchError):
    """A rank asked for more memory than its accelerator or its host has."""

    retryable = False


class CollectiveTimeout(LaunchError):
    """Ranks waited for each other in vain."""


class RankKilled(LaunchError):
    """A signal ended a rank."""


class RankStopped(LaunchError):
    """A rank gave no sign of life, or a phase of its work took longer than its deadline."""


class HostLost(LaunchError):
    """A host, or the way to it, was lost while its ranks were at work."""


class Preempted(LaunchError):
    """The ranks were told to end, and saved a checkpoint where there was time; the run goes on from it."""


class DiskFull(LaunchError):
    """A rank could not write: its disk is full."""

    retryable = False


class DiskFailed(LaunchError):
    """A rank's disk returned an error, or its file system was made read-only."""


class HostReplaced(LaunchError):
    """A host failed repeatedly in a way that is not tried again there; a spare takes its place."""


class RepeatedFailure(LaunchError):
    """Trying again has led to the same failure each time."""

    retryable = False


class TrainingError(T5TrainError):
    """Training went on, but what it did was not honest progress."""


class NonFiniteLoss(TrainingError):
    """The loss is NaN or infinite."""


class TooManySkippedSteps(TrainingError):
    """The loss scaler threw away more optimizer steps than can be called training."""


class DuplicateBatch(TrainingError):
    """Two ranks were given the same samples."""


class WeightsDidNotMove(TrainingError):
    """Optimizer steps were reported, yet the fp32 weights are what they were."""


class RanksDisagree(TrainingError):
    """Ranks resumed from different steps, tags or runs."""


class ConsolidationError(T5TrainError):
    """A checkpoint cannot be turned into fp32 weights."""


class IncompleteCheckpoint(ConsolidationError):
    """A checkpoint lacks files, or its files are not of one run, step and layout."""


class NothingVerifies(IncompleteCheckpoint):
    """A run has checkpoints, and none of them is complete and intact: it neither resumes nor starts again unasked."""


class UnknownLayout(ConsolidationError):
    """A checkpoint has a structure this project has no proven rule for."""


class CertificationError(T5TrainError):
    """The exported model does not reproduce what the training engine recorded."""


class PublicationError(T5TrainError):
    """A published folder is incomplete, damaged, or holds something else."""

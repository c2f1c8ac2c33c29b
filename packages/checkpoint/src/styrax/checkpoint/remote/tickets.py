"""What a save gives that ends in a bucket."""

from __future__ import annotations

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.pending import Ticket
from styrax.checkpoint.remote.upload import Uploader


class MirrorTicket:
    """What `TieredStore.save` gives: a save to the folder, and the upload that follows it.

    Args:
        ticket: Of the save.
        uploads: Of the store; `None` on processes that do not upload.

    Attributes:
        step: The step.
        skipped: Whether nothing is saved, because another save was going on (`on_busy="skip"`).
        saved: The ticket of the save.
    """

    def __init__(self, ticket: Ticket, uploads: Uploader | None) -> None:
        self.step, self.skipped = ticket.step, ticket.skipped
        self.saved, self._uploads = ticket, uploads

    def staged(self) -> None:
        """Return when the arrays may be donated, changed or deleted: `save` has seen to that before it returned."""

    def committed(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is whole and on the disk; see `Ticket.committed`."""
        self.saved.committed(timeout)

    def uploaded(self, timeout: float | None = None) -> bool:
        """Return when the checkpoint is whole in the bucket as well.

        Args:
            timeout: Seconds to wait at most, for each of the two; without end by default.

        Returns:
            Whether it is there: not where the mirror takes only other steps, or gave it up for newer ones.

        Raises:
            CheckpointError: It cannot be saved, or it takes longer than `timeout`; it goes on then. What went wrong
                with the upload is raised by the next call of the store.
        """
        self.saved.committed(timeout)
        if self._uploads is None:
            return False
        if not self._uploads.wait(self.step, timeout):
            raise CheckpointError(f"step {self.step} is not uploaded after {timeout} s; it goes on, ask again")
        return self.step in self._uploads.uploaded

    @property
    def done(self) -> bool:
        """Whether the checkpoint is not being written to the folder any more, well or not."""
        return self.saved.done


class BucketTicket(MirrorTicket):
    """What `BucketStore.save` gives: committed means uploaded."""

    def committed(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is whole in the bucket.

        Args:
            timeout: Seconds to wait at most; without end by default.

        Raises:
            CheckpointError: It cannot be written there, it was skipped, or it takes longer; it goes on then.
        """
        if not self.uploaded(timeout) and self._uploads is not None:
            raise CheckpointError(f"step {self.step} is not uploaded: {self._uploads.problem(self.step)}")

    @property
    def done(self) -> bool:
        """Whether nothing is going on any more, well or not."""
        return self.saved.done and (self._uploads is None or self._uploads.wait(self.step, 0))

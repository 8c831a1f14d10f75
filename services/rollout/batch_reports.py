"""Reports kept batches: from a batch to its values for the metrics service, and to the samples for the user's hook."""

from furlong.records import decode_value
from services.rollout.batch_store import KeptBatch
from services.rollout.feed import PromptFeed
from services.rollout.reporting import Reporter
from services.rollout.sample_view import Sample, view_sample
from services.rollout.unfinished_reports import Report


class BatchReports:
    """The reports of batches."""

    def __init__(self, reporter: Reporter, feed: PromptFeed) -> None:
        self._reporter, self._feed = reporter, feed

    def note(self, batch: KeptBatch) -> None:
        """Before the batch is kept: should this service be killed before its report is sent, the next start sends it.

        Any thread; blocks.
        """
        self._reporter.note_rollout(self._report(batch))

    def send(self, batch: KeptBatch) -> None:
        """Once the batch is kept."""
        self._reporter.report_rollout(
            self._report(batch),
            samples=lambda: views_of(batch, self._feed),
            rollout_time_s=batch.summary.rollout_time_s,
        )

    def _report(self, batch: KeptBatch) -> Report:
        values = {name: decode_value(value) for name, value in batch.values.items()}
        return self._reporter.rollout_report(batch.rollout_id, values, attempt=batch.attempt)


def views_of(batch: KeptBatch, feed: PromptFeed) -> list[Sample]:
    """Copies of a batch's samples, as a hook gets them."""
    told = batch.details or [[None] * len(group.samples) for group in batch.groups]
    return [
        view_sample(
            sample,
            prompt=feed.prompt_at(group.prompt_index),
            group_index=group.group_index,
            group_size=len(group.samples),
            reward_details=details,
        )
        for group, of_group in zip(batch.groups, told, strict=True)
        for sample, details in zip(group.samples, of_group, strict=True)
    ]

"""The rows as TensorBoard event files, through a process of its own (tensorboard_process.py)."""

from collections.abc import Mapping

from services.metrics.rows import Row
from services.metrics.sinks.run_process import RunProcessSink
from services.metrics.sinks.sink import Sink, SinkContext, option_of


def make(options: Mapping[str, object], context: SinkContext) -> Sink[Row]:
    """Options: dir."""
    folder = context.path("dir", option_of(options, context, "dir", str, "tensorboard"))
    child = "services.metrics.sinks.tensorboard_process.TensorBoard"
    return RunProcessSink(child, {"dir": str(folder.absolute())}, context, write_timeout_s=120.0)

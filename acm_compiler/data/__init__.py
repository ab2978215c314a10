"""Data sets by kind, and batches of them in an order that can be resumed."""

from acm_compiler.data.batch import Batch, as_batch, left_out, refuse_no_batches
from acm_compiler.data.loading import BatchStream, count_examples
from acm_compiler.data.open_dataset import open_dataset

__all__ = ["Batch", "BatchStream", "as_batch", "count_examples", "left_out", "open_dataset", "refuse_no_batches"]

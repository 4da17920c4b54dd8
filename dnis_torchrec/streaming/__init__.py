"""Streaming: training data of any size, from Parquet and text files anywhere to TorchRec Batches."""

from dnis_torchrec.blocks.settings import CountLimits
from dnis_torchrec.streaming.batches import StreamedBatches, split_stream
from dnis_torchrec.streaming.counting import count_stream
from dnis_torchrec.streaming.parsed import ParsedStream
from dnis_torchrec.streaming.schema import StreamSchema
from dnis_torchrec.streaming.split import WHOLE, Part, cut

__all__ = [
    "WHOLE",
    "CountLimits",
    "ParsedStream",
    "Part",
    "StreamSchema",
    "StreamedBatches",
    "count_stream",
    "cut",
    "split_stream",
]

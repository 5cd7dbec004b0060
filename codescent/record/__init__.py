"""In: nothing. Out: the classes RunFolder and Table (metrics files), re-exported from the files of this package.
Does not know ranks: only rank 0 may call them. Does not import torch."""

from codescent.record.rows import METRICS_CSV as METRICS_CSV
from codescent.record.rows import METRICS_JSONL as METRICS_JSONL
from codescent.record.rows import Table as Table
from codescent.record.run_folder import CHECKPOINTS as CHECKPOINTS
from codescent.record.run_folder import CONFIG as CONFIG
from codescent.record.run_folder import METRICS as METRICS
from codescent.record.run_folder import TOKENIZER as TOKENIZER
from codescent.record.run_folder import RunFolder as RunFolder

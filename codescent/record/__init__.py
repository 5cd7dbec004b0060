"""In: nothing. Out: the run folder, and rows of metrics, re-exported from their files.
Does not know ranks: the caller writes on rank 0 alone. Needs no torch."""

from codescent.record.rows import METRICS_CSV as METRICS_CSV
from codescent.record.rows import METRICS_JSONL as METRICS_JSONL
from codescent.record.rows import Table as Table
from codescent.record.run_folder import CHECKPOINTS as CHECKPOINTS
from codescent.record.run_folder import CONFIG as CONFIG
from codescent.record.run_folder import METRICS as METRICS
from codescent.record.run_folder import TOKENIZER as TOKENIZER
from codescent.record.run_folder import RunFolder as RunFolder

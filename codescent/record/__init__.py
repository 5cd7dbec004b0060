"""In: nothing. Out: the classes RunFolder (writes and reads a run folder) and Table (appends rows to metrics files).
Does not know ranks: callers write on rank 0 only. Does not import torch."""

from codescent.record.rows import METRICS_CSV as METRICS_CSV
from codescent.record.rows import METRICS_JSONL as METRICS_JSONL
from codescent.record.rows import Table as Table
from codescent.record.run_folder import CHECKPOINTS as CHECKPOINTS
from codescent.record.run_folder import CONFIG as CONFIG
from codescent.record.run_folder import ENVIRONMENT as ENVIRONMENT
from codescent.record.run_folder import EVENTS as EVENTS
from codescent.record.run_folder import METRICS as METRICS
from codescent.record.run_folder import PLAN as PLAN
from codescent.record.run_folder import PREDICTION as PREDICTION
from codescent.record.run_folder import TOKENIZER as TOKENIZER
from codescent.record.run_folder import RunFolder as RunFolder

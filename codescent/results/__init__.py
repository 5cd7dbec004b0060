"""In: run folders, or the words of a `codescent train` command. Out: what the runs measured; runs that were started.
Does not write a run folder and never imports train: it reads the files that a run has left."""

from codescent.results.parts import PART_WORDS as PART_WORDS
from codescent.results.parts import PARTS as PARTS
from codescent.results.parts import Parts as Parts
from codescent.results.parts import parts_of_ranks as parts_of_ranks
from codescent.results.parts import parts_of_servers as parts_of_servers
from codescent.results.run import Run as Run
from codescent.results.run import State as State
from codescent.results.run import default_warmup as default_warmup
from codescent.results.run import differing as differing
from codescent.results.run import open_run as open_run
from codescent.results.run import open_runs as open_runs
from codescent.results.start import Ended as Ended
from codescent.results.start import stopped_by_signals as stopped_by_signals
from codescent.results.start import train_run as train_run
from codescent.results.statistics import Interval as Interval
from codescent.results.statistics import bootstrap as bootstrap
from codescent.results.statistics import median_of_many as median_of_many
from codescent.results.statistics import rate as rate
from codescent.results.statistics import spread as spread

"""In: a run's command, a cluster's site file. Out: scripts that start the run there, and control of such jobs.
Does not start ranks by itself (launch/ does) and knows nothing of plans."""

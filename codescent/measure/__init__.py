"""In: the ranks of a machine, or of several. Out: a cluster file of what they reach while all of them are busy.
Does not price a plan (cost/ does) and judges no machine (doctor/ does)."""

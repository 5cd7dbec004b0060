"""In: processes that a launcher has numbered. Out: which of them are the ranks of one start, and a store for them.
Does not need torch, starts no process and trains nothing."""

"""In: a config, as a file, a name or a dict. Out: runs and plans as objects, for programs and notebooks.
Does not train, plan or draw itself: the commands of verbs/ and the rooms below them do."""

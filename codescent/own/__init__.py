"""In: the user's module, optimizer, dataset and loop. Out: the same loop on any number of ranks; a name each.
Does not read a config, build a plan or own a loop: `codescent train` does. The names are in codescent/__init__.py."""

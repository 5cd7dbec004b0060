"""In: nothing. Out: what every room needs: the user's error, files that survive a kill, cores, this process's rank.
Does not know a model, a task, a strategy or a plan."""

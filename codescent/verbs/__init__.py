"""In: the words of a command line. Out: a verb done, and its exit code.
Does not hold what another room needs: nothing imports this one."""

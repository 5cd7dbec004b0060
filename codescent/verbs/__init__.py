"""In: a command line. Out: one subcommand ("verb": train, plan, data, ...) executed, and its exit code.
Does not contain code that other packages use: no package imports this one."""

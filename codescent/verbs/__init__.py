"""In: a command line. Out: one subcommand (train, plan, data, ...) executed, and its exit code.
Does not contain code for other packages: no package imports this one."""

"""Jobs: the work of each `dnis` command, as a function. The command line only parses; a notebook
calls these."""

"""Jobs: the work of each `dnis` command, as a function. The command line only parses; a notebook calls these.

Results are returned; progress goes to the console and TensorBoard through `dnis_torchrec.jobs.progress`.
"""

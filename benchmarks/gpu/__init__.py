"""Everything that is to be measured on a GPU, in one command that loses nothing when its time ends.

    python -m benchmarks.gpu [--minutes 8] [--steps NAME,NAME] --out DIR
    python -m benchmarks.gpu --stand-in --out DIR      # the same steps on a CPU, in small: tries the command itself

Every step is a process of its own with a share of the time; what one leaves passes on to those after it. Under DIR:

    figures.jsonl     one line a figure, appended as it is found; a later run into the same folder adds to it
    results.md        the same as tables, made anew after every step
    STEP.log          what the step printed; stacks of all its threads, if it crashed or hung
"""

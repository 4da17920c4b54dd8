"""Every method that a search is compared with, at equal served bytes, under the same rules.

    python -m benchmarks.rivals RECIPE --data D --sizes 8,20 --methods uniform,mde,search --out F.jsonl

A method is a function (`task.Task`) -> `task.Served`, in a file of its own; `methods.METHODS` lists
them.
"""

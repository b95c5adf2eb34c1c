"""`tilewright tune`: searches the configs of a pass for the fastest one that computes the right values.

space.py has the configs that may be tried, and search.py the order; pool.py and worker.py run them in processes of their
own, which the cases of a command share (crew.py); measure.py checks and times them, and estimate.py ranks them by their
compiled schedule; results.py keeps every line and writes the tables (core/tuned.py).
"""

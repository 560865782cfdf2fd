"""Fault injection: each call into a device, a driver, a library or the disk fails in a run on a simulated card.

`python -m tests.faults` runs it. It follows SQLite's `malloc_common.tcl` (fail the n-th call, once or from then on) and
TigerBeetle's VOPR (first safety; then, without the fault, the run must end as if there had been none).
"""

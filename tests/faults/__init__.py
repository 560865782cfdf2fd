"""Fault injection: each call into a device, a driver, a library or the disk fails in a run on a simulated card.

`python -m tests.faults` runs it. As in SQLite's `malloc_common.tcl`, the n-th call fails, once or from then on. As in
TigerBeetle's VOPR, safety comes first; then, without the fault, the run must end as if there had been none.
"""

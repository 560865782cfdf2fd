"""Each call into a device, a driver, a library or the disk fails in a run on a simulated card: python -m tests.faults

After SQLite's `malloc_common.tcl` (fail the n-th call, once or from then on) and TigerBeetle's VOPR (first safety, then
with the fault gone the run must end as if there had been none).
"""
